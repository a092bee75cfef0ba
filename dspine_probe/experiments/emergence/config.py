"""Sizes and seeds of the emergence experiment."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspine_probe.experiments.emergence.probes import LinearProbeConfig
from dspine_probe.experiments.emergence.readers import TranslatorConfig


@dataclass(frozen=True)
class EmergenceConfig:
    """Sizes and seeds. Shares are of prompts; what is neither trained on nor validated on is tested."""

    labels_per_prompt: int = 16
    train_share: float = 0.4
    validation_share: float = 0.1
    train_rows: int = 4096
    validation_rows: int = 1024
    translator: TranslatorConfig = field(default_factory=TranslatorConfig)
    linear_probes: LinearProbeConfig | None = None
    controls: bool = True
    resamples: int = 2000
    seed: int = 0
