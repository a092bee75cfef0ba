"""How all figures look: colours that survive greyscale and colour blindness, explicit paper, plain numbers.

`layout` is applied to every figure; `numbers` takes whatever an experiment holds (bf16 and differentiable tensors too)
to arrays that plotly accepts; `look` gives a series its colour, marker and dash.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from torch import Tensor

SEQUENTIAL = "Cividis"
PAPER, INK, GRID = "#ffffff", "#1a1a1a", "#d9d9d9"
# Okabe and Ito's palette without its yellow, which white paper swallows.
CATEGORICAL = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
PATTERNS = ("", "/", ".", "x", "-")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
FONT = "system-ui, sans-serif"


def numbers(values: Tensor | Iterable[Any]) -> np.ndarray:
    """The values as a float32 array on the CPU, detached."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float32).numpy()
    return np.asarray(list(values), dtype=np.float32)


def layout(figure: go.Figure, *, height: int, legend: bool = True) -> go.Figure:
    """Give a figure the house style, in place; returns it."""
    figure.update_layout(
        template="plotly_white",
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        font={"family": FONT, "size": 13, "color": INK},
        colorway=list(CATEGORICAL),
        height=height,
        showlegend=legend,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
    )
    figure.update_xaxes(gridcolor=GRID, automargin=True)
    figure.update_yaxes(gridcolor=GRID, automargin=True)
    return figure


def look(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the index-th series, as arguments of a scatter trace."""
    at = index % len(CATEGORICAL)
    return {
        "line": {"color": CATEGORICAL[at], "dash": DASHES[at], "width": 2},
        "marker": {"color": CATEGORICAL[at], "symbol": MARKERS[at], "size": 8},
    }


def interval_bars(
    mean: Tensor | Iterable[float], low: Tensor | Iterable[float], high: Tensor | Iterable[float]
) -> dict[str, Any]:
    """Plotly's asymmetric error bars from an interval's ends."""
    centre = numbers(mean)
    return {
        "type": "data",
        "symmetric": False,
        "array": numbers(high) - centre,
        "arrayminus": centre - numbers(low),
        "thickness": 1.2,
        "width": 3,
    }
