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
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.errors import ProbeError
from dspine_probe.experiments.corruption.blocks import FIRST, OWN, UNKNOWN, Distance
from dspine_probe.experiments.corruption.config import EARLIER, FARTHEST, CorruptionConfig
from dspine_probe.experiments.corruption.passes import CorruptionRunner, as_long_as, send
from dspine_probe.experiments.corruption.replacements import RANK_2

A, B, C = "A", "B", "C"
TOKEN, ROW, RERUN, MESSAGE = "token", "row", "rerun", "message"
UNEDITED, NOISE, CLEAN = "unedited", "noise", "clean"
"""Beside the kinds: the text re-run unchanged; a random vector as long as a rank-2 token's change; no edit at all."""
FIELDS = ("clean_hit", "hit", "clean_logp", "logp", "kl", "clean_follow", "follow", "moved")
"""Per slot, clean and corrupted: true token picked; its log-probability (nats; NaN if the draft cannot propose it);
KL(clean ‖ corrupted), nats; the target's own choice in the corrupted text picked; whether that choice is another."""
Fields = Float[Tensor, "field block draft_slot"]
NAN = float("nan")


class Cell(NamedTuple):
    """A condition: protocol, place of the corrupted token, what was exchanged, and kind of corruption."""

    protocol: str
    site: str
    edit: str
    kind: str


