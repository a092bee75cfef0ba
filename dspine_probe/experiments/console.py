"""What an experiment shows in the terminal: progress while it runs, tables when it is done."""

from __future__ import annotations

import time
from types import TracebackType

import pandas as pd
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dspine_probe.experiments.acceptance import AcceptanceResult
from dspine_probe.experiments.common.schema import MEAN
from dspine_probe.experiments.common.wording import number

LOG_SECONDS = 10.0
"""A plain log gets a line when a stage begins and ends, and at most every so many seconds between."""


class StageBars:
    """How far each stage is, with the time it took and the time left, while the `with` block runs.

    In a terminal each stage is a bar; elsewhere, as in a log file, it is a line now and then.
    """

    def __init__(self, console: Console) -> None:
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        times = [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
        self._console = console
        self._bars = Progress(*columns, *times, console=console) if console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._said = 0.0

    def __enter__(self) -> StageBars:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """Move a stage, which appears when it is first named."""
        if self._bars is None:
            self._say(stage, done, total)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done)

    def _say(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        began = self._began.setdefault(stage, now)
        first = began == now
        if first or done == total or now - self._said >= LOG_SECONDS:
            self._said, taken = now, now - began
            left = f", about {taken * (total - done) / done:.0f} s left" if done and not first else ""
            self._console.print(f"{stage}: {done} of {total}, {taken:.0f} s{left}", highlight=False, soft_wrap=True)


def acceptance_table(result: AcceptanceResult) -> Table:
    """AL by set and draft with 95 % intervals, and each further draft's AL over the first's on the same prompts."""
    counts = result.counts
    base, *others = counts.drafts
    table = Table(title=f"Tokens per round on greedy answers of {result.config.get('target', 'the target')}")
    table.add_column("set")
    table.add_column("prompts", justify="right")
    for draft in counts.drafts:
        table.add_column(draft, justify="right")
    for draft in others:
        table.add_column(f"{draft} / {base}", justify="right")
    for name in (*counts.sets, MEAN):
        cells = [number(counts.acceptance_length(draft, name)) for draft in counts.drafts]
        cells += [number(counts.paired_ratio(draft, base, name)) for draft in others]
        if name == MEAN:
            table.add_section()
        table.add_row(name, str(len(counts.of(base, name))), *cells)
    return table


def frame_table(frame: pd.DataFrame, *, title: str) -> Table:
    """A table of ready-made cells, numbers to the right."""
    table = Table(title=title)
    for place, column in enumerate(frame.columns):
        table.add_column(str(column), justify="right" if place else "left")
    for row in frame.itertuples(index=False):
        table.add_row(*(str(cell) for cell in row))
    return table
