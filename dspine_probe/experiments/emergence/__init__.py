"""Where in depth and in the block a prediction becomes readable. Entry point: `emergence`."""

from dspine_probe.experiments.emergence.config import EmergenceConfig
from dspine_probe.experiments.emergence.measure import emergence
from dspine_probe.experiments.emergence.result import EmergenceResult

__all__ = ["EmergenceConfig", "EmergenceResult", "emergence"]
