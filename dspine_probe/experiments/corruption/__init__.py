"""What a wrong token costs the tokens drafted behind it. Entry point: `corruption`."""

from dspine_probe.experiments.corruption.config import CorruptionConfig
from dspine_probe.experiments.corruption.measure import corruption
from dspine_probe.experiments.corruption.result import CorruptionResult

__all__ = ["CorruptionConfig", "CorruptionResult", "corruption"]
