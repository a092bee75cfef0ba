"""EAGLE-3's objective (arXiv 2503.01840): training-time test, cross-entropy to the target's distribution in every step.

A step is given the true token and the draft's own feature of the step before, as in decoding; its loss weighs
`step_loss_decay` times that of the step before. Steps beyond `ttt_length` are not trained.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.drafts import Eagle3
from dspine_probe.training.anchors import Batch
from dspine_probe.training.losses import in_chunks, label_entropy, target_distribution
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss, step_loss, supervised


class Eagle3Objective(Objective):
    """The published recipe, on the anchors of a batch in place of all positions."""

    draft: Eagle3  # type: ignore[assignment]

    def __init__(self, draft: Eagle3) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, batch: Batch, progress: Progress) -> StepLoss:
        draft, part = self.draft, self.draft.eagle
        context = draft.encode_context(batch.taps, following=batch.following)
        steps = min(part.ttt_length, batch.weight.shape[1])
        hidden = draft.forced(context, batch.tokens[:, :steps], batch.anchors)
        labels, weight = supervised(draft, batch)  # type: ignore[arg-type]
        # A batch's first slots weigh 1, divided by what all processes share; its other slots decay by another rule.
        unit = batch.weight[:, 0].max()
        decay = part.step_loss_decay ** torch.arange(labels.shape[1], device=labels.device)
        weight = unit * decay * (weight > 0) * (torch.arange(labels.shape[1], device=labels.device) < steps)
        rows = [row[:, :steps].flatten(0, 1) for row in (hidden, labels, batch.teacher)]
        found = in_chunks(self._entropies, *rows)
        soft, hard, correct = (F.pad(part.view(-1, steps), (0, labels.shape[1] - steps)) for part in found)
        return step_loss((weight * soft).sum(), (weight * hard).sum(), correct, {}, weight)

    def _entropies(self, hidden: Tensor, labels: Tensor, teacher: Tensor) -> tuple[Tensor, ...]:
        """Cross-entropy of every row to the target's distribution and to the label, and whether the best is that."""
        head = self.draft.head.to(hidden.dtype)
        scores = F.linear(hidden, head).float()
        hard, correct = label_entropy(scores, labels)
        return F.cross_entropy(scores, target_distribution(teacher, head), reduction="none"), hard, correct
