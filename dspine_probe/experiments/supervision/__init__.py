"""What supervising intermediate layers does. Entry points: `train_arms`, `supervision`."""

from dspine_probe.experiments.supervision.arms import (
    ArmsPlan,
    SupervisionArm,
    headline_arms,
    rates_tried,
    train_arms,
    trained,
    variant_arms,
)
from dspine_probe.experiments.supervision.measure import SupervisionConfig, supervision
from dspine_probe.experiments.supervision.result import SupervisionResult
from dspine_probe.experiments.supervision.runs import ArmRun

__all__ = [
    "ArmRun",
    "ArmsPlan",
    "SupervisionArm",
    "SupervisionConfig",
    "SupervisionResult",
    "headline_arms",
    "rates_tried",
    "supervision",
    "train_arms",
    "trained",
    "variant_arms",
]
