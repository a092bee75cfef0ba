"""From estimates to the rows of a result's table: the one place where rows are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.intervals import Estimate
from dspine_probe.experiments.common.schema import COLUMNS, JOIN, MEAN, typed


class RowBuilder:
    """Collects rows; `table()` returns them in the order added, with the schema's columns and types.

    factors: names of what the column `condition` is made of, in order; every row must give each a value.
    """

    def __init__(self, factors: Sequence[str] = ()) -> None:
        self.factors = tuple(factors)
        self._rows: list[tuple[Any, ...]] = []

    def add(
        self,
        value: Estimate | float,
        *,
        draft: str,
        metric: str,
        n: int,
        depth: int | None = None,
        slot: int | str = "",
        set: str = MEAN,
        **factors: object,
    ) -> None:
        """Add one row.

        Args:
            value: a single estimate (no axes; see `Estimate.at`), or a number that has no interval.
            n: how many things it is a mean of.
            slot: a slot, "2-7" for the mean of several, "" for none.
            factors: a value for each of the builder's factors, written as text.

        Raises:
            UsageError: a factor is missing, unknown, or holds the mark " | " that joins them.
        """
        if factors.keys() != {*self.factors}:
            raise UsageError(f"a row needs the factors {list(self.factors)} and was given {list(factors)}.")
        values = [str(factors[name]) for name in self.factors]
        if any(JOIN in one for one in values):
            raise UsageError(f"the factors {values} hold {JOIN!r}, which joins them; name them without it.")
        one = value if isinstance(value, Estimate) else Estimate.without_interval(value)
        ends = float(one.value), float(one.low), float(one.high)
        self._rows.append((draft, JOIN.join(values), metric, depth, str(slot), set, *ends, n))

    def table(self) -> pd.DataFrame:
        """The rows so far."""
        return typed(pd.DataFrame(self._rows, columns=list(COLUMNS)))
