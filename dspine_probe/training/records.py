"""The CSV files of a run: one row for each logged step, none twice after a resume."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspine_probe.files import write_atomically

METRICS, VALIDATION = "metrics.csv", "validation.csv"


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row; the first one writes the header. The first column is the step."""
    fresh = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def trim_rows(path: Path, step: int) -> None:
    """Forget rows written after the state that is resumed from, and a row that a kill cut short."""
    if not path.exists():
        return
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    kept = rows[:1] + [row for row in rows[1:] if len(row) == len(rows[0]) and row[0].isdigit() and int(row[0]) <= step]

    def write(to: Path) -> None:
        with open(to, "w", newline="") as file:
            csv.writer(file).writerows(kept)

    write_atomically(path, write)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a run's file, oldest first; none if it does not exist."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
