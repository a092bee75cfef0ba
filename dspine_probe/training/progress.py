"""Progress of a long token run: a bar with rate and time left on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 30.0


class TokenProgress:
    """Counts tokens towards a total (None: no end known); writes to standard error only inside the `with` block."""

    def __init__(self, label: str, total: int | None, *, done: int = 0, console: Console | None = None) -> None:
        self._label, self._total, self._done = label, total, done
        self._made = self._gained = 0
        self._console = console

    def __enter__(self) -> TokenProgress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = self._console or Console(stderr=True)
        self._started = self._printed = time.monotonic()
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._bar.start()
        self._task = self._bar.add_task(self._label, total=self._total, completed=self._done)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()
        assert self._console is not None
        self._console.print(self.line(), highlight=False)

    def add(self, kept: int, made: int) -> None:
        """Note `made` more tokens, of which `kept` count towards the total."""
        self._done += kept
        self._gained += kept
        self._made += made
        self._bar.update(self._task, completed=self._done, description=f"{self._label} {self._rate():,.0f} tokens/s")
        now = time.monotonic()
        assert self._console is not None
        if not self._console.is_terminal and now - self._printed >= LINE_SECONDS:
            self._printed = now
            self._console.print(self.line(), highlight=False)

    def line(self) -> str:
        """The state in one line: tokens, rate and time left."""
        total = "" if self._total is None else f" of {self._total:,}"
        text = f"{self._label}: {self._done:,}{total} tokens kept, {self._rate():,.0f} tokens/s"
        if self._total is None or self._gained == 0 or self._done >= self._total:
            return text
        seconds = (self._total - self._done) * (time.monotonic() - self._started) / self._gained
        return f"{text}, {seconds / 60:.0f} min left"

    def _rate(self) -> float:
        return self._made / max(time.monotonic() - self._started, 1e-9)
