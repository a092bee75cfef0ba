"""Domino's objective (arXiv 2605.29707): the backbone's cross-entropy fades into that of the corrected scores.

The GRU is given the true tokens. The share of the backbone's loss falls from 1 linearly to 0 over the whole training.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.drafts import Domino
from dspine_probe.training.anchors import Batch
from dspine_probe.training.losses import in_chunks, label_entropy
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss, step_loss, supervised

DECAY_RATIO = 1.0
"""Share of training over which the backbone's loss fades, as for the 8B release."""


class DominoObjective(Objective):
    """The published recipe."""

    draft: Domino

    def __init__(self, draft: Domino) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, batch: Batch, progress: Progress) -> StepLoss:
        draft = self.draft
        context = draft.encode_context(batch.taps)
        states = draft.run(context, batch.anchor_tokens, batch.anchors, visible=batch.visible)
        hidden = draft.drafting(states.hidden)
        labels, weight = supervised(draft, batch)
        corrected = torch.arange(hidden.shape[1], device=hidden.device) >= draft.domino.pure_draft_prefix_len
        rows = hidden, draft.reads(hidden, batch.tokens[:, :-1]), corrected.expand_as(labels), labels
        found = in_chunks(self._entropies, *(part.flatten(0, 1) for part in rows))
        base, final, correct = (part.view_as(weight) for part in found)
        base, final = (weight * base).sum(), (weight * final).sum()
        share = progress.faded(0.0, DECAY_RATIO)
        loss = share * base + (1 - share) * final
        return step_loss(loss, final, correct, {"base": base, "final": final}, weight)

    def _entropies(self, hidden: Tensor, read: Tensor, corrected: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Cross-entropy of every row before and after its correction, and whether its best token is the label."""
        unary = F.linear(hidden, self.draft.head.to(hidden.dtype)).float()
        scores = unary + self.draft.embed_proj[2](read).float() * corrected[:, None]
        final, correct = label_entropy(scores, labels)
        return label_entropy(unary, labels)[0], final, correct
