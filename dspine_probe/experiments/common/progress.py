"""How experiments tell how far they are: a callback of (what, done, total), one that hears nothing, and who counts."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


class Ticker:
    """Counts steps, each by one call that says what was done, and reports it."""

    def __init__(self, on_step: Progress | None, total: int) -> None:
        self.on_step, self.total, self.done = on_step, total, 0

    def __call__(self, what: str) -> None:
        self.done += 1
        if self.on_step is not None:
            self.on_step(what, self.done, self.total)
