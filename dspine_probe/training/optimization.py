"""Budget, optimisers and learning-rate schedule of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dspine_probe.errors import UsageError
from dspine_probe.precision import BF16, FP32, Precision
from dspine_probe.training.objectives.base import Curriculum

COSINE, WSD = "cosine", "wsd"


@dataclass(frozen=True)
class TrainConfig:
    """Budget and optimiser of a run. One micro-batch is `sequences` × `anchors` blocks on each process.

    Two schedules, both of peak rate `lr`. "cosine": everything is a share of the budget `blocks`; linear over the first
    `warmup`, then a cosine to zero, and the draft's own curriculum in the ratios that its config gives. "wsd"
    (warm-up, stable, decay): everything is a number of blocks, so that a run does not depend on where it will end;
    linear over `warmup_blocks`, then constant, `blocks` being only where to stop for now. `keep_states` names blocks at
    which the state is kept for good. With `decay_from`, a run that goes on from such a state falls linearly to zero
    at `blocks`. Replacement (DSpine) holds for the first of `replacement_blocks` and is gone at the second; alignment
    reaches its strength over `alignment_warmup_blocks`.

    `visible_prefix` is the share of blocks that show the gold tokens of a random prefix and are trained on the slots
    behind it.
    """

    blocks: int
    sequences: int = 4
    anchors: int = 16
    accumulate: int = 1
    lr: float = 1e-3
    warmup: float = 0.04
    gamma: float = 4.0
    clip: float = 1.0
    optimizer: str = "adamw"
    seed: int = 0
    save_every: int = 200
    log_every: int = 10
    mixed_precision: str = "bf16"
    visible_prefix: float = 0.0
    schedule: str = COSINE
    warmup_blocks: int = 12_800
    replacement_blocks: tuple[int, int] = (53_000, 107_000)
    alignment_warmup_blocks: int = 9_344
    keep_states: tuple[int, ...] = ()
    decay_from: int | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise UsageError(f"optimizer {self.optimizer!r} is unknown; use adamw or muon.")
        if self.schedule not in (COSINE, WSD):
            raise UsageError(f"schedule {self.schedule!r} is unknown; use {COSINE} or {WSD}.")
        if self.schedule == COSINE and (self.keep_states or self.decay_from is not None):
            raise UsageError(f"states are kept and decayed under the schedule {WSD} alone; give --schedule {WSD}.")
        if not 0 <= self.visible_prefix <= 1:
            raise UsageError(f"visible_prefix is {self.visible_prefix}; give the share of blocks, 0…1.")
        hold, end = self.replacement_blocks
        if not 0 <= hold <= end:
            raise UsageError(f"replacement_blocks are {hold} and {end}; it must end no earlier than it fades.")
        if self.blocks < self.sequences * self.anchors * self.accumulate:
            raise UsageError(
                f"{self.blocks} blocks do not fill one step of {self.sequences} × {self.anchors} × {self.accumulate}."
            )

    @property
    def precision(self) -> Precision:
        """What the run computes in."""
        used = BF16 if self.mixed_precision == "bf16" else FP32
        return Precision(used, used)

    @property
    def curriculum(self) -> Curriculum | None:
        """What changes during training, in blocks; None where the draft's config has it in shares of the budget."""
        if self.schedule == COSINE:
            return None
        return Curriculum(self.replacement_blocks, self.alignment_warmup_blocks)

    def step_blocks(self, processes: int = 1) -> int:
        """Blocks of one optimiser step."""
        return self.sequences * self.anchors * self.accumulate * processes

    def steps(self, processes: int = 1, *, blocks: int | None = None) -> int:
        """Optimiser steps that spend the budget, or `blocks` of it."""
        return math.ceil((self.blocks if blocks is None else blocks) / self.step_blocks(processes))

    def unlike(self, before: TrainConfig) -> list[str]:
        """Names of the settings that keep this run from going on where `before` stopped.

        The rate may change, and of a run in its stable phase also where to stop and which states to keep.
        """
        free = {"lr"} if self.schedule == COSINE else {"lr", "keep_states"}
        if self.schedule == WSD and before.decay_from is None:
            free |= {"blocks", "decay_from"} if self.decay_from is not None else {"blocks"}
        was = asdict(before)
        return [name for name, value in asdict(self).items() if value != was[name] and name not in free]


def make_optimizers(trained: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW on everything that is trained, or Muon on the matrices and AdamW on the rest, of a draft or its objective.

    An objective may have `rate_factors`: by parameter, the share of the learning rate that it gets.
    """
    factors: Mapping[str, float] = getattr(trained, "rate_factors", {})
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, p in trained.named_parameters():
        if p.requires_grad:
            key = (p.ndim == 2 and config.optimizer == "muon", factors.get(name, 1.0))
            groups.setdefault(key, []).append(p)
    found: dict[bool, list[dict[str, Any]]] = {}
    for (matrix, factor), params in groups.items():
        found.setdefault(matrix, []).append({"params": params, "factor": factor})
    optimizers: list[torch.optim.Optimizer] = []
    if True in found:
        muon = torch.optim.Muon(found[True], lr=config.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    if False in found:
        adamw = torch.optim.AdamW(found[False], lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        optimizers.append(adamw)
    return optimizers


def learning_rate(config: TrainConfig, step: int, processes: int = 1) -> float:
    """The rate of `step`: linear warm-up, then cosine to zero, or constant until the decay, linear to zero, begins."""
    total, wsd = config.steps(processes), config.schedule == WSD
    warmup = max(1, config.steps(processes, blocks=config.warmup_blocks) if wsd else round(config.warmup * total))
    begin = total if config.decay_from is None else config.steps(processes, blocks=config.decay_from)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if not wsd:
        return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    return config.lr * min(1.0, (total - step) / max(1, total - begin))


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Give every optimiser the rate, or its share of it where an objective says so."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)
