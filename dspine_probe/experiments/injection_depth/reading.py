"""One batch of held-out blocks as the injection experiment asks about it: sites, and what they may be told.

`Question.of` runs the draft once without injection; `answer` gives an arm's scores when its sites are told certain
predecessors. Sites are listed block by block, slots 2…T. Injected alone, every site has a copy of its block, all on
the same context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft
from dspine_probe.experiments.injection_depth.arms import ArmModule
from dspine_probe.experiments.injection_depth.batches import own_guesses
from dspine_probe.experiments.injection_depth.block_pass import (
    FIRST_SLOT,
    BlockPass,
    Sites,
    every_slot,
    one_slot,
)
from dspine_probe.experiments.injection_depth.injectors import Codes
from dspine_probe.target import Target
from dspine_probe.training.anchors import Batch


@dataclass(frozen=True)
class Question:
    """A batch and its sites.

    blocks: the batch in the draft, without injection; `where` are the sites in it.
    wide: what is injected into, with the sites at `sites`: the same, or a copy of each block for every slot.
    true, guess, second: the predecessor that stands there, the draft's own top-1, and the target's second choice.
    chance: uniform draws; a site with a draw below ρ is told the truth at reliability ρ.
    """

    batch: Batch
    codes: Codes
    blocks: BlockPass
    where: Sites
    wide: BlockPass
    sites: Sites
    true: Int[Tensor, "site"]
    guess: Int[Tensor, "site"]
    second: Int[Tensor, "site"]
    chance: Float[Tensor, "site"]
    seed: int
    number: int

    @classmethod
    def of(
        cls,
        draft: Draft,
        batch: Batch,
        codes: Codes,
        target: Target,
        *,
        all_slots: bool,
        seed: int,
        number: int,
    ) -> Question:
        """Run `batch`, the `number`-th of its arena, without injection."""
        blocks = BlockPass.of(draft, batch)
        count, width = batch.tokens.shape
        where = every_slot(count, width, batch.tokens.device)
        true = where.before(batch.tokens)
        chance = torch.rand(len(true), generator=derive_generator(seed, "chance", number)).to(true.device)
        return cls(
            batch,
            codes,
            blocks,
            where,
            blocks if all_slots else blocks.repeated(width - FIRST_SLOT),
            where if all_slots else one_slot(where.slots),
            true,
            where.before(own_guesses(blocks, batch)),
            _second_choice(target, batch, where, true),
            chance,
            seed,
            number,
        )

    @property
    def labels(self) -> Int[Tensor, "site"]:
        """Places of the sites' tokens in the draft's vocabulary, −1 outside it."""
        return self.blocks.draft.to_index(self.where.of(self.batch.tokens))

    def floor(self) -> Float[Tensor, "site draft_vocab"]:
        """Scores without injection."""
        return self.blocks.scores(self.where.of(self.blocks.stream[-1]))

    def mixture(self, share: float) -> Int[Tensor, "site"]:
        """True tokens for this share of the sites, the draft's own guesses for the others."""
        return torch.where(self.chance < share, self.true, self.guess)

    def answer(self, module: ArmModule, told: Int[Tensor, "site"]) -> Float[Tensor, "site draft_vocab"]:
        """The arm's scores at the sites when they are told these predecessors."""
        codes = self.codes.message(module.arm.code, told, derive_generator(self.seed, "noise", self.number))
        if module.arm.leak:
            return module(module.blocks(self.blocks, self.batch), self.where, told, codes)
        wide = self.wide
        if module.own is not None:
            wide = module.blocks(self.blocks, self.batch)
            wide = (
                wide if self.wide is self.blocks else wide.repeated(self.batch.tokens.shape[1] - FIRST_SLOT)
            )
        return module(wide, self.sites, told, codes)


def _second_choice(
    target: Target, batch: Batch, where: Sites, true: Int[Tensor, "site"]
) -> Int[Tensor, "site"]:
    """The token that the target would have put second in place of each site's predecessor."""
    # The state that predicts slot k stands at k − 1 of `teacher`; a predecessor's is that of slot t − 1.
    states = batch.teacher[where.blocks, where.slots - 2]
    scores = target.logits(states.to(target.head))
    return scores.scatter(1, true[:, None].to(scores.device), float("-inf")).argmax(dim=-1).to(true.device)
