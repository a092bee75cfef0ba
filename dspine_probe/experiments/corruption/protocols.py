"""The three protocols, for one draft on one group of blocks (arXiv 2609.36173 gives a number and no protocol).

A. The anchor is slot 1's predecessor, and a wrong anchor is in distribution for any draft. It is compared with edits of
   earlier tokens, which reach the draft as context rows: the edited row alone, or all rows from it on re-run.
B. A draft trained on visible prefixes is shown the true tokens up to slot t − 1, and one of them is corrupted.
C. A DSpine receives true codes as messages in every slot and layer, and one slot receives a wrong code.

In B and C the corrupted token of slot i lies t − i places before successor t, and all places act through one channel.
In A they do not: an earlier token acts through the target's state behind it, which also holds what the target
expects next. Every protocol checks itself: exchanging a thing for itself must change nothing, and a causal block must
not pass anything backwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from dspine_probe.errors import ProbeError
from dspine_probe.experiments.corruption.blocks import FIRST, OWN, UNKNOWN, Distance
from dspine_probe.experiments.corruption.config import CorruptionConfig
from dspine_probe.experiments.corruption.passes import CorruptionRunner, as_long_as, send
from dspine_probe.experiments.corruption.replacements import RANK_2
from dspine_probe.experiments.corruption.scores import Cell, Judge, Sheets

A, B, C = "A", "B", "C"
TOKEN, ROW, RERUN, MESSAGE = "token", "row", "rerun", "message"
UNEDITED, NOISE, CLEAN = "unedited", "noise", "clean"
"""Beside the kinds: the text re-run unchanged; a random vector as long as a rank-2 token's change; no edit at all."""


def site(distance: Distance) -> str:
    """How tables call the corrupted token's place, seen from its successor t."""
    return "first" if distance is FIRST else f"t−{distance}"


class CorruptionProtocol(ABC):
    """One protocol on one runner; what it measures goes into `sheets`. Without `noise` random vectors are left out."""

    def __init__(
        self, runner: CorruptionRunner, config: CorruptionConfig, sheets: Sheets, noise: torch.Generator | None = None
    ) -> None:
        self.runner, self.group, self.config = runner, runner.group, config
        self.sheets, self.noise = sheets, noise

    @abstractmethod
    def run(self) -> None:
        """Every kind at every place, and the controls."""

    @abstractmethod
    def check_no_op(self) -> int:
        """Exchange every thing for itself; the number of exchanges tried.

        Raises:
            ProbeError: a score changed, if only in its last bit.
        """


class AnchorProtocol(CorruptionProtocol):
    """Protocol A."""

    def run(self) -> None:
        runner, group, config = self.runner, self.group, self.config
        clean = runner.logits(runner.hidden())
        self.judge = Judge(runner.draft, clean, runner.gold)
        for kind in config.kinds:
            tokens, hooks = runner.replaced(0, kind)
            self._enter(1, TOKEN, kind, runner.hidden(tokens, hooks=hooks), group.choices(kind, 1))
            for distance, whole in self._context_edits(kind):
                hidden = runner.hidden(rows=runner.rerun_rows(kind, distance, whole=whole))
                choices = group.choices(kind, distance) if config.reruns(kind) else None
                self._enter(distance, RERUN if whole else ROW, kind, hidden, choices)
        farthest = config.farthest
        hidden = runner.hidden(rows=runner.rerun_rows(OWN, farthest, whole=True))
        self._enter(farthest, RERUN, UNEDITED, hidden, group.choices(OWN, farthest))
        if self.noise is not None:
            self._enter(1, TOKEN, NOISE, runner.hidden(hooks=runner.noise_anchor(self.noise)))
            for distance in (*config.earlier, FIRST):
                rows = runner.noise_rows(distance, self.noise)
                self._enter(distance, ROW, NOISE, runner.hidden(rows=rows))

    def check_no_op(self) -> int:
        runner = self.runner
        tried = [runner.hidden(), runner.hidden(runner.replaced(0, OWN)[0])]
        for distance, whole in self._context_edits(RANK_2):
            tried.append(runner.hidden(rows=runner.own_rows(RANK_2, distance, whole=whole)))
        tried.append(runner.hidden())  # after all that, the context is what it was
        clean, *others = (runner.logits(hidden) for hidden in tried)
        for scores in others:
            refuse_change(scores, clean, "exchanging a token for itself")
        return len(others)

    def _context_edits(self, kind: str) -> Iterator[tuple[Distance, bool]]:
        """Distances beyond the anchor; whether all rows from there on are exchanged, where that is more than one."""
        for distance in (*self.config.earlier, FIRST):
            yield distance, False
            if self.config.reruns(kind) and distance != 2:
                yield distance, True

    def _enter(
        self, distance: Distance, edit: str, kind: str, hidden: Tensor, choices: Int[Tensor, "block"] | None = None
    ) -> None:
        """The target's `choices` follow the anchor, so they are about slot 1."""
        wanted = torch.full_like(self.runner.gold, UNKNOWN)
        if choices is not None:
            wanted[:, 0] = choices
        fields = self.judge.compare(self.runner.logits(hidden), wanted)
        measurable = self.group.measurable(distance)
        self.sheets.put(Cell(A, site(distance), edit, kind), fields, measurable=measurable)


