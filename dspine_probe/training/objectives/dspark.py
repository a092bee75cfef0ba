"""DSpark's objective (arXiv 2607.05147): 0.1 cross-entropy, 0.9 L1 to the target's distribution, and confidence.

Heads are given the true tokens before each slot. The confidence head learns the chance 1 − ½ L1 that a draw is
accepted, and its gradient stays in that head.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from dspine_probe.drafts import DSpark
from dspine_probe.training.anchors import Batch
from dspine_probe.training.losses import in_chunks, label_entropy, target_distribution
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss, step_loss, supervised

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0


class DSparkObjective(Objective):
    """The published recipe."""

    draft: DSpark

    def __init__(self, draft: DSpark) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, batch: Batch, progress: Progress) -> StepLoss:
        draft = self.draft
        context = draft.encode_context(batch.taps)
        states = draft.run(context, batch.anchor_tokens, batch.anchors, visible=batch.visible)
        hidden, previous = draft.drafting(states.hidden), batch.tokens[:, :-1]
        labels, weight = supervised(draft, batch)
        rows = hidden, draft.markov_head.forced(hidden, previous), labels, batch.teacher
        found = in_chunks(self._distances, *(part.flatten(0, 1) for part in rows))
        entropy, l1, correct = (part.view_as(weight) for part in found)
        ce, distance = (weight * entropy).sum(), (weight * l1).sum()
        loss, parts = CE_WEIGHT * ce + L1_WEIGHT * distance, {"l1": distance}
        if draft.confidence_head is not None:
            odds = draft.confidence(hidden.detach(), previous)
            chance = (1 - l1.detach() / 2).clamp(0, 1)
            parts["confidence"] = (
                weight * F.binary_cross_entropy_with_logits(odds.float(), chance, reduction="none")
            ).sum()
            loss = loss + CONFIDENCE_WEIGHT * parts["confidence"]
        return step_loss(loss, ce, correct, parts, weight)

    def _distances(self, hidden: Tensor, read: Tensor, labels: Tensor, teacher: Tensor) -> tuple[Tensor, ...]:
        """Cross-entropy and L1 of every row, and whether its best token is the label."""
        head = self.draft.head.to(hidden.dtype)
        scores = (F.linear(hidden, head) + self.draft.markov_head.markov_w2(read)).float()
        entropy, correct = label_entropy(scores, labels)
        return entropy, (scores.softmax(dim=-1) - target_distribution(teacher, head)).abs().sum(dim=-1), correct
