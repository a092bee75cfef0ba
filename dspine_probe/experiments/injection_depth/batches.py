"""What one training step of the injection experiment sees: blocks, sites, and what their predecessors are said to be.

All of it is a pure function of (seed, step), so every arm of a draft trains on the same blocks, slots and draws, and a
resumed run on those that the killed one would have seen. Entry points: `BlockSource.at`, `Draw.of`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.injection_depth.arms import Arm
from dspine_probe.experiments.injection_depth.block_pass import (
    FIRST_SLOT,
    BlockPass,
    Sites,
    every_slot,
    one_slot,
)
from dspine_probe.experiments.injection_depth.injectors import Codes
from dspine_probe.training.anchors import Batch, make_batch, visiting_order
from dspine_probe.training.features import FeatureStore, Sequence


class BlockSource:
    """Batches of `sequences` × `anchors` blocks whose labels all lie inside the responses."""

    def __init__(
        self,
        store: FeatureStore,
        indices: Seq[int],
        *,
        block_size: int,
        sequences: int,
        anchors: int,
        seed: int,
    ) -> None:
        """Sequences of `store` at `indices` with a response of a block or more.

        Raises:
            UsageError: there are too few of them for one batch.
        """
        lengths, prompts = store.meta.lengths, store.meta.prompt_lengths
        self.indices = [i for i in indices if lengths[i] - prompts[i] >= block_size]
        self.store, self.block_size, self.seed = store, block_size, seed
        self.sequences, self.anchors = sequences, anchors
        self.lengths = [lengths[i] for i in self.indices]
        self.per_epoch = len(visiting_order(self.lengths, sequences, seed, 0))
        if not self.per_epoch:
            raise UsageError(
                f"{len(self.indices)} sequences have responses of {block_size} tokens or more, and a batch takes "
                f"{sequences}; give a larger store or smaller batches."
            )

    def at(self, step: int) -> Batch:
        """The blocks of a step."""
        epoch, place = divmod(step, self.per_epoch)
        order = visiting_order(self.lengths, self.sequences, self.seed, epoch)
        generator = derive_generator(self.seed, "anchors", step)
        rows = [self.store[self.indices[i]] for i in order[place]]
        return make_batch(
            rows,
            [self._anchors(row, generator) for row in rows],
            block_size=self.block_size,
            gamma=float("inf"),
            anchors_per_sequence=self.anchors,
        )

    def _anchors(self, row: Sequence, generator: torch.Generator) -> Int[Tensor, "anchor"]:
        places = len(row) - row.prompt_length - self.block_size + 1
        chosen = torch.randperm(places, generator=generator)[: self.anchors].sort().values
        return chosen + row.prompt_length


@dataclass(frozen=True)
class Draw:
    """The random choices of a step: each block's slot, and per slot whether an unreliable code is true after all."""

    blocks: BlockPass
    batch: Batch
    codes: Codes
    all_slots: bool
    slot: Int[Tensor, "block"]
    chance: Float[Tensor, "block slot"]
    seed: int
    step: int

    @classmethod
    def of(
        cls, blocks: BlockPass, batch: Batch, codes: Codes, *, all_slots: bool, seed: int, step: int
    ) -> Draw:
        """Choose for the blocks of a step."""
        count, width = batch.tokens.shape
        generator = derive_generator(seed, "slots", step)
        slot = torch.randint(FIRST_SLOT, width, (count,), generator=generator)
        chance = torch.rand(count, width, generator=generator)
        device = batch.tokens.device
        return cls(blocks, batch, codes, all_slots, slot.to(device), chance.to(device), seed, step)

    def sites(self, arm: Arm) -> Sites:
        """One slot a block, or every slot where that is the variant or the arm shows its fault."""
        if arm.leak or self.all_slots:
            blocks, width = self.batch.tokens.shape
            return every_slot(blocks, width, self.slot.device)
        return one_slot(self.slot)

    def labels(self, sites: Sites) -> Int[Tensor, "site"]:
        """Places of the sites' tokens in the draft's vocabulary; −1 where there is nothing to score."""
        labels = self.blocks.draft.to_index(sites.of(self.batch.tokens))
        return torch.where(sites.before(self.batch.weight) > 0, labels, -1)  # weights begin at slot 1

    def told(self, arm: Arm, sites: Sites) -> tuple[Int[Tensor, "site"], Float[Tensor, "site rank"]]:
        """The predecessors that the arm is told at the sites, and their codes."""
        tokens = sites.before(self.batch.tokens)
        if arm.reliability < 1:
            tokens = torch.where(sites.of(self.chance) < arm.reliability, tokens, sites.before(self.guesses))
        return tokens, self.codes.message(arm.code, tokens, derive_generator(self.seed, "noise", self.step))

    @cached_property
    def guesses(self) -> Int[Tensor, "block slot"]:
        """The draft's own top-1 at every slot without injection; the anchor's slot keeps the anchor."""
        return own_guesses(self.blocks, self.batch)


def own_guesses(blocks: BlockPass, batch: Batch) -> Int[Tensor, "block slot"]:
    """What the draft itself predicts at every slot, without injection; slot 0 holds the anchor."""
    draft: Draft = blocks.draft
    with torch.no_grad():
        best = draft.to_tokens(blocks.scores(blocks.stream[-1][:, 1:]).argmax(dim=-1))
    return torch.cat([batch.tokens[:, :1], best], dim=1)
