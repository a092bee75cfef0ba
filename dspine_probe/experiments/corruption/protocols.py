"""The three protocols, for one draft on one group of blocks (arXiv 2609.36173 gives a number and no protocol).

A. The anchor is slot 1's predecessor, and a wrong anchor is in distribution for any draft. Against it stand edits of
   earlier tokens, which reach the draft as context rows: the edited row alone, or all rows from it on re-run.
B. A draft trained on visible prefixes is shown the true tokens up to slot t − 1, and one of them is corrupted.
C. A DSpine receives true codes as messages in every slot and layer, and one slot receives a wrong code.

In B and C the corrupted token of slot i lies t − i places before successor t, and all places speak through one channel.
In A they do not: an earlier token is heard through the target's state behind it, which also holds what the target
expects next. Every protocol checks itself: exchanging a thing for itself must change nothing, and a causal block must
not pass anything backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts import DSpine
from dspine_probe.errors import ProbeError
from dspine_probe.experiments.corruption.bench import Bench, as_long_as, hide, send
from dspine_probe.experiments.corruption.blocks import FIRST, OWN, Distance
from dspine_probe.experiments.corruption.config import CorruptionConfig
from dspine_probe.experiments.corruption.scores import UNKNOWN, Judge, Key, Sheets
from dspine_probe.experiments.corruption.substitutes import RANK_2, ZERO
from dspine_probe.experiments.emergence.readings import Hooks

A, B, C = "A", "B", "C"
TOKEN, ROW, RERUN, MESSAGE = "token", "row", "rerun", "message"
UNEDITED, NOISE, CLEAN = "unedited", "noise", "clean"
"""Beside the kinds: the text re-run unchanged; a random vector as long as a rank-2 token's change; no edit at all."""


def site(distance: Distance) -> str:
    """How tables call the corrupted token's place, seen from its successor t."""
    return "first" if distance is FIRST else f"t−{distance}"


class AnchorProtocol:
    """Protocol A. Without `noise` its random vectors are left out."""

    def __init__(
        self, bench: Bench, config: CorruptionConfig, sheets: Sheets, noise: torch.Generator | None
    ) -> None:
        self.bench, self.config, self.sheets, self.noise = bench, config, sheets, noise
        self.clean = bench.logits(bench.hidden())
        self.judge = Judge(bench.draft, self.clean, bench.gold)

    def run(self) -> None:
        """Every kind at every place, and the controls."""
        for kind in self.config.kinds:
            anchor = self.bench.group.slots(kind)[:, 0]
            hooks = hide(self.bench.draft, 0) if kind == ZERO else ()
            shown = self.bench.hidden(anchor=anchor.clamp(min=0), hooks=hooks)
            self._enter(1, TOKEN, kind, self.bench.logits(shown), self.bench.group.choices(kind, 1))
            for distance, whole in self._context_edits(kind):
                self._exchange(kind, distance, whole)
        self._controls()

    def check_no_op(self) -> int:
        """Exchange every thing for itself; the number of ways tried.

        Raises:
            ProbeError: a score changed, if only in its last bit.
        """
        group = self.bench.group
        ways = [self.bench.hidden(anchor=group.slots(OWN)[:, 0])]
        for distance, whole in self._context_edits(RANK_2):
            ways.append(self.bench.hidden(rows=self.bench.own_rows(RANK_2, distance, whole=whole)))
        ways.append(self.bench.hidden())  # after all that, the context is what it was
        for hidden in ways:
            refuse_change(self.bench.logits(hidden), self.clean, "exchanging a token for itself")
        return len(ways)

    def _context_edits(self, kind: str) -> Iterator[tuple[Distance, bool]]:
        """Distances beyond the anchor; whether all rows from there on are exchanged, where that is more than one."""
        for distance in (*self.config.earlier, FIRST):
            yield distance, False
            if kind in self.config.rerun_kinds and distance != 2:
                yield distance, True

    def _exchange(self, kind: str, distance: Distance, whole: bool) -> None:
        hidden = self.bench.hidden(rows=self.bench.rerun_rows(kind, distance, whole=whole))
        asked = kind in self.config.rerun_kinds
        answers = self.bench.group.choices(kind, distance) if asked else None
        self._enter(distance, RERUN if whole else ROW, kind, self.bench.logits(hidden), answers)

    def _controls(self) -> None:
        bench, farthest = self.bench, self.config.farthest
        rows = bench.rerun_rows(OWN, farthest, whole=True)
        answers = bench.group.choices(OWN, farthest)
        self._enter(farthest, RERUN, UNEDITED, bench.logits(bench.hidden(rows=rows)), answers)
        if self.noise is None:
            return
        self._enter(1, TOKEN, NOISE, bench.logits(bench.hidden(hooks=bench.noise_anchor(self.noise))))
        for distance in (*self.config.earlier, FIRST):
            rows = bench.noise_rows(distance, self.noise)
            self._enter(distance, ROW, NOISE, bench.logits(bench.hidden(rows=rows)))

    def _enter(
        self,
        distance: Distance,
        edit: str,
        kind: str,
        logits: Float[Tensor, "block draft_slot draft_vocab"],
        answers: Int[Tensor, "block"] | None = None,
    ) -> None:
        """The target's `answers` follow the anchor, so they are about slot 1."""
        wanted = torch.full(self.bench.gold.shape, UNKNOWN)
        if answers is not None:
            wanted[:, 0] = answers
        fields = self.judge.compare(logits, wanted.to(self.bench.device))
        slots = range(1, self.bench.slots + 1)
        self.sheets.put(
            Key(A, site(distance), edit, kind), fields, slots, self.bench.group.measurable(distance)
        )


