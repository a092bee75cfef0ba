"""What an experiment shows in the terminal: progress while it runs, tables when it is done."""

from __future__ import annotations

from types import TracebackType

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from dspine_probe.experiments.acceptance import MEAN, AcceptanceResult
from dspine_probe.experiments.stats import Estimate


class StageBars:
    """One progress bar for each stage of an experiment, shown while the `with` block runs."""

    def __init__(self, console: Console) -> None:
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        self._bars = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> StageBars:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """Move a stage's bar, which appears when it is first named."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done)


def acceptance_table(result: AcceptanceResult) -> Table:
    """AL by set and draft with 95 % intervals, and each further draft's AL over the first's on the same prompts."""
    base, *others = result.drafts
    table = Table(title=f"Tokens per round on greedy answers of {result.config.get('target', 'the target')}")
    table.add_column("set")
    table.add_column("prompts", justify="right")
    for draft in result.drafts:
        table.add_column(draft, justify="right")
    for draft in others:
        table.add_column(f"{draft} / {base}", justify="right")
    for name in (*result.sets, MEAN):
        prompts = sum(one.draft == base and name in (one.set, MEAN) for one in result.requests)
        cells = [interval(result.acceptance_length(draft, name)) for draft in result.drafts]
        cells += [interval(result.paired_ratio(draft, base, name)) for draft in others]
        if name == MEAN:
            table.add_section()
        table.add_row(name, str(prompts), *cells)
    return table


def interval(found: Estimate) -> str:
    """A single value with its interval, such as 2.61 (2.50–2.72)."""
    return f"{float(found.value):.2f} ({float(found.low):.2f}–{float(found.high):.2f})"


def frame_table(frame: pd.DataFrame, *, title: str) -> Table:
    """A table of ready-made cells, numbers to the right."""
    table = Table(title=title)
    for number, column in enumerate(frame.columns):
        table.add_column(str(column), justify="right" if number else "left")
    for row in frame.itertuples(index=False):
        table.add_row(*(str(cell) for cell in row))
    return table
