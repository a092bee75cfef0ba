"""Where in depth and in the block a prediction becomes readable. Entry point: `emergence`."""

from dspine_probe.experiments.emergence.conditions import EmergenceConfig
from dspine_probe.experiments.emergence.measure import emergence
from dspine_probe.experiments.emergence.table import EmergenceResult

__all__ = ["EmergenceConfig", "EmergenceResult", "emergence"]
