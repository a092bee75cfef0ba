"""DFlash2's objective: DFlash's cross-entropy, plus the selector's over each slot's own candidates.

The selector is given the true predecessor; where the label is no candidate it learns nothing.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dspine_probe.drafts import DFlash2
from dspine_probe.training.anchors import Batch
from dspine_probe.training.losses import candidate_loss, head_loss
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss, step_loss, supervised


class DFlash2Objective(Objective):
    """Position-weighted cross-entropy of unary scores and of the selected candidates, weighted alike."""

    draft: DFlash2

    def __init__(self, draft: DFlash2) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, batch: Batch, progress: Progress) -> StepLoss:
        draft = self.draft
        context = draft.encode_context(batch.taps)
        states = draft.run(context, batch.anchor_tokens, batch.anchors, visible=batch.visible)
        hidden = draft.drafting(states.hidden)
        labels, weight = supervised(draft, batch)
        unary = head_loss(
            hidden.flatten(0, 1), draft.head, labels.flatten(), weight.flatten(), top_k=draft.candidate_count
        )
        index = unary.candidates.view(*labels.shape, -1)
        rows = F.embedding(index, draft.head.to(hidden.dtype))
        scores = (rows @ hidden[..., None]).squeeze(-1)
        scores = scores + draft.candidate_selector(hidden, batch.tokens[:, :-1, None], index)[:, :, 0]
        selected = candidate_loss(
            scores.flatten(0, 1),
            unary.candidates,
            labels.flatten(),
            torch.zeros_like(unary.teacher_mass),
            weight.flatten(),
            ce_weight=1.0,
            l1_weight=0.0,
            mass_threshold=0.0,
        )
        parts = {"unary": unary.loss, "selected": selected}
        return step_loss(unary.loss + selected, unary.cross_entropy, unary.correct, parts, weight)
