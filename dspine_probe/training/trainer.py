"""The training loop: steps of many blocks, a schedule, exact resume, metrics on file.

Runs alone or under `accelerate launch`; every process takes its own batches of a step, weights are normalised over all
of them, and the main process alone validates and writes. A step is a pure function of (seed, step), so a killed run
continues as if it had not been.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.precision import FP32
from dspine_probe.training.anchors import Batch
from dspine_probe.training.batches import StepBatches
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.objectives.base import Objective, Progress, objective_for
from dspine_probe.training.optimization import TrainConfig, learning_rate, make_optimizers, set_learning_rate
from dspine_probe.training.records import METRICS, VALIDATION, append_row, trim_rows
from dspine_probe.training.state import RunState, auxiliary_parameters, locked
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


@torch.inference_mode(False)
@torch.enable_grad()
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
    origin: Path | None = None,
) -> RunState:
    """Train `draft` in place on sequences `indices` of `store`, keeping state in `folder`; resumes what it finds there.

    Whenever state is saved, the draft is tried on the `held_out` sequences, the outcome goes to `validation.csv` and
    to `on_validation`. `stop_after` ends this call early at that step, leaving a state to resume from (the
    schedule is unchanged). `origin` is the state of another run that a decay begins with. Only the main process writes.

    Raises:
        UsageError: the folder is in use, or belongs to other settings.
        ProbeError: the loss or its gradient is not finite; the draft is left as it was before that step.
    """
    # Its own mixed precision is fixed for the whole process by the first run, so ours is used.
    accelerator = Accelerator(mixed_precision="no", cpu=draft.head.device.type == "cpu")
    main, processes = accelerator.is_main_process, accelerator.num_processes
    objective = objective or objective_for(draft)
    optimizers = make_optimizers(objective, config)
    state = RunState(folder, config, objective, optimizers)
    with ExitStack() as stack:
        with _together(accelerator):
            source = StepBatches(
                store, indices, config, draft.config.block_size, rank=accelerator.process_index, processes=processes
            )
            folder.mkdir(parents=True, exist_ok=True)
            if main:
                stack.enter_context(locked(folder))
            state.resume(origin, processes=processes)
            for name in (METRICS, VALIDATION) if main else ():
                trim_rows(folder / name, state.step)
        prepared = accelerator.prepare(objective, *optimizers)
        model, optimizers = prepared[0], list(prepared[1:])
        total = config.steps(processes)
        last = min(total, stop_after or total)
        kept = {config.steps(processes, blocks=blocks): blocks for blocks in config.keep_states}
        clock = _Clock()
        for step, batches in source.steps(state.step, last):
            set_learning_rate(optimizers, learning_rate(config, step, processes))
            report = _step(accelerator, model, optimizers, batches, config, step, source.numbers(step))
            done = step + 1
            blocks = done * config.step_blocks(processes)
            if main and (done % config.log_every == 0 or done == last):
                rate = clock.rate(blocks * draft.config.num_slots)
                report = replace(report, blocks=blocks, slots_per_second=rate)
                _write_metrics(folder, report)
                if on_log is not None:
                    on_log(report)
            if main and (done % config.save_every == 0 or done == last):
                # Before the state: a run that is killed in between validates this step again.
                if held_out:
                    found = validate(draft, store, held_out, precision=config.precision)
                    _write_validation(folder, done, blocks, found)
                    if on_validation is not None:
                        on_validation(done, found)
                state.save(done)
            if main and done in kept:
                state.save(done, f"state-{kept[done]}.pt")
    return state


@contextmanager
def _together(accelerator: Accelerator) -> Iterator[None]:
    """Stop all processes if the block fails on one, so that none waits for another."""
    fault: Exception | None = None
    try:
        yield
    except (UsageError, ProbeError) as raised:
        fault = raised
    faults = accelerator.reduce(torch.tensor(float(fault is not None), device=accelerator.device), "sum")
    if fault is not None:
        raise fault
    if faults:
        raise ProbeError("another process of this run was refused; its message says why.")


def _step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Batch],
    config: TrainConfig,
    step: int,
    numbers: range,
) -> StepReport:
    """Forward and backward over the micro-batches of one optimiser step."""
    processes = accelerator.num_processes
    weight = accelerator.reduce(torch.stack([b.weight.sum() for b in batches]).sum().to(accelerator.device), "sum")
    progress = Progress(
        step, config.steps(processes), torch.Generator(), config.step_blocks(processes), config.curriculum
    )
    sums: dict[str, Tensor] = {}
    for number, batch in zip(numbers, batches, strict=True):
        # Gradients are averaged over processes, so each contributes its sum times their number.
        scaled = replace(batch, weight=batch.weight * (processes / weight.cpu())).to(
            accelerator.device, torch.float32 if config.precision.used == FP32 else None
        )
        # A stream of its own for each micro-batch, whichever process computes it, and none of the anchors'.
        drawn = replace(progress, generator=derive_generator(config.seed, "objective", number))
        with config.precision.autocast(accelerator.device):
            outcome = model(scaled, drawn)
        accelerator.backward(outcome.loss)
        logged = {"loss": outcome.loss, "ce": outcome.cross_entropy} | outcome.parts
        logged |= {"hits": outcome.slot_hits, "counts": outcome.slot_counts}
        for name, value in logged.items():
            sums[name] = sums.get(name, 0) + value.detach()
    # Losses carry the number of processes, hits do not; after this every process has the same numbers.
    sums = {
        name: accelerator.reduce(value, "sum" if name in ("hits", "counts") else "mean") for name, value in sums.items()
    }
    norm = _clip(accelerator, accelerator.unwrap_model(model), config.clip)
    loss = float(sums["loss"])
    if not (math.isfinite(loss) and math.isfinite(norm)):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        raise ProbeError(
            f"The loss became {loss} and its gradient {norm} long at step {step}, which was not taken; run the same "
            "command with a lower --lr to go on from the last saved state."
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    accuracy = (sums["hits"] / sums["counts"].clamp(min=1)).tolist()
    parts = {k: float(v) for k, v in sums.items() if k not in ("loss", "ce", "hits", "counts")}
    lr = optimizers[0].param_groups[0]["lr"]
    return StepReport(step + 1, progress.total_steps, 0, loss, float(sums["ce"]), tuple(accuracy), lr, norm, 0.0, parts)


def _clip(accelerator: Accelerator, objective: Objective, limit: float) -> float:
    """Clip the draft's gradient and return its norm; auxiliary parameters are clipped separately.

    So no objective changes the draft's steps by the gradient of its own parameters.
    """
    auxiliary = list(auxiliary_parameters(objective).values())
    if auxiliary:
        accelerator.clip_grad_norm_(auxiliary, limit)
    return float(accelerator.clip_grad_norm_(objective.draft.parameters(), limit))


def _write_metrics(folder: Path, report: StepReport) -> None:
    row = asdict(report) | {"slot_accuracy": json.dumps(report.slot_accuracy), "parts": json.dumps(report.parts)}
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
