"""What every objective has in common: where training stands, what a batch leads to, which slots are supervised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.training.anchors import Batch
from dspine_probe.training.intermediate import Intermediate


@dataclass(frozen=True)
class Curriculum:
    """What changes while a draft trains, in blocks: replacement holds, then fades; alignment rises."""

    replacement: tuple[int, int]
    alignment_warmup: int


@dataclass(frozen=True)
class Progress:
    """Where in training a step of `step_blocks` blocks stands; `generator` draws what is random in the objective.

    Without a `curriculum`, what changes on the way follows the shares and steps of the draft's own config.
    """

    step: int
    total_steps: int
    generator: torch.Generator
    step_blocks: int = 1
    curriculum: Curriculum | None = None

    def faded(self, hold_ratio: float, end_ratio: float) -> float:
        """1 while it holds, then linear to 0."""
        if self.curriculum is None:
            hold, end, done = hold_ratio, end_ratio, self.step / max(self.total_steps, 1)
        else:
            (hold, end), done = self.curriculum.replacement, self.step * self.step_blocks
        return 1.0 if done <= hold else max(0.0, (end - done) / (end - hold)) if end > hold else 0.0

    def warmed_up(self, steps: int) -> float:
        """Linear from 0 to 1 over `steps`, or over the blocks of the curriculum."""
        over = steps if self.curriculum is None else self.curriculum.alignment_warmup / self.step_blocks
        return min((self.step + 1) / max(over, 1), 1.0)


@dataclass(frozen=True)
class StepLoss:
    """Loss to descend, and per-slot top-1 hits with their counts for the log."""

    loss: Float[Tensor, ""]
    cross_entropy: Float[Tensor, ""]
    parts: dict[str, Float[Tensor, ""]]
    slot_hits: Float[Tensor, "draft_slot"]
    slot_counts: Float[Tensor, "draft_slot"]


class Objective(nn.Module):
    """From a batch of blocks to a loss of `draft`; parameters outside `draft` are trained along and not part of it."""

    supervises: ClassVar[bool] = False
    """Whether it takes `Intermediate` supervision."""

    draft: Draft

    def forward(self, batch: Batch, progress: Progress) -> StepLoss:
        """The loss and what is logged beside it."""
        raise NotImplementedError


def objective_for(draft: Draft, intermediate: Intermediate | None = None) -> Objective:
    """The public recipe of a draft's kind, with `intermediate` supervision where it takes one.

    Raises:
        UsageError: this kind takes none.
    """
    made = draft.kind.load_objective()
    given: dict[str, Any] = {} if intermediate is None else {"intermediate": intermediate}
    if given and not made.supervises:
        raise UsageError(
            f"supervision of intermediate layers is for dflash, not for {draft.kind.name}; train without it."
        )
    objective: Objective = made(draft, **given)
    return objective


def supervised(draft: Draft, batch: Batch) -> tuple[Int[Tensor, "block draft_slot"], Float[Tensor, "block draft_slot"]]:
    """Labels in the draft's vocabulary, and weights cut at the first slot that cannot be supervised.

    Verification never reaches past a token the draft cannot propose, so neither does the loss. A slot that shows its
    token needs no proposal.
    """
    labels = draft.to_index(batch.tokens[:, 1:])
    passed = (labels >= 0) & (batch.weight > 0)
    if batch.visible is not None:
        passed |= batch.visible >= 0
    prefix = passed.long().cumprod(dim=-1)
    return labels, batch.weight * prefix


def step_loss(
    loss: Float[Tensor, ""],
    cross_entropy: Float[Tensor, ""],
    correct: Bool[Tensor, "rows"],
    parts: dict[str, Tensor],
    weight: Float[Tensor, "block draft_slot"],
) -> StepLoss:
    """A loss with what is logged beside it: its cross-entropy, the slots that were right, and its parts."""
    counted = weight > 0
    hits = (correct.view_as(weight) & counted).float().sum(0)
    logged = {name: part.detach() for name, part in parts.items()}
    return StepLoss(loss, cross_entropy.detach(), logged, hits, counted.float().sum(0))
