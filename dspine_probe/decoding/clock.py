"""Where the seconds of a decoding run go, without stopping a GPU to ask.

A `Clock` is told which part has just ended; the time since the last mark belongs to it. On a CUDA device marks are
events on the stream, read once at the end, so that measuring adds no synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds by part.

    prefill: opening caches and reading the prompt.
    draft: context rows and the block's pass.
    head: from the block's last states to its tokens (scores, candidates, transition cache, walk).
    verify: the target's pass, acceptance and the fetch of its verdict.
    bookkeeping: all else, callbacks included.
    """

    prefill: float = 0.0
    draft: float = 0.0
    head: float = 0.0
    verify: float = 0.0
    bookkeeping: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from the prompt to the last token."""
        return self.prefill + self.decoding

    @property
    def decoding(self) -> float:
        """Seconds after the prefill."""
        return self.draft + self.head + self.verify + self.bookkeeping


class Clock:
    """Marks the ends of parts, from the moment it is made."""

    def __init__(self, device: torch.device) -> None:
        self.on_stream = device.type == "cuda"
        self.parts: list[str] = []
        self.marks = [self._now()]

    def mark(self, part: str) -> None:
        """`part` ends here."""
        self.parts.append(part)
        self.marks.append(self._now())

    def laps(self, upto: int | None = None) -> Iterator[tuple[str, float]]:
        """Parts and their seconds in the order marked; all of them, or the first `upto`."""
        if self.on_stream:
            self.marks[-1].synchronize()
        for part, start, end in zip(self.parts[:upto], self.marks, self.marks[1:], strict=False):
            yield part, start.elapsed_time(end) / 1000 if self.on_stream else end - start

    def timing(self, upto: int | None = None) -> Timing:
        """Sums of the laps; every part must be one of `Timing`."""
        spent: dict[str, float] = {}
        for part, seconds in self.laps(upto):
            spent[part] = spent.get(part, 0.0) + seconds
        return Timing(**spent)

    def _now(self) -> Any:
        """A number, or an event on the stream."""
        if not self.on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
