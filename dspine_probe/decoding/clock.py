"""Where the seconds of a decoding run go, without stopping a GPU to ask.

A `Clock` is told which part has just ended; the time since the last mark belongs to it. On a CUDA device marks are
events on the stream, read once at the end, so that measuring adds no synchronisation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

Part = Literal["prefill", "draft", "head", "verify", "bookkeeping"]


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
        self.parts: list[Part] = []
        self.marks = [self._now()]

    def mark(self, part: Part) -> None:
        """`part` ends here."""
        self.parts.append(part)
        self.marks.append(self._now())

    def timing(self, upto: int | None = None) -> Timing:
        """Sums over all marks, or over the first `upto` of them."""
        spent = dict.fromkeys((field.name for field in fields(Timing)), 0.0)
        marks = self.marks
        if self.on_stream:
            marks[-1].synchronize()
        for part, start, end in zip(self.parts[:upto], marks, marks[1:], strict=False):
            spent[part] += start.elapsed_time(end) / 1000 if self.on_stream else end - start
        return Timing(**spent)

    def _now(self) -> Any:
        """A number, or an event on the stream."""
        if not self.on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
