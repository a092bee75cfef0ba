"""From acceptance to tokens per second. Entry point: `bench`."""

from dspine_probe.experiments.bench.measure import BenchConfig, bench
from dspine_probe.experiments.bench.result import BenchResult

__all__ = ["BenchConfig", "BenchResult", "bench"]
