"""DFlash's objective (arXiv 2602.06036): position-weighted cross-entropy, and `intermediate` supervision on request."""

from __future__ import annotations

from dspine_probe.drafts import DFlash
from dspine_probe.training.anchors import Batch
from dspine_probe.training.intermediate import Intermediate
from dspine_probe.training.losses import head_loss
from dspine_probe.training.objectives.base import Objective, Progress, StepLoss, step_loss, supervised


class DFlashObjective(Objective):
    """Position-weighted cross-entropy of every slot, with optional L1 to the target's distribution.

    `intermediate` adds its losses on the layers before the last; its readouts are trained along, not part of the draft.
    """

    supervises = True
    draft: DFlash

    def __init__(self, draft: DFlash, *, l1_weight: float = 0.0, intermediate: Intermediate | None = None) -> None:
        super().__init__()
        self.draft, self.l1_weight, self.intermediate = draft, l1_weight, intermediate

    def forward(self, batch: Batch, progress: Progress) -> StepLoss:
        context = self.draft.encode_context(batch.taps)
        states = self.draft.run(context, batch.anchor_tokens, batch.anchors, visible=batch.visible)
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
            warmed = progress.warmed_up(self.intermediate.supervision.warmup_steps)
            loss = loss + self.intermediate.strength(warmed, mean_ce) * by_layer.sum()
            parts = {f"layer_{layer}": value for layer, value in enumerate(by_layer, start=1)}
        return step_loss(loss, result.cross_entropy, result.correct, parts, weight)
