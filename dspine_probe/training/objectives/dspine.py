"""DSpine's objective (arXiv 2609.36173), by the weights and schedules of the draft's config.

Cross-entropy and L1 to the target's distribution on unary and refined scores, cosine alignment of every layer's feature
with the label's code, and the replacement curriculum.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.drafts import DSpine
from dspine_probe.drafts.block import BlockStates, TruePredecessors
from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.training.anchors import Batch
from dspine_probe.training.losses import HeadLoss, alignment_loss, candidate_loss, head_loss
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss, step_loss, supervised


class DSpineObjective(Objective):
    """The full recipe of DSpine."""

    draft: DSpine

    def __init__(self, draft: DSpine) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, batch: Batch, progress: Progress) -> StepLoss:
        draft, spine = self.draft, self.draft.spine
        chance = replacement_probability(spine, progress)
        replaced = torch.rand(len(batch.tokens), generator=progress.generator) < chance
        truth = TruePredecessors(batch.tokens, replaced.to(batch.tokens.device))
        context = draft.encode_context(batch.taps)
        states = draft.run(context, batch.anchor_tokens, batch.anchors, visible=batch.visible, true_predecessors=truth)
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
            features = tuple(draft.injection.feature(layer, h) for layer, h in enumerate(states.residuals))
            aligned = alignment_loss(features, codes, weight)
            strength = spine.alignment_weight * progress.warmed_up(spine.alignment_warmup_steps)
            # The alignment fades as the draft learns: it is scaled by the mean cross-entropy of this batch.
            mean_ce = unary.cross_entropy / weight.sum().clamp(min=1e-12)
            loss, parts["alignment"] = loss + strength * mean_ce * aligned, aligned
        return step_loss(loss, unary.cross_entropy, unary.correct, parts, weight)

    def _refined_loss(
        self, states: BlockStates, batch: Batch, labels: Tensor, weight: Tensor, unary: HeadLoss
    ) -> Float[Tensor, ""]:
        """Candidate losses of the last write repeated with the label's true predecessor."""
        draft, spine = self.draft, self.draft.spine
        rho = draft.refine(states.last_layer[:, 1:], batch.tokens[:, :-1, None]).flatten(0, 2)
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


def replacement_probability(spine: DSpineConfig, progress: Progress) -> float:
    """Chance that a block is fed true predecessors: held, then linear to zero."""
    fade = progress.faded(spine.replacement_hold_ratio, spine.replacement_end_ratio)
    return spine.replacement_probability * fade
