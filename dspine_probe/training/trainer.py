"""The training loop: steps of many blocks, cosine schedule, exact resume, metrics on file.

Runs alone or under `accelerate launch`; every process takes its own batches of a step, and weights are normalised
over all of them. A step is a pure function of (seed, step), so a killed run continues as if it had not been.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.errors import ProbeError
from dspine_probe.training.anchors import Batch
from dspine_probe.training.batches import StepBatches
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.objective import Objective, Progress, objective_for
from dspine_probe.training.optimization import TrainConfig, make_optimizers, set_learning_rate
from dspine_probe.training.records import METRICS, VALIDATION, append_row
from dspine_probe.training.state import beside_draft, resume, save_state
from dspine_probe.training.validation import Validation, validate


@dataclass(frozen=True)
class StepReport:
    """One logged step; `grad_norm` is the draft's, before clipping."""

    step: int
    total_steps: int
    blocks: int
    loss: float
    cross_entropy: float
    slot_accuracy: tuple[float, ...]
    lr: float
    grad_norm: float
    slots_per_second: float
    parts: dict[str, float]


def train(
    draft: Draft,
    store: FeatureStore,
    config: TrainConfig,
    folder: Path,
    *,
    indices: list[int] | None = None,
    held_out: list[int] | None = None,
    objective: Objective | None = None,
    on_log: Callable[[StepReport], None] | None = None,
    on_validation: Callable[[int, Validation], None] | None = None,
    stop_after: int | None = None,
) -> Draft:
    """Train `draft` in place on sequences `indices` of `store`, keeping state in `folder`; resumes what it finds there.

    Whenever state is saved, the draft is tried on the `held_out` sequences, `validation.csv` notes the outcome and
    `on_validation` hears of it. `stop_after` ends this call early at that step, leaving a state to resume from (the
    schedule is unchanged).
    """
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=draft.head.device.type == "cpu")
    objective = objective or objective_for(draft)
    optimizers = make_optimizers(objective, config)
    total = config.steps(accelerator.num_processes)
    folder.mkdir(parents=True, exist_ok=True)
    first = resume(folder, config, objective, optimizers)
    prepared = accelerator.prepare(objective, *optimizers)
    model, optimizers = prepared[0], list(prepared[1:])
    last = min(total, stop_after or total)
    source = StepBatches(
        store,
        indices,
        config,
        draft.config.block_size,
        rank=accelerator.process_index,
        processes=accelerator.num_processes,
    )
    clock = _Clock()
    for step, batches in source.steps(first, last):
        set_learning_rate(optimizers, config, step, total)
        report = _step(accelerator, model, optimizers, batches, config, step, total)
        done = step + 1
        blocks = done * config.sequences * config.anchors * config.accumulate * accelerator.num_processes
        if done % config.log_every == 0 or done == last:
            rate = clock.rate(blocks * draft.config.num_slots)
            report = replace(report, blocks=blocks, slots_per_second=rate)
            if accelerator.is_main_process:
                _write_metrics(folder, report)
                if on_log is not None:
                    on_log(report)
        if (done % config.save_every == 0 or done == last) and accelerator.is_main_process:
            # Before the state: a run that is killed in between validates this step again.
            if held_out:
                found = validate(draft, store, held_out)
                _write_validation(folder, done, blocks, found)
                if on_validation is not None:
                    on_validation(done, found)
            save_state(folder, config, objective, optimizers, done)
    return draft


def _step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Batch],
    config: TrainConfig,
    step: int,
    total: int,
) -> StepReport:
    """Forward and backward over the micro-batches of one optimiser step."""
    weight = accelerator.reduce(
        torch.stack([b.weight.sum() for b in batches]).sum().to(accelerator.device), "sum"
    )
    stream = (config.seed * 1_000_003 + step) * accelerator.num_processes + accelerator.process_index
    generator = torch.Generator().manual_seed(stream)
    sums: dict[str, Tensor] = {}
    for batch in batches:
        # Gradients are averaged over processes, so each contributes its sum times their number.
        scaled = replace(batch, weight=batch.weight * (accelerator.num_processes / weight.cpu())).to(
            accelerator.device, torch.float32 if accelerator.mixed_precision == "no" else None
        )
        outcome = model(scaled, Progress(step, total, generator))
        accelerator.backward(outcome.loss)
        logged = {"loss": outcome.loss, "ce": outcome.cross_entropy, "hits": outcome.slot_hits}
        logged |= {"counts": outcome.slot_counts} | outcome.parts
        for name, value in logged.items():
            sums[name] = sums.get(name, 0) + value.detach()
    norm = _clip(accelerator, accelerator.unwrap_model(model), config.clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loss = float(sums["loss"])
    if not math.isfinite(loss):
        raise ProbeError(
            f"The loss became {loss} at step {step}; resume from the last checkpoint with a lower --lr."
        )
    accuracy = (sums["hits"] / sums["counts"].clamp(min=1)).tolist()
    parts = {k: float(v) for k, v in sums.items() if k not in ("loss", "ce", "hits", "counts")}
    lr = optimizers[0].param_groups[0]["lr"]
    return StepReport(
        step + 1, total, 0, loss, float(sums["ce"]), tuple(accuracy), lr, float(norm), 0.0, parts
    )


def _clip(accelerator: Accelerator, objective: Objective, limit: float) -> Tensor:
    """Clip the draft's gradient and return its norm; what is trained beside it is clipped apart.

    So no objective changes the draft's steps by the gradient of its own parameters.
    """
    beside = list(beside_draft(objective).values())
    if beside:
        accelerator.clip_grad_norm_(beside, limit)
    return accelerator.clip_grad_norm_(objective.draft.parameters(), limit)


def _write_metrics(folder: Path, report: StepReport) -> None:
    row = asdict(report) | {
        "slot_accuracy": json.dumps(report.slot_accuracy),
        "parts": json.dumps(report.parts),
    }
    append_row(folder / METRICS, row)


def _write_validation(folder: Path, step: int, blocks: int, found: Validation) -> None:
    survival = {f"survival_{slot}": share for slot, share in enumerate(found.survival, start=1)}
    row = {"step": step, "blocks": blocks, "anchors": found.anchors}
    append_row(folder / VALIDATION, row | {"tokens_per_anchor": found.tokens_per_anchor} | survival)


class _Clock:
    """Rate since the last reading."""

    def __init__(self) -> None:
        self.time: float | None = None
        self.slots = 0

    def rate(self, slots: int) -> float:
        now = time.monotonic()
        elapsed = None if self.time is None else now - self.time
        rate = 0.0 if not elapsed else (slots - self.slots) / elapsed
        self.time, self.slots = now, slots
        return rate
