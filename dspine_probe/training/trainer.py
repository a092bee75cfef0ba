"""The training loop: steps of many blocks, cosine schedule, exact resume, metrics on file.

Runs alone or under `accelerate launch`; every process takes its own batches of a step, and weights are normalised
over all of them. A step is a pure function of (seed, step), so a killed run continues as if it had not been.
"""

from __future__ import annotations

import json
import math
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn

from dspine_probe.drafts import Draft
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically
from dspine_probe.training.anchors import (
    Batch,
    make_batch,
    sample_anchors,
    show_prefixes,
    visiting_order,
)
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.intermediate import READOUTS
from dspine_probe.training.objective import Objective, Progress, objective_for
from dspine_probe.training.records import METRICS, VALIDATION, append_row, trim_rows
from dspine_probe.training.validation import Validation, validate


@dataclass(frozen=True)
class TrainConfig:
    """Budget and optimiser of a run. One micro-batch is `sequences` × `anchors` blocks on each process.

    With `visible_prefix`, every block shows the gold tokens of a random prefix and is trained on the slots behind it.
    """

    blocks: int
    sequences: int = 8
    anchors: int = 32
    accumulate: int = 1
    lr: float = 6e-4
    warmup: float = 0.04
    gamma: float = 4.0
    clip: float = 1.0
    optimizer: str = "adamw"
    seed: int = 0
    save_every: int = 200
    log_every: int = 10
    mixed_precision: str = "bf16"
    visible_prefix: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise UsageError(f"optimizer {self.optimizer!r} is unknown; use adamw or muon.")
        if self.blocks < self.sequences * self.anchors * self.accumulate:
            raise UsageError(
                f"{self.blocks} blocks do not fill one step of {self.sequences} × {self.anchors} × {self.accumulate}."
            )

    def steps(self, processes: int = 1) -> int:
        """Optimiser steps that spend the block budget."""
        return math.ceil(self.blocks / (self.sequences * self.anchors * self.accumulate * processes))


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
    `on_validation` hears of it.
    `stop_after` ends this call early at that step, leaving a state to resume from (the schedule is unchanged).
    """
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=draft.head.device.type == "cpu")
    objective = objective or objective_for(draft)
    optimizers = make_optimizers(objective, config)
    total = config.steps(accelerator.num_processes)
    folder.mkdir(parents=True, exist_ok=True)
    first = _resume(folder, config, objective, optimizers)
    prepared = accelerator.prepare(objective, *optimizers)
    model, optimizers = prepared[0], list(prepared[1:])
    last = min(total, stop_after or total)
    source = _Batches(store, indices, config, draft.config.block_size, accelerator)
    clock = _Clock()
    for step, batches in source.steps(first, last):
        _set_lr(optimizers, config, step, total)
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
            _save(folder, config, objective, optimizers, done)
            if held_out:
                found = validate(draft, store, held_out)
                _write_validation(folder, done, blocks, found)
                if on_validation is not None:
                    on_validation(done, found)
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
            accelerator.device
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
    beside = list(_beside(objective).values())
    if beside:
        accelerator.clip_grad_norm_(beside, limit)
    return accelerator.clip_grad_norm_(objective.draft.parameters(), limit)


def _beside(objective: Objective) -> dict[str, nn.Parameter]:
    """Parameters that serve the objective and are no part of the draft."""
    return {name: p for name, p in objective.named_parameters() if not name.startswith("draft.")}


class _Batches:
    """Micro-batches of each step, read from the memory map one step ahead of use."""

    def __init__(
        self,
        store: FeatureStore,
        indices: list[int] | None,
        config: TrainConfig,
        block_size: int,
        accelerator: Accelerator,
    ) -> None:
        self.store, self.config, self.block_size = store, config, block_size
        self.indices = list(range(len(store))) if indices is None else indices
        self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        lengths, prompts = store.meta.lengths, store.meta.prompt_lengths
        self.indices = [i for i in self.indices if lengths[i] - prompts[i] >= 2]
        self.lengths = [lengths[i] for i in self.indices]
        self.per_epoch = len(visiting_order(self.lengths, config.sequences, config.seed, 0))
        if not self.per_epoch:
            raise UsageError(
                f"{len(self.indices)} usable sequences do not fill one batch of {config.sequences}."
            )

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[Batch]]]:
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.at, first)
            for step in range(first, last):
                batches, ahead = ahead.result(), pool.submit(self.at, min(step + 1, last - 1))
                yield step, batches

    def at(self, step: int) -> list[Batch]:
        per_step = self.config.accumulate * self.processes
        start = step * per_step + self.rank * self.config.accumulate
        return [self._micro(number) for number in range(start, start + self.config.accumulate)]

    def _micro(self, number: int) -> Batch:
        config = self.config
        epoch, place = divmod(number, self.per_epoch)
        order = visiting_order(self.lengths, config.sequences, config.seed, epoch)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        sequences = [self.store[self.indices[i]] for i in order[place]]
        anchors = [sample_anchors(s, config.anchors, generator) for s in sequences]
        batch = make_batch(
            sequences,
            anchors,
            block_size=self.block_size,
            gamma=config.gamma,
            anchors_per_sequence=config.anchors,
        )
        return show_prefixes(batch, generator) if config.visible_prefix else batch


def make_optimizers(trained: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW on everything, or Muon on the matrices and AdamW on the rest, of a draft or of its objective."""
    parameters = dict(trained.named_parameters())
    by_matrix = {name: p.ndim == 2 and config.optimizer == "muon" for name, p in parameters.items()}
    matrices = [p for name, p in parameters.items() if by_matrix[name]]
    others = [p for name, p in parameters.items() if not by_matrix[name]]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        muon = torch.optim.Muon(matrices, lr=config.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    optimizers.append(
        torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    )
    return optimizers


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Linear warm-up, then cosine to zero."""
    warmup = max(1, round(config.warmup * total))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def _set_lr(optimizers: list[torch.optim.Optimizer], config: TrainConfig, step: int, total: int) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, total)


def _save(
    folder: Path,
    config: TrainConfig,
    objective: Objective,
    optimizers: list[torch.optim.Optimizer],
    step: int,
) -> None:
    beside = {name: p.detach().cpu() for name, p in _beside(objective).items()}
    state = {
        "step": step,
        "config": asdict(config),
        "draft": objective.draft.state_dict(),
        "beside": beside,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    write_atomically(folder / "state.pt", lambda path: torch.save(state, path))
    if beside:
        write_atomically(folder / READOUTS, lambda path: save_file(beside, path))


def _resume(
    folder: Path, config: TrainConfig, objective: Objective, optimizers: list[torch.optim.Optimizer]
) -> int:
    """Load a saved state into objective and optimisers; returns the step to go on with."""
    path = folder / "state.pt"
    if not path.exists():
        return 0
    if not zipfile.is_zipfile(path):
        raise ProbeError(f"{path} is damaged or was cut short; delete it to start over.")
    state = torch.load(path, map_location="cpu", weights_only=True)
    before, now = asdict(TrainConfig(**state["config"])), asdict(config)
    changed = [name for name in now if now[name] != before[name]]
    beside, saved_beside = _beside(objective), state.get("beside", {})
    if beside.keys() != saved_beside.keys():
        changed.append("supervision")
    if changed:
        raise UsageError(
            f"{folder} was trained with other settings ({', '.join(changed)}); choose another output folder."
        )
    objective.draft.load_state_dict(state["draft"])
    with torch.no_grad():
        for name, parameter in beside.items():
            parameter.copy_(saved_beside[name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for name in (METRICS, VALIDATION):
        trim_rows(folder / name, state["step"])
    return int(state["step"])


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
