"""What each draft is trained to do: one module per draft, from a batch of blocks to a loss.

`DFlashObjective`: position-weighted cross-entropy, and `intermediate` supervision if asked for. `DSpineObjective`:
cross-entropy and L1 to the target's distribution on unary and refined scores, cosine alignment of every layer's
feature with the label's code, and the replacement curriculum (arXiv 2609.36173). Entry point: `objective_for`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import DSpineConfig
from dspine_probe.drafts import DFlash, Draft, DSpine
from dspine_probe.drafts.dspine import SpineStates, TruePredecessors
from dspine_probe.errors import UsageError
from dspine_probe.training.anchors import Batch
from dspine_probe.training.intermediate import Intermediate
from dspine_probe.training.losses import HeadLoss, alignment_loss, candidate_loss, head_loss


@dataclass(frozen=True)
class Progress:
    """Where in training a step stands; `generator` draws what is random in the objective."""

    step: int
    total_steps: int
    generator: torch.Generator


@dataclass(frozen=True)
class Outcome:
    """Loss to descend, and per-slot top-1 hits with their counts for the log."""

    loss: Float[Tensor, ""]
    cross_entropy: Float[Tensor, ""]
    parts: dict[str, Float[Tensor, ""]]
    slot_hits: Float[Tensor, "draft_slot"]
    slot_counts: Float[Tensor, "draft_slot"]


class DFlashObjective(nn.Module):
    """Position-weighted cross-entropy of every slot, with optional L1 to the target's distribution.

    `intermediate` adds its losses on the layers before the last; its readouts are trained along, not part of the draft.
    """

    def __init__(
        self, draft: DFlash, *, l1_weight: float = 0.0, intermediate: Intermediate | None = None
    ) -> None:
        super().__init__()
        self.draft, self.l1_weight, self.intermediate = draft, l1_weight, intermediate

    def forward(self, batch: Batch, progress: Progress) -> Outcome:
        context = self.draft.encode_context(batch.taps)
        states = self.draft.run(
            context,
            batch.anchor_tokens,
            batch.anchors,
            visible=batch.visible,
            keep_residuals=self.intermediate is not None,
        )
        labels, weight = supervised(self.draft, batch)
        result = head_loss(
            states.hidden[:, 1:].flatten(0, 1),
            self.draft.head,
            labels.flatten(),
            weight.flatten(),
            teacher=batch.teacher.flatten(0, 1) if self.l1_weight else None,
            ce_weight=1.0 - self.l1_weight,
            l1_weight=self.l1_weight,
        )
        loss, parts = result.loss, {}
        if self.intermediate is not None:
            by_layer = self.intermediate(self.draft, states.residuals, batch, labels, weight)
            mean_ce = result.cross_entropy / weight.sum().clamp(min=1e-12)
            loss = loss + self.intermediate.strength(progress.step, mean_ce) * by_layer.sum()
            parts = {f"layer_{layer}": value for layer, value in enumerate(by_layer, start=1)}
        return _outcome(loss, result, parts, weight)


class DSpineObjective(nn.Module):
    """The full recipe of DSpine; weights and schedules come from the draft's config."""

    def __init__(self, draft: DSpine) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, batch: Batch, progress: Progress) -> Outcome:
        draft, spine = self.draft, self.draft.spine
        truth = TruePredecessors(
            batch.tokens, _replaced(spine, progress, len(batch.tokens), batch.tokens.device)
        )
        context = draft.encode_context(batch.taps)
        states = draft.run(
            context,
            batch.anchor_tokens,
            batch.anchors,
            visible=batch.visible,
            true_predecessors=truth,
            keep_features=spine.alignment_weight > 0,
        )
        labels, weight = supervised(draft, batch)
        unary = head_loss(
            states.hidden[:, 1:].flatten(0, 1),
            draft.head,
            labels.flatten(),
            weight.flatten(),
            teacher=batch.teacher.flatten(0, 1),
            ce_weight=spine.ce_weight,
            l1_weight=1.0 - spine.ce_weight,
            top_k=spine.top_k,
        )
        refined = self._refined_loss(states, batch, labels, weight, unary)
        loss, parts = unary.loss + refined, {"unary": unary.loss, "refined": refined}
        if spine.alignment_weight > 0:
            codes = F.embedding(batch.tokens[:, 1:], draft.codes)
            aligned = alignment_loss(states.features, codes, weight)
            strength = spine.alignment_weight * min(
                (progress.step + 1) / max(spine.alignment_warmup_steps, 1), 1.0
            )
            # The alignment fades as the draft learns: it is scaled by the mean cross-entropy of this batch.
            mean_ce = unary.cross_entropy / weight.sum().clamp(min=1e-12)
            loss, parts["alignment"] = loss + strength * mean_ce * aligned, aligned
        return _outcome(loss, unary, parts, weight)

    def _refined_loss(
        self, states: SpineStates, batch: Batch, labels: Tensor, weight: Tensor, unary: HeadLoss
    ) -> Float[Tensor, ""]:
        """Candidate losses of the last write repeated with the label's true predecessor."""
        draft, spine = self.draft, self.draft.spine
        rho = draft.refine(states.pre_write[:, 1:], batch.tokens[:, :-1, None]).flatten(0, 2)
        rows = F.embedding(unary.candidates, draft.head.to(rho.dtype))
        return candidate_loss(
            torch.bmm(rows, rho[..., None]).squeeze(-1),
            unary.candidates,
            labels.flatten(),
            unary.teacher_mass,
            weight.flatten(),
            ce_weight=spine.ce_weight,
            l1_weight=1.0 - spine.ce_weight,
            mass_threshold=spine.candidate_mass_threshold,
        )


Objective = DFlashObjective | DSpineObjective


def objective_for(draft: Draft, intermediate: Intermediate | None = None) -> Objective:
    """The public recipe of a draft, with `intermediate` supervision for a DFlash."""
    if isinstance(draft, DFlash):
        return DFlashObjective(draft, intermediate=intermediate)
    if intermediate is not None:
        raise UsageError(
            "supervision of intermediate layers is for dflash; dspine aligns its layers already."
        )
    return DSpineObjective(draft)


def supervised(
    draft: Draft, batch: Batch
) -> tuple[Int[Tensor, "block draft_slot"], Float[Tensor, "block draft_slot"]]:
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


def replacement_probability(spine: DSpineConfig, step: int, total_steps: int) -> float:
    """Chance that a block is fed true predecessors: held, then linear to zero."""
    hold, end = spine.replacement_hold_ratio, spine.replacement_end_ratio
    done = step / max(total_steps, 1)
    fade = 1.0 if done <= hold else max(0.0, (end - done) / (end - hold))
    return spine.replacement_probability * fade


def _replaced(
    spine: DSpineConfig, progress: Progress, blocks: int, device: torch.device
) -> Bool[Tensor, "block"]:
    chance = replacement_probability(spine, progress.step, progress.total_steps)
    return (torch.rand(blocks, generator=progress.generator) < chance).to(device)


def _outcome(loss: Tensor, head: HeadLoss, parts: dict[str, Tensor], weight: Tensor) -> Outcome:
    counted = weight > 0
    hits = (head.correct.view_as(weight) & counted).float().sum(0)
    return Outcome(
        loss, head.cross_entropy, {k: v.detach() for k, v in parts.items()}, hits, counted.float().sum(0)
    )