class PrefixProtocol(CorruptionProtocol):
    """Protocol B, for a draft trained on visible prefixes."""

    def run(self) -> None:
        runner = self.runner
        # With nothing shown, for comparison with the parent.
        clean = runner.logits(runner.hidden())
        fields = Judge(runner.draft, clean, runner.gold).compare(clean, torch.full_like(runner.gold, UNKNOWN))
        self.sheets.put(Cell(B, "none", TOKEN, CLEAN), fields)
        for t in range(1, runner.slots + 1):
            self._successor(t)

    def check_no_op(self) -> int:
        runner = self.runner
        own = self.group.replaced(OWN)
        for t in range(1, runner.slots + 1):
            clean, again = runner.hidden(shown=t), runner.hidden(own, shown=t)
            refuse_change(again, clean, "exchanging a token for itself")
        return runner.slots

    def _successor(self, t: int) -> None:
        runner, one = self.runner, slice(t - 1, t)
        clean = runner.hidden(shown=t)
        judge = Judge(runner.draft, runner.logits(clean, one), runner.gold[:, one])
        for kind in self.config.kinds:
            for distance, slot in corrupted_slots(t, self.config.earlier):
                tokens, hooks = runner.replaced(slot, kind)
                hidden = runner.hidden(tokens, shown=t, hooks=hooks)
                if runner.draft.config.is_causal:
                    refuse_change(hidden[:, :slot], clean[:, :slot], "a corrupted slot of a causal block")
                choices = slot_choices(runner, kind, distance, t)
                fields = judge.compare(runner.logits(hidden, one), choices[:, None])
                self.sheets.put(Cell(B, site(distance), TOKEN, kind), fields, one)


class MessageProtocol(CorruptionProtocol):
    """Protocol C, for a DSpine: the block shows nothing, and only what slots receive is exchanged."""

    def run(self) -> None:
        """A wrong message into each slot in turn, and what becomes of that slot and those behind it."""
        runner = self.runner
        self.own, self.clean = self._clean()
        self.judge = Judge(runner.draft, runner.logits(self.clean), runner.gold)
        for slot in range(runner.slots):
            for kind in self.config.message_kinds:
                self._enter(slot, kind, runner.codes(self.group.replaced(kind)[:, slot]))
            if self.noise is not None:
                wrong = runner.codes(self.group.replaced(RANK_2)[:, slot])
                noise = as_long_as(wrong - self.own[:, slot], self.noise)
                self._enter(slot, NOISE, self.own[:, slot] + noise)

    def check_no_op(self) -> int:
        own, clean = self._clean()
        for slot in range(self.runner.slots):
            messages = own.clone()
            messages[:, slot] = self.runner.codes(self.group.replaced(OWN)[:, slot])
            again = self.runner.hidden(hooks=send(self.runner.draft, messages))
            refuse_change(again, clean, "exchanging a message for itself")
        return self.runner.slots

    def _clean(self) -> tuple[Tensor, Tensor]:
        """The true messages, and the states under them."""
        own = self.runner.codes(self.runner.tokens[:, :-1])
        return own, self.runner.hidden(hooks=send(self.runner.draft, own))

    def _enter(self, slot: int, kind: str, code: Tensor) -> None:
        """A pass in which the token of `slot` sends `code` to its successor, read in every slot behind it."""
        messages = self.own.clone()
        messages[:, slot] = code
        hidden = self.runner.hidden(hooks=send(self.runner.draft, messages))
        refuse_change(hidden[:, : slot + 1], self.clean[:, : slot + 1], "a message in a causal block")
        logits = self.runner.logits(hidden, slice(slot, None))
        for column, t in enumerate(range(slot + 1, self.runner.slots + 1)):
            one = slice(t - 1, t)
            for distance, corrupted in corrupted_slots(t, self.config.earlier):
                if corrupted == slot:
                    choices = slot_choices(self.runner, kind, distance, t)
                    fields = self.judge.compare(logits[:, column : column + 1], choices[:, None], one)
                    self.sheets.put(Cell(C, site(distance), MESSAGE, kind), fields, one)


def corrupted_slots(t: int, earlier: Sequence[int]) -> Iterator[tuple[Distance, int]]:
    """For successor t, each distance with the slot it leads to; the first is farther back than all of them."""
    for distance in (1, *earlier):
        if distance <= t:
            yield distance, t - distance
    if t > max(earlier):
        yield FIRST, 0


def slot_choices(runner: CorruptionRunner, kind: str, distance: Distance, t: int) -> Int[Tensor, "block"]:
    """The target's own choice in slot t after a rank-2 token right before it; it is asked about no other text."""
    group = runner.group
    if kind != RANK_2 or distance != 1:
        return torch.full((len(group),), UNKNOWN, device=runner.device)
    choices = group.choices(kind, 1) if t == 1 else group.choices_behind(kind, t - 1)
    return choices.to(runner.device)


def refuse_change(found: Tensor, clean: Tensor, what: str) -> None:
    """Refuse anything but equality to the last bit."""
    if not torch.equal(found, clean):
        change = float((found - clean).abs().max())
        raise ProbeError(
            f"{what} changed what must not change (by up to {change:.2g}); the draft's pass is not deterministic or "
            "the intervention reaches further than it says."
        )
