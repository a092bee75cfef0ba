"""One batch of held-out blocks as the injection experiment asks about it: its sites, and what they may receive."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft
from dspine_probe.experiments.common.answers import second_choices
from dspine_probe.experiments.injection_depth.arms import ArmModule
from dspine_probe.experiments.injection_depth.blocks import FIRST_SLOT, BlockPass, every_slot, one_slot
from dspine_probe.experiments.injection_depth.store import InjectorSet
from dspine_probe.target import Target
from dspine_probe.training.anchors import Batch

SiteScores = Float[Tensor, "site"]


class Question:
    """A batch of held-out blocks and its sites, slots 2…T listed block by block; and what they may receive.

    blocks: the batch in the draft, without injection; `where` are the sites in it.
    wide: what is injected into, with the sites at `sites`: the same, or a copy of each block for every slot.
    true, guess, second: the predecessor that stands there, the draft's own top-1, and the target's second choice.
    chance: uniform draws; a site with a draw below ρ receives the truth at reliability ρ.
    """

    def __init__(
        self, draft: Draft, batch: Batch, injectors: InjectorSet, target: Target, seed: int, number: int
    ) -> None:
        """Run `batch`, the `number`-th of its arena, without injection."""
        count, width = batch.tokens.shape
        self.codes, self.seed, self.number = injectors.codes, seed, number
        self.blocks = BlockPass.of(draft, batch)
        self.copies = 1 if injectors.all_slots else width - FIRST_SLOT
        self.where = every_slot(count, width, batch.tokens.device)
        self.wide = self.blocks if injectors.all_slots else self.blocks.repeated(self.copies)
        self.sites = self.where if injectors.all_slots else one_slot(self.where.slots)
        self.labels = self.blocks.labels(self.where)
        self.true = self.where.before(batch.tokens)
        self.guess = self.where.before(self.blocks.guesses())
        self.chance = torch.rand(len(self.true), generator=derive_generator(seed, "chance", number)).to(
            self.true.device
        )
        # The state that predicts slot k stands at k − 1 of `teacher`; a predecessor's is that of slot t − 1.
        states = batch.teacher[self.where.blocks, self.where.slots - 2]
        self.second = second_choices(target, states, self.true)

    def floor(self) -> SiteScores:
        """Where the draft is right without injection."""
        return self._right(self.blocks.scores(self.where.of(self.blocks.stream[-1])))

    def mixture(self, share: float) -> Int[Tensor, "site"]:
        """True tokens for this share of the sites, the draft's own guesses for the others."""
        return torch.where(self.chance < share, self.true, self.guess)

    def right(self, module: ArmModule, predecessors: Int[Tensor, "site"]) -> SiteScores:
        """Where an arm is right when its sites receive the codes of these predecessors."""
        generator = derive_generator(self.seed, "noise", self.number)
        codes = self.codes.message(module.arm.code, predecessors, generator)
        if module.arm.leak:
            return self._right(module(module.pass_over(self.blocks), self.where, predecessors, codes))
        wide = self.wide
        if module.own is not None:
            wide = module.pass_over(self.blocks)
            wide = wide if self.wide is self.blocks else wide.repeated(self.copies)
        return self._right(module(wide, self.sites, predecessors, codes))

    def _right(self, scores: Float[Tensor, "site draft_vocab"]) -> SiteScores:
        """1 where the best-scored token is the label; a label that the draft cannot propose is never met."""
        return (scores.argmax(dim=-1) == self.labels).float()
