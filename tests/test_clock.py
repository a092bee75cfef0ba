"""The clock sums its laps, by the wall or by events on a CUDA stream."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from dspine_probe.decoding.clock import Clock


class Event:
    """Stands in for an event: recorded 3, 6, 9, … milliseconds after the start."""

    ticks = count(3, 3)

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = next(self.ticks)

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_laps_add_up(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    ticks = count(0.003, 0.003)
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    clock = Clock(torch.device(device))
    for part in ("prefill", "draft", "verify", "draft"):
        clock.mark(part)
    found = clock.timing()
    assert found.draft == pytest.approx(0.006) and found.prefill == pytest.approx(0.003)
    assert found.total == pytest.approx(0.012) and found.decoding == pytest.approx(0.009)
    assert clock.timing(upto=2).total == pytest.approx(0.006)
    clock.mark("lunch")
    with pytest.raises(TypeError, match="lunch"):
        clock.timing()
