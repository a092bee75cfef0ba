"""Budget, optimisers and learning-rate schedule of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from dspine_probe.errors import UsageError


@dataclass(frozen=True)
class TrainConfig:
    """Budget and optimiser of a run. One micro-batch is `sequences` × `anchors` blocks on each process.

    With `visible_prefix`, every block shows the gold tokens of a random prefix and is trained on the slots behind it.
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


def set_learning_rate(
    optimizers: list[torch.optim.Optimizer], config: TrainConfig, step: int, total: int
) -> None:
    """Give every optimiser the rate of `step`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, total)