class PrefixProtocol:
    """Protocol B, for a draft trained on visible prefixes.

    backwards: the largest change of a state before the corrupted slot; a bidirectional block may show some.
    """

    def __init__(self, bench: Bench, config: CorruptionConfig, sheets: Sheets) -> None:
        self.bench, self.config, self.sheets = bench, config, sheets
        self.backwards = 0.0

    def run(self) -> None:
        """Every successor, kind and place; and, with nothing shown, every slot (for comparison with the parent)."""
        bench = self.bench
        nothing_shown = bench.logits(bench.hidden())
        judge = Judge(bench.draft, nothing_shown, bench.gold)
        unknown = torch.full_like(bench.gold, UNKNOWN)
        every = range(1, bench.slots + 1)
        self.sheets.put(Key(B, "none", TOKEN, CLEAN), judge.compare(nothing_shown, unknown), every)
        for successor in every:
            self._successor(successor)

    def _successor(self, t: int) -> None:
        bench, one = self.bench, slice(t - 1, t)
        clean = self._hidden(t, bench.tokens)
        judge = Judge(bench.draft, bench.logits(clean, one), bench.gold[:, one])
        for kind in self.config.kinds:
            for distance, slot in corrupted_slots(t, self.config.earlier):
                shown = bench.tokens.clone()
                shown[:, slot] = bench.group.slots(kind)[:, slot].to(bench.device)
                hooks = hide(bench.draft, slot) if kind == ZERO else ()
                hidden = self._hidden(t, shown.clamp(min=0), hooks)
                self._look_back(hidden, clean, slot)
                self._enter(judge, t, distance, kind, hidden)

    def check_no_op(self) -> int:
        """Show the true prefix twice, before every successor; the number of ways tried.

        Raises:
            ProbeError: a score changed, if only in its last bit.
        """
        for t in range(1, self.bench.slots + 1):
            own = self.bench.group.slots(OWN).to(self.bench.device)
            refuse_change(
                self._hidden(t, own), self._hidden(t, self.bench.tokens), "exchanging a token for itself"
            )
        return self.bench.slots

    def _hidden(self, t: int, tokens: Tensor, hooks: Hooks = ()) -> Tensor:
        """A pass that shows `tokens` in the slots before t."""
        slots = torch.arange(1, self.bench.slots + 1, device=self.bench.device)
        visible = torch.where(slots < t, tokens[:, 1:], -1)
        return self.bench.hidden(anchor=tokens[:, 0], visible=visible, hooks=hooks)

    def _look_back(self, hidden: Tensor, clean: Tensor, slot: int) -> None:
        if self.bench.draft.config.is_causal:
            refuse_change(hidden[:, :slot], clean[:, :slot], "a corrupted slot of a causal block")
        elif slot > 0:
            change = float((hidden[:, :slot] - clean[:, :slot]).abs().max())
            self.backwards = max(self.backwards, change)

    def _enter(self, judge: Judge, t: int, distance: Distance, kind: str, hidden: Tensor) -> None:
        answers = slot_answers(self.bench, kind, distance, t)
        fields = judge.compare(self.bench.logits(hidden, slice(t - 1, t)), answers[:, None])
        self.sheets.put(Key(B, site(distance), TOKEN, kind), fields, [t])