class Judge:
    """Clean scores of some slots, with which corrupted ones are compared."""

    def __init__(
        self, draft: Draft, clean: Float[Tensor, "block draft_slot draft_vocab"], gold: Int[Tensor, "block draft_slot"]
    ) -> None:
        self.draft, self.gold = draft, gold
        self.index = draft.to_index(gold)
        self.probability = clean.softmax(-1)
        self.pick, self.logp, self.mean = self._read(clean, slice(None))

    def compare(
        self,
        logits: Float[Tensor, "block some_slot draft_vocab"],
        choices: Int[Tensor, "block some_slot"],
        slots: slice = slice(None),
    ) -> Fields:
        """The fields of the slots in `slots` (0 is slot 1), for which `logits` and the target's `choices` are given."""
        pick, logp, mean = self._read(logits, slots)
        gold, clean = self.gold[:, slots], self.pick[:, slots]
        columns = [clean == gold, pick == gold, self.logp[:, slots], logp, self.mean[:, slots] - mean]
        for flag in (clean == choices, pick == choices, choices != gold):
            columns.append(flag.float().masked_fill(choices == UNKNOWN, NAN))
        return torch.stack([column.float() for column in columns]).cpu()

    def _read(self, logits: Tensor, slots: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Picked tokens, log-probability of the true ones, and mean log-probability under the clean distribution."""
        total, index = logits.logsumexp(-1), self.index[:, slots]
        gold = logits.gather(-1, index.clamp(min=0)[..., None]).squeeze(-1) - total
        mean = (self.probability[:, slots] * logits).sum(-1) - total
        return self.draft.to_tokens(logits.argmax(-1)), gold.masked_fill(index < 0, NAN), mean


class Sheets(dict[Cell, Fields]):
    """Fields of every condition for one group of blocks, filled in slot by slot; NaN where nothing was measured."""

    def __init__(self, blocks: int, slots: int) -> None:
        self.shape = (len(FIELDS), blocks, slots)

    def put(
        self, key: Cell, fields: Fields, slots: slice = slice(None), measurable: Bool[Tensor, "block"] | None = None
    ) -> None:
        """Enter the columns `slots` (0 is slot 1), for the blocks in which this could be measured."""
        if measurable is not None:
            fields = fields.masked_fill(~measurable[None, :, None], NAN)
        self.setdefault(key, torch.full(self.shape, NAN))[:, :, slots] = fields


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
        self.judge = Judge(runner.draft, runner.logits(runner.hidden()), runner.gold)
        for kind in config.kinds:
            tokens, hooks = runner.replaced(0, kind)
            self._enter(1, TOKEN, kind, runner.hidden(tokens, hooks=hooks), group.choices(kind, 1))
            for distance, whole in self._context_edits(kind):
                hidden = runner.hidden(rows=runner.rows(kind, distance, whole=whole))
                choices = group.choices(kind, distance) if config.reruns(kind) else None
                self._enter(distance, RERUN if whole else ROW, kind, hidden, choices)
        hidden = runner.hidden(rows=runner.rows(OWN, FARTHEST, whole=True))
        self._enter(FARTHEST, RERUN, UNEDITED, hidden, group.choices(OWN, FARTHEST))
        if self.noise is not None:
            self._enter(1, TOKEN, NOISE, runner.hidden(hooks=runner.noise_anchor(self.noise)))
            for distance in (*EARLIER, FIRST):
                self._enter(distance, ROW, NOISE, runner.hidden(rows=runner.noise_rows(distance, self.noise)))

    def check_no_op(self) -> int:
        runner = self.runner
        tried = [runner.hidden(), runner.hidden(runner.replaced(0, OWN)[0])]
        for distance, whole in self._context_edits(RANK_2):
            tried.append(runner.hidden(rows=runner.rows(RANK_2, distance, whole=whole, own=True)))
        tried.append(runner.hidden())  # after all that, the context is what it was
        clean, *others = (runner.logits(hidden) for hidden in tried)
        for scores in others:
            refuse_change(scores, clean, "exchanging a token for itself")
        return len(others)

    def _context_edits(self, kind: str) -> Iterator[tuple[Distance, bool]]:
        """Distances beyond the anchor; whether all rows from there on are exchanged, where that is more than one."""
        for distance in (*EARLIER, FIRST):
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
        self.sheets.put(Cell(A, site(distance), edit, kind), fields, measurable=self.group.measurable(distance))


class PrefixProtocol(CorruptionProtocol):
    """Protocol B, for a draft trained on visible prefixes."""

    def run(self) -> None:
        runner = self.runner
        # With nothing shown, for comparison with the parent.
        clean = runner.logits(runner.hidden())
        fields = Judge(runner.draft, clean, runner.gold).compare(clean, torch.full_like(runner.gold, UNKNOWN))
        self.sheets.put(Cell(B, "none", TOKEN, CLEAN), fields)
        for t in range(1, runner.slots + 1):
            one, hidden = slice(t - 1, t), runner.hidden(shown=t)
            judge = Judge(runner.draft, runner.logits(hidden, one), runner.gold[:, one])
            for kind in self.config.kinds:
                for distance, slot in corrupted_slots(t):
                    tokens, hooks = runner.replaced(slot, kind)
                    wrong = runner.hidden(tokens, shown=t, hooks=hooks)
                    if runner.draft.config.is_causal:
                        refuse_change(wrong[:, :slot], hidden[:, :slot], "a corrupted slot of a causal block")
                    fields = judge.compare(runner.logits(wrong, one), slot_choices(runner, kind, distance, t))
                    self.sheets.put(Cell(B, site(distance), TOKEN, kind), fields, one)

    def check_no_op(self) -> int:
        runner, own = self.runner, self.group.replaced(OWN)
        for t in range(1, runner.slots + 1):
            refuse_change(runner.hidden(own, shown=t), runner.hidden(shown=t), "exchanging a token for itself")
        return runner.slots


class MessageProtocol(CorruptionProtocol):
    """Protocol C, for a DSpine: the block shows nothing, and only what slots receive is exchanged."""

    def run(self) -> None:
        """A wrong message into each slot in turn, and what becomes of that slot and those behind it."""
        runner = self.runner
        self.own = runner.codes(runner.tokens[:, :-1])
        self.clean = runner.hidden(hooks=send(runner.draft, self.own))
        self.judge = Judge(runner.draft, runner.logits(self.clean), runner.gold)
        for slot in range(runner.slots):
            for kind in self.config.message_kinds:
                self._enter(slot, kind, runner.codes(self.group.replaced(kind)[:, slot]))
            if self.noise is not None:
                wrong = runner.codes(self.group.replaced(RANK_2)[:, slot])
                noise = as_long_as(wrong - self.own[:, slot], self.noise)
                self._enter(slot, NOISE, self.own[:, slot] + noise)

    def check_no_op(self) -> int:
        runner = self.runner
        own = runner.codes(runner.tokens[:, :-1])
        clean = runner.hidden(hooks=send(runner.draft, own))
        for slot in range(runner.slots):
            messages = own.clone()
            messages[:, slot] = runner.codes(self.group.replaced(OWN)[:, slot])
            refuse_change(runner.hidden(hooks=send(runner.draft, messages)), clean, "exchanging a message for itself")
        return runner.slots

    def _enter(self, slot: int, kind: str, code: Tensor) -> None:
        """A pass in which the token of `slot` sends `code` to its successor, read in every slot behind it."""
        runner, messages = self.runner, self.own.clone()
        messages[:, slot] = code
        hidden = runner.hidden(hooks=send(runner.draft, messages))
        refuse_change(hidden[:, : slot + 1], self.clean[:, : slot + 1], "a message in a causal block")
        logits = runner.logits(hidden, slice(slot, None))
        for column, t in enumerate(range(slot + 1, runner.slots + 1)):
            one = slice(t - 1, t)
            for distance, corrupted in corrupted_slots(t):
                if corrupted == slot:
                    choices = slot_choices(runner, kind, distance, t)
                    fields = self.judge.compare(logits[:, column : column + 1], choices, one)
                    self.sheets.put(Cell(C, site(distance), MESSAGE, kind), fields, one)


def site(distance: Distance) -> str:
    """How tables call the corrupted token's place, seen from its successor t."""
    return "first" if distance is FIRST else f"t−{distance}"


def corrupted_slots(t: int) -> Iterator[tuple[Distance, int]]:
    """For successor t, each distance with the slot it leads to; the first is farther back than all of them."""
    yield from ((distance, t - distance) for distance in (1, *EARLIER) if distance <= t)
    if t > FARTHEST:
        yield FIRST, 0


def slot_choices(runner: CorruptionRunner, kind: str, distance: Distance, t: int) -> Int[Tensor, "block 1"]:
    """The target's own choice in slot t after a rank-2 token right before it; it is asked about no other text."""
    if kind != RANK_2 or distance != 1:
        return torch.full((len(runner.group), 1), UNKNOWN, device=runner.device)
    return runner.group.choices(kind, 2 - t)[:, None].to(runner.device)


def refuse_change(found: Tensor, clean: Tensor, what: str) -> None:
    """Refuse anything but equality to the last bit."""
    if not torch.equal(found, clean):
        change = float((found - clean).abs().max())
        raise ProbeError(
            f"{what} changed what must not change (by up to {change:.2g}); the draft's pass is not deterministic or "
            "the intervention reaches further than it says."
        )
