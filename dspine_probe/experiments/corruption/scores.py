"""What a corruption did to every slot of every block, before any statistics.

A draft's scores of a slot are kept as the token it picks, the log-probability of the true token and the divergence from
the clean scores. A pass under which nothing is edited gives exactly the clean numbers, bit for bit. Entry points:
`Judge`, `Key`, `Sheets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.drafts import Draft

FIELDS = ("clean_hit", "hit", "clean_logp", "logp", "kl", "clean_follow", "follow", "moved")
"""Per slot, clean and corrupted: true token picked; its log-probability (nats; NaN if the draft cannot propose it);
KL(clean ‖ corrupted), nats; the target's own answer to the corrupted text picked; whether that answer is another."""
UNKNOWN = -2
"""In place of the target's answer where the target was not asked."""
Fields = Float[Tensor, "field block draft_slot"]


class Key(NamedTuple):
    """A condition: protocol, place of the corrupted token, what was exchanged, and kind of corruption."""

    protocol: str
    site: str
    edit: str
    kind: str


class Judge:
    """Clean scores of some slots, against which corrupted ones are held."""

    def __init__(
        self,
        draft: Draft,
        clean: Float[Tensor, "block draft_slot draft_vocab"],
        gold: Int[Tensor, "block draft_slot"],
    ) -> None:
        self.draft, self.gold = draft, gold
        self.index = draft.to_index(gold)
        self.probability = clean.softmax(-1)
        self.pick, self.logp, self.mean = self._read(clean, slice(None))

    def compare(
        self,
        logits: Float[Tensor, "block some_slot draft_vocab"],
        answers: Int[Tensor, "block some_slot"],
        slots: slice = slice(None),
    ) -> Fields:
        """The fields of the slots in `slots` (0 is slot 1), which `logits` and the target's `answers` speak about."""
        pick, logp, mean = self._read(logits, slots)
        gold, clean = self.gold[:, slots], self.pick[:, slots]
        columns = [clean == gold, pick == gold, self.logp[:, slots], logp, self.mean[:, slots] - mean]
        columns += [_known(clean == answers, answers), _known(pick == answers, answers)]
        columns.append(_known(answers != gold, answers))
        return torch.stack([column.float() for column in columns]).cpu()

    def _read(self, logits: Tensor, slots: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Picked tokens, log-probability of the true ones, and mean log-probability under the clean distribution."""
        total, index = logits.logsumexp(-1), self.index[:, slots]
        gold = logits.gather(-1, index.clamp(min=0)[..., None]).squeeze(-1) - total
        mean = (self.probability[:, slots] * logits).sum(-1) - total
        return (
            self.draft.to_tokens(logits.argmax(-1)),
            gold.masked_fill(index < 0, float("nan")),
            mean,
        )


def _known(flag: Bool[Tensor, "block slot"], answers: Int[Tensor, "block slot"]) -> Tensor:
    return flag.float().masked_fill(answers == UNKNOWN, float("nan"))


@dataclass
class Sheets:
    """Fields of every condition for one group of blocks, filled in slot by slot; NaN where nothing was measured."""

    blocks: int
    slots: int
    found: dict[Key, Fields] = field(default_factory=dict)

    def put(
        self,
        key: Key,
        fields: Fields,
        slots: Sequence[int],
        measurable: Bool[Tensor, "block"] | None = None,
    ) -> None:
        """Enter the columns of the named slots (1…T), for the blocks in which this could be measured."""
        sheet = self.found.setdefault(key, self.fields(key))
        if measurable is not None:
            fields = fields.masked_fill(~measurable[None, :, None], float("nan"))
        sheet[:, :, torch.tensor(slots) - 1] = fields

    def fields(self, key: Key) -> Fields:
        """What was entered for a condition."""
        blank = torch.full((len(FIELDS), self.blocks, self.slots), float("nan"))
        return self.found.get(key, blank)


def join(groups: Sequence[Sheets]) -> dict[Key, Fields]:
    """The conditions of all groups, their blocks end to end."""
    keys = dict.fromkeys(key for group in groups for key in group.found)
    return {key: torch.cat([group.fields(key) for group in groups], dim=1) for key in keys}
