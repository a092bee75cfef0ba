"""Domino's objective (arXiv 2605.29707): the backbone's cross-entropy fades into that of the corrected scores.

The GRU is given the true tokens. The share of the backbone's loss falls from 1 linearly to 0 over the whole training.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dspine_probe.drafts import Domino
from dspine_probe.training.anchors import Batch
from dspine_probe.training.losses import HeadLoss
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss, step_loss, supervised

DECAY_RATIO = 1.0
"""Share of training over which the backbone's loss fades, as for the 8B release."""
_CHUNK = 256


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
        flat = [part.flatten(0, 1) for part in rows]
        # The scores of a chunk are made again for its gradient, so that those of all rows never exist at once.
        found = [
            checkpoint(self._entropies, *(part[at : at + _CHUNK] for part in flat), use_reentrant=False)
            for at in range(0, len(flat[0]), _CHUNK)
        ]
        base, final, correct = (torch.cat(parts).view_as(weight) for parts in zip(*found, strict=True))
        base, final = (weight * base).sum(), (weight * final).sum()
        share = progress.faded(0.0, DECAY_RATIO)
        loss, none = share * base + (1 - share) * final, torch.empty(0, device=weight.device)
        result = HeadLoss(loss, final.detach(), correct.flatten(), none.long(), none)
        return step_loss(loss, result, {"base": base, "final": final}, weight)

    def _entropies(self, hidden: Tensor, read: Tensor, corrected: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Cross-entropy of every row before and after its correction, and whether its best token is the label."""
        unary = F.linear(hidden, self.draft.head.to(hidden.dtype)).float()
        scores = unary + self.draft.embed_proj[2](read).float() * corrected[:, None]
        # A label outside the draft's vocabulary carries no weight.
        base, final = (F.cross_entropy(s, labels.clamp(min=0), reduction="none") for s in (unary, scores))
        return base, final, scores.argmax(dim=-1) == labels
