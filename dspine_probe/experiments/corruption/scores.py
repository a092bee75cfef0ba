"""What a corruption did to every slot of every block, before any statistics.

A draft's scores of a slot are kept as the token it picks, the log-probability of the true token and the divergence from
the clean scores. A pass under which nothing is edited gives exactly the clean numbers, bit for bit. Entry points:
`Judge`, `Cell`, `Sheets`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.experiments.corruption.blocks import UNKNOWN

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
