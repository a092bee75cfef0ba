"""What injectors are trained on: the budget, and the objective of one arm for the common trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.injection_depth.arms import GROUPS, MARKOV, ArmModule
from dspine_probe.experiments.injection_depth.blocks import FIRST_SLOT, BlockPass, every_slot, one_slot, refuse_leak
from dspine_probe.experiments.injection_depth.injectors import Codes
from dspine_probe.training.anchors import Batch
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss


@dataclass(frozen=True)
class InjectionPlan:
    """Budget and arms. Every step has `sequences` × `anchors` blocks.

    all_slots: inject into all slots of a block at once, which only a causal draft allows; by default wherever it does.
    rates: learning rates tried for each arm; pretrained and very wide parts get `slow` times as much.
    rank, message: sizes of code and message; by default the draft's own `code_sizes`.
    """

    blocks: int = 15_360
    trial_blocks: int = 3_072
    held_out_blocks: int = 1_024
    sequences: int = 8
    anchors: int = 8
    rates: tuple[float, ...] = (2e-3, 5e-3, 1.2e-2)
    slow: float = 0.05
    groups: tuple[str, ...] = GROUPS
    depths: tuple[int | str, ...] | None = None
    control_depths: tuple[int, ...] | None = None
    all_slots: bool | None = None
    rank: int | None = None
    message: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("blocks", "trial_blocks", "held_out_blocks"):
            if getattr(self, name) < self.sequences * self.anchors:
                raise UsageError(
                    f"{name} is {getattr(self, name)}, less than one step of {self.sequences} × {self.anchors} blocks."
                )
        if not self.rates or min(self.rates) <= 0:
            raise UsageError(f"rates are {list(self.rates)}; give one or more positive learning rates.")

    def for_draft(self, draft: Draft) -> InjectionPlan:
        """The plan with nothing left to defaults.

        Raises:
            UsageError: all slots were asked for in a bidirectional draft.
        """
        rank, message = draft.code_sizes
        all_slots = draft.config.is_causal if self.all_slots is None else self.all_slots
        refuse_leak(draft, all_slots=all_slots)
        return replace(self, rank=self.rank or rank, message=self.message or message, all_slots=all_slots)


class ArmObjective(Objective):
    """Mean cross-entropy at the sites of one arm; slots and unreliable codes are drawn for every step."""

    def __init__(self, module: ArmModule, draft: Draft, codes: Codes, plan: InjectionPlan) -> None:
        """`draft` is frozen; `plan` is complete (`InjectionPlan.for_draft`)."""
        super().__init__()
        self.module, self.draft, self.codes, self.plan = module, draft, codes, plan

    @property
    def rate_factors(self) -> dict[str, float]:
        """By parameter, the share of the learning rate it gets: pretrained and very wide parts learn slowly."""
        slow = set(map(id, self.module.slow))
        return {name: self.plan.slow for name, p in self.named_parameters() if id(p) in slow}

    def forward(self, batch: Batch, progress: Progress) -> StepLoss:
        """Of a batch at some step; draws come from the step's generator alone."""
        arm, (count, width), device = self.module.arm, batch.tokens.shape, batch.tokens.device
        slot = torch.randint(FIRST_SLOT, width, (count,), generator=progress.generator).to(device)
        true = torch.rand(count, width, generator=progress.generator).to(device) < arm.reliability
        everywhere = arm.leak or self.plan.all_slots
        sites = every_slot(count, width, device) if everywhere else one_slot(slot)
        whole = arm.late == MARKOV or arm.reliability < 1
        depth = None if whole else 0 if self.module.own else arm.depths(len(self.draft.blocks))[0]
        blocks = BlockPass.of(self.draft, batch, depth=depth)
        predecessors = sites.before(batch.tokens)
        if arm.reliability < 1:
            predecessors = torch.where(sites.of(true), predecessors, sites.before(blocks.guesses()))
        codes = self.codes.message(arm.code, predecessors, progress.generator)
        scores = self.module(self.module.pass_over(blocks), sites, predecessors, codes).float()
        # Weights begin at slot 1; a slot behind the text has none.
        labels = torch.where(sites.before(batch.weight) > 0, blocks.labels(sites), -1)
        loss = F.cross_entropy(scores, labels, ignore_index=-1, reduction="sum") / (labels >= 0).sum().clamp(min=1)
        hits, counts = (torch.zeros(width - 1, device=device) for _ in range(2))
        hits.index_add_(0, sites.slots - 1, (scores.argmax(dim=-1) == labels).float())
        counts.index_add_(0, sites.slots - 1, (labels >= 0).float())
        return StepLoss(loss, loss, {}, hits, counts)
