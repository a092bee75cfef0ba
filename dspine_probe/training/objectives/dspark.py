"""DSpark's objective (arXiv 2607.05147): 0.1 cross-entropy, 0.9 L1 to the target's distribution, and confidence.

Heads are given the true tokens before each slot. The confidence head learns the chance 1 − ½ L1 that a draw is
accepted, and its gradient stays in that head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dspine_probe.drafts import DSpark
from dspine_probe.training.anchors import Batch
from dspine_probe.training.losses import HeadLoss
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss, step_loss, supervised

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
_CHUNK = 256


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
        flat = [part.flatten(0, 1) for part in rows]
        # The scores of a chunk are made again for its gradient, so that those of all rows never exist at once.
        found = [
            checkpoint(self._distances, *(part[at : at + _CHUNK] for part in flat), use_reentrant=False)
            for at in range(0, len(flat[0]), _CHUNK)
        ]
        entropy, l1, correct = (torch.cat(parts).view_as(weight) for parts in zip(*found, strict=True))
        ce, distance = (weight * entropy).sum(), (weight * l1).sum()
        loss, parts = CE_WEIGHT * ce + L1_WEIGHT * distance, {"l1": distance}
        if draft.confidence_head is not None:
            odds = self._confidence(hidden.detach(), previous)
            chance = (1 - l1.detach() / 2).clamp(0, 1)
            parts["confidence"] = (
                weight * F.binary_cross_entropy_with_logits(odds.float(), chance, reduction="none")
            ).sum()
            loss = loss + CONFIDENCE_WEIGHT * parts["confidence"]
        none = torch.empty(0, device=loss.device)
        return step_loss(loss, HeadLoss(loss, ce.detach(), correct.flatten(), none.long(), none), parts, weight)

    def _distances(self, hidden: Tensor, read: Tensor, labels: Tensor, teacher: Tensor) -> tuple[Tensor, ...]:
        """Cross-entropy and L1 of every row, and whether its best token is the label."""
        head = self.draft.head.to(hidden.dtype)
        scores = (F.linear(hidden, head) + self.draft.markov_head.markov_w2(read)).float()
        with torch.no_grad():
            wanted = F.linear(teacher.to(hidden.dtype), head).float().softmax(dim=-1)
        # A label outside the draft's vocabulary carries no weight.
        entropy = F.cross_entropy(scores, labels.clamp(min=0), reduction="none")
        return entropy, (scores.softmax(dim=-1) - wanted).abs().sum(dim=-1), scores.argmax(dim=-1) == labels

    def _confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """The confidence head's log-odds, with the embedding of predecessors held still."""
        draft = self.draft
        assert draft.confidence_head is not None
        if draft.spark.confidence_head_with_markov:
            row = draft.markov_head.markov_w1(previous).detach().to(hidden.dtype)
            hidden = torch.cat([hidden, row], dim=-1)
        return draft.confidence_head.proj(hidden).squeeze(-1)
