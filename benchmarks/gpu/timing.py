"""Milliseconds of device work, with a cold cache, eagerly and as a captured graph.

Between repetitions a buffer larger than the cache is overwritten, because in a round the weights of the target have
passed through the cache before a part of the draft runs. The figure is the median over repetitions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspine_probe.decoding.graphs import FixedStep, capturing

FLUSH_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class Timing:
    """Medians in milliseconds; `graph` is None where nothing was captured, for `reason`."""

    eager: float
    graph: float | None
    reason: str | None


class Stopwatch:
    """Times functions on one device."""

    def __init__(self, device: torch.device, repetitions: int) -> None:
        self.device, self.repetitions = device, repetitions
        self.how = capturing(device)
        size = FLUSH_BYTES if device.type == "cuda" else 1
        self.other = torch.empty(size, dtype=torch.int8, device=device)

    def time(self, run: Callable[[], tuple[Tensor, ...]]) -> Timing:
        """Time a function that gives the same when run again."""
        step = FixedStep(run, self.how)
        run()
        eager = self._median(run)
        step()
        return Timing(eager, self._median(step) if step.captured else None, step.reason)

    def host(self, run: Callable[[], object]) -> float:
        """Median by the host's clock of something that ends by waiting for the device."""
        run()
        return statistics.median(_seconds(run) for _ in range(self.repetitions)) * 1000

    def bandwidth(self) -> float:
        """Bytes a second that a large copy reads and writes."""
        size = 2 * 1024**3 if self.device.type == "cuda" else 2**20
        source, target = (torch.ones(size, dtype=torch.int8, device=self.device) for _ in range(2))
        target.copy_(source)
        return 2 * size / self._median(lambda: target.copy_(source)) * 1000

    def _median(self, run: Callable[[], object]) -> float:
        return statistics.median(self._once(run) for _ in range(self.repetitions))

    def _once(self, run: Callable[[], object]) -> float:
        self.other.zero_()
        if self.device.type != "cuda":
            return _seconds(run) * 1000
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
