"""How numbers and their intervals are written, in sentences, tables and figures alike: "value (low, high)".

Each function takes a row of a result's table (columns mean, low, high) or a single `Estimate`. Where no interval could
be computed it says "no interval"; a value that is not a number is "undefined".
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import pandas as pd

from dspine_probe.experiments.common.intervals import Estimate

NO_INTERVAL, UNDEFINED = "no interval", "undefined"
Measured: TypeAlias = "pd.Series[Any] | Estimate"


def points(measured: Measured) -> str:
    """A difference of shares: `-28.7 points (-31.6, -25.5)`."""
    return _worded(measured, "+.1f", " points", 100)


def percent(measured: Measured) -> str:
    """A share: `61.3 % (58.0, 64.4)`."""
    return _worded(measured, ".1f", " %", 100)


def number(measured: Measured, digits: int = 2, *, signed: bool = False) -> str:
    """A number: `2.12 (2.05, 2.19)`, or with its sign, `+0.12 (+0.05, +0.19)`."""
    return _worded(measured, f"{'+' if signed else ''}.{digits}f", "", 1)


def ends(measured: Measured) -> tuple[float, float, float]:
    """Mean, low and high."""
    if isinstance(measured, Estimate):
        return float(measured.value), float(measured.low), float(measured.high)
    return float(measured["mean"]), float(measured["low"]), float(measured["high"])


def _worded(measured: Measured, form: str, unit: str, scale: float) -> str:
    mean, low, high = (scale * end for end in ends(measured))
    if math.isnan(mean):
        return UNDEFINED
    interval = NO_INTERVAL if math.isnan(low) or math.isnan(high) else f"{low:{form}}, {high:{form}}"
    return f"{mean:{form}}{unit} ({interval})"


def counted(count: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
