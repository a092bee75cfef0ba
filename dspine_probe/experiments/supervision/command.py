"""The supervision experiment as a command: its options, and how a request is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspine_probe.drafts.checkpoint import load_draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments import supervision as experiment
from dspine_probe.experiments.common.request import Request, option
from dspine_probe.experiments.supervision.result import SupervisionResult
from dspine_probe.precision import Precision
from dspine_probe.target import Target
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.optimization import TrainConfig


@dataclass(frozen=True)
class SupervisionOptions:
    """What `probe supervision` takes as options."""

    arms: Path | None = option(None, "Folder of trained arms, `<arm>-<seed>`, and their runs.")
    features: tuple[Path, ...] = option((), "A folder made by `features`: train what is missing on it; repeatable.")
    blocks: int = option(102_400, "Blocks that each arm is trained on.", min=1)
    lr: tuple[float, ...] = option((1e-3,), "Peak rate; repeat to choose one for each arm by short runs.")
    tuning_blocks: int = option(25_600, "Blocks of each run that chooses a rate.", min=1)
    variants: bool = option(True, "Also the other codes, one seed each.")
    worker: int = option(0, "Which of the processes that train this is.", min=0)
    workers: int = option(1, "How many processes train; each takes whole arms.", min=1)


def run(request: Request, options: SupervisionOptions) -> SupervisionResult | None:
    """Train what is missing, if there are features, and measure all arms; None for a process that only trains."""
    if options.arms is None:
        raise UsageError("name the folder of trained arms with --arms.")
    chosen = experiment.headline_arms() | (experiment.variant_arms() if options.variants else {})
    # Arms are trained in whatever is fastest here; they are measured with the request's target, in fp32.
    precision = request.precision or Precision.resolve()
    training = TrainConfig(blocks=options.blocks, lr=options.lr[0], mixed_precision=precision.accelerate)
    plan = experiment.ArmsPlan(chosen, training, rates=options.lr, tuning_blocks=options.tuning_blocks)
    if options.features:
        teacher = Target.load(request.target.name, dtype=precision.dtype, device=request.target.device)
        store = FeatureStore.open(*options.features)
        experiment.train_arms(plan, teacher, store, options.arms, worker=options.worker, workers=options.workers)
    if options.worker:
        return None  # the first process measures, once the others are done
    runs = experiment.trained(plan, options.arms)
    if not runs:
        raise UsageError(f"{options.arms} holds no finished arm; train them by naming --features.")
    first = load_draft(next(iter(next(iter(runs.values())).values())).checkpoint, request.target)
    tried = experiment.rates_tried(options.arms, list(plan.arms))
    return experiment.supervision(
        request.target, runs, request.arena_for(first), rates=tried, on_progress=request.on_progress
    )
