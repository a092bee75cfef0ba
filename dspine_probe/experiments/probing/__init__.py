"""What linear probes read from a draft, beside their controls. Entry point: `probing`."""

from dspine_probe.experiments.probing.measure import ProbingConfig, probing
from dspine_probe.experiments.probing.table import ProbingResult

__all__ = ["ProbingConfig", "ProbingResult", "probing"]