class MessageProtocol:
    """Protocol C, for a DSpine: the block shows nothing, and only what slots receive is exchanged."""

    def __init__(
        self, bench: Bench, config: CorruptionConfig, sheets: Sheets, noise: torch.Generator | None
    ) -> None:
        assert isinstance(bench.draft, DSpine)
        self.bench, self.draft, self.config = bench, bench.draft, config
        self.sheets, self.noise = sheets, noise
        self.own = bench.codes(bench.tokens[:, :-1])
        self.clean = self._hidden(self.own)
        self.judge = Judge(bench.draft, bench.logits(self.clean), bench.gold)

    def run(self) -> None:
        """A wrong message into each slot in turn, and what becomes of that slot and those behind it."""
        for slot in range(self.bench.slots):
            for kind in self.config.message_kinds:
                wrong = self.bench.codes(self.bench.group.slots(kind)[:, slot])
                self._enter(slot, kind, self._with(slot, wrong))
            if self.noise is not None:
                wrong = self.bench.codes(self.bench.group.slots(RANK_2)[:, slot])
                noisy = self.own[:, slot] + as_long_as(wrong - self.own[:, slot], self.noise)
                self._enter(slot, NOISE, self._with(slot, noisy))

    def check_no_op(self) -> int:
        """Send every true code once more in place of itself; the number of ways tried.

        Raises:
            ProbeError: a score changed, if only in its last bit.
        """
        for slot in range(self.bench.slots):
            code = self.bench.codes(self.bench.group.slots(OWN)[:, slot])
            refuse_change(self._with(slot, code), self.clean, "exchanging a message for itself")
        return self.bench.slots

    def _hidden(self, messages: Tensor) -> Tensor:
        return self.bench.hidden(hooks=send(self.draft, messages))

    def _with(self, slot: int, code: Tensor) -> Tensor:
        """A pass in which the token of `slot` says `code` to its successor."""
        messages = self.own.clone()
        messages[:, slot] = code
        hidden = self._hidden(messages)
        refuse_change(hidden[:, : slot + 1], self.clean[:, : slot + 1], "a message in a causal block")
        return hidden

    def _enter(self, slot: int, kind: str, hidden: Tensor) -> None:
        logits = self.bench.logits(hidden, slice(slot, None))
        for column, t in enumerate(range(slot + 1, self.bench.slots + 1)):
            for distance, corrupted in corrupted_slots(t, self.config.earlier):
                if corrupted != slot:
                    continue
                answers = slot_answers(self.bench, kind, distance, t)
                one = slice(t - 1, t)
                fields = self.judge.compare(logits[:, column : column + 1], answers[:, None], one)
                self.sheets.put(Key(C, site(distance), MESSAGE, kind), fields, [t])


def corrupted_slots(t: int, earlier: Sequence[int]) -> Iterator[tuple[Distance, int]]:
    """For successor t, each distance with the slot it leads to; the first is farther back than all of them."""
    for distance in (1, *earlier):
        if distance <= t:
            yield distance, t - distance
    if t > max((1, *earlier)):
        yield FIRST, 0


def slot_answers(bench: Bench, kind: str, distance: Distance, t: int) -> Int[Tensor, "block"]:
    """The target's own answer in slot t after a rank-2 token right before it; it is asked about no other text."""
    if kind != RANK_2 or distance != 1:
        return torch.full((len(bench.group),), UNKNOWN, device=bench.device)
    group = bench.group
    answers = group.choices(kind, 1) if t == 1 else group.choices_behind(kind, t - 1)
    return answers.to(bench.device)


def refuse_change(found: Tensor, clean: Tensor, what: str) -> None:
    """Refuse anything but equality to the last bit."""
    if not torch.equal(found, clean):
        change = float((found - clean).abs().max())
        raise ProbeError(
            f"{what} changed what must not change (by up to {change:.2g}); the draft's pass is not deterministic or "
            "the intervention reaches further than it says."
        )
