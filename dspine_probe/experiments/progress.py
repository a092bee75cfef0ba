"""How experiments tell how far they are: a callback of (what, done, total), and the one that hears nothing."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""
