"""From acceptance to tokens per second. Entry point: `speed`."""

from dspine_probe.experiments.speed.measure import SpeedConfig, speed
from dspine_probe.experiments.speed.result import SpeedResult

__all__ = ["SpeedConfig", "SpeedResult", "speed"]
