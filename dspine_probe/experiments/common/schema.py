"""The result of an experiment: one long table that all experiments share, beside a record of how it was made.

A row is one estimate. Its columns, in the order on disk:

    draft      name of the draft, or "a − b" for a difference on the same prompts
    condition  what was done; the values of the experiment's `FACTORS`, joined by " | "
    metric     what was measured
    depth      layer of the draft, 0 for the block embedding; empty where there is none
    slot       "1", "2-7", or "" for none
    set        a prompt set, or "mean" for the unweighted mean of the sets
    mean, low, high   the value and its 95 % interval; low and high are empty where there is no interval
    n          how many things the value is a mean of

Text columns are text whatever they look like, so drafts may be named `400`, `1e3`, `NA` or `None`. `RowBuilder`
(`rows.py`) makes tables, `Result` keeps, selects, saves and loads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.claims import Claim
from dspine_probe.experiments.common.markup import folded, listed
from dspine_probe.experiments.common.records import read_record, write_record
from dspine_probe.files import write_atomically

COLUMNS = ("draft", "condition", "metric", "depth", "slot", "set", "mean", "low", "high", "n")
TEXT, NUMBERS = ("draft", "condition", "metric", "slot", "set"), ("mean", "low", "high")
JOIN, MINUS, MEAN = " | ", " − ", "mean"
Wanted = str | int | None | Collection[str] | Collection[int]


@dataclass(frozen=True, eq=False)
class Result:
    """A table with everything that reproduces it. An experiment subclasses this and says what its table means.

    NAME: stem of the two files of a saved result. FACTORS: what the column `condition` is made of, in order.
    table: rows in the order above. config: sizes and seeds. drafts: what each draft is, by name.
    data: counts and descriptions of what was measured on. seconds: how long it took. Subclasses may add fields; they
    stand in the record too.
    """

    NAME: ClassVar[str]
    FACTORS: ClassVar[tuple[str, ...]] = ()
    table: pd.DataFrame
    config: Mapping[str, Any]
    drafts: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Any]
    seconds: float

    def __post_init__(self) -> None:
        if tuple(self.table.columns) != COLUMNS:
            raise UsageError(
                f"a result's table has the columns {', '.join(COLUMNS)} and not {', '.join(self.table.columns)}; "
                "make it with RowBuilder, or measure again if an older version wrote it."
            )

    def frame(self) -> pd.DataFrame:
        """The table, a copy, with every factor as a column of its own behind `condition`."""
        return self._framed.copy()

    def select(self, **wanted: Wanted) -> pd.DataFrame:
        """Rows of `frame()` in which every named column or factor has the given value, or one of several.

        None finds rows without a value (`depth=None`).

        Raises:
            UsageError: there is no such column or factor.
        """
        frame = self._framed
        keep = pd.Series(True, index=frame.index)
        for column, value in wanted.items():
            if column not in frame:
                raise UsageError(f"{self.NAME} has no column {column!r}; it has {', '.join(frame.columns)}.")
            if value is None:
                keep &= frame[column].isna()
            elif isinstance(value, str | int):
                keep &= (frame[column] == value).fillna(False).astype(bool)
            else:
                keep &= frame[column].isin(list(value))
        return frame[keep]

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join([f"{self.NAME}, measured in {self.seconds or 0:.0f} s:", *(f"- {s}" for s in self.findings())])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """The findings, over the folded table in a notebook; figures are made from a result, not by it."""
        table = folded(self.table, f"Table: {len(self.table)} rows")
        return {"text/plain": str(self), "text/html": f"{listed(self.findings())}{table}"}

    def claims(self) -> list[Claim]:
        """Lines of the claims ledger that this result gives; none by default."""
        return []

    def save(self, folder: str | Path) -> None:
        """Write `<NAME>.csv` and `<NAME>.json` into `folder`, each whole or not at all.

        Raises:
            ProbeError: the folder cannot be written to or the disk is full.
        """
        record = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "table"}
        path = Path(folder) / f"{self.NAME}.csv"
        write_atomically(path, lambda temporary: self.table.to_csv(temporary, index=False))
        write_record(folder, self.NAME, record)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read back what `save` wrote.

        Raises:
            UsageError: there is no such result in the folder, or its table has other columns.
            ProbeError: a file is there but cannot be read.
        """
        record = read_record(folder, cls.NAME)
        path = Path(folder) / f"{cls.NAME}.csv"
        try:
            parts = {part.name: record[part.name] for part in fields(cls) if part.name != "table"}
            table = read_table(path)
        except (KeyError, ValueError, FileNotFoundError) as error:
            raise ProbeError(f"the result {path} cannot be read ({error}); make it again.") from error
        return cls(table, **parts)

    @cached_property
    def _framed(self) -> pd.DataFrame:
        if not self.FACTORS:
            return self.table
        values = [condition.split(JOIN) for condition in self.table["condition"]]
        wrong = next((value for value in values if len(value) != len(self.FACTORS)), None)
        if wrong is not None:
            raise UsageError(f"the condition {JOIN.join(wrong)!r} does not name {', '.join(self.FACTORS)}.")
        factors = pd.DataFrame(values, columns=list(self.FACTORS), index=self.table.index, dtype=str)
        return pd.concat([self.table.iloc[:, :2], factors, self.table.iloc[:, 2:]], axis=1)


def each_row(rows: pd.DataFrame) -> list[pd.Series]:
    """The rows one by one, as what `wording` takes."""
    return [row for _, row in rows.iterrows()]


def typed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the schema's columns in order, and its types: text, nullable whole numbers, floats."""
    whole = dict.fromkeys(("depth", "n"), "Int64")
    return rows[list(COLUMNS)].astype(dict.fromkeys(TEXT, str) | whole | dict.fromkeys(NUMBERS, float))


def read_table(path: Path) -> pd.DataFrame:
    """A table that `Result.save` wrote; text stays text, whatever it looks like.

    Raises:
        ValueError: a cell is not of its column's type. A table with other columns comes back as it is.
    """
    raw = pd.read_csv(path, dtype=str, keep_default_na=False)
    if tuple(raw.columns) != COLUMNS:
        return raw
    for column in ("depth", "n"):
        raw[column] = pd.array([int(cell) if cell else pd.NA for cell in raw[column]], dtype="Int64")
    for column in NUMBERS:
        raw[column] = [float(cell) if cell else float("nan") for cell in raw[column]]
    return typed(raw)
