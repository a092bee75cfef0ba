"""How the rows of a result's table are written in sentences: shares of one as points and per cent, with intervals."""

from __future__ import annotations

import pandas as pd


def points(row: pd.Series) -> str:
    """A difference of shares, columns mean, low and high: `-28.7 points [-31.6, -25.5]`."""
    return f"{100 * row['mean']:+.1f} points [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"


def percent(row: pd.Series) -> str:
    """A share, columns mean, low and high: `61.3 % [58.0, 64.4]`."""
    return f"{100 * row['mean']:.1f} % [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
