"""Panels that figures share: series with error bars, and grids of numbers, one panel a draft (or another column).

`panels` draws rows of a result as bars, lines or points, and `floors` dotted lines across them; `grids` draws tables of
depth (or layer) by slot as heatmaps on one scale. Each series is once in the legend. Axis titles and words are the
figure's own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspine_probe.errors import UsageError
from dspine_probe.plots.style import CATEGORICAL, PATTERNS, SEQUENTIAL, interval_bars, look, numbers

Kind = Literal["bars", "lines", "points"]


def panels(
    rows: pd.DataFrame,
    *,
    by: str,
    x: str,
    y: str = "mean",
    kind: Kind = "lines",
    column: str | None = "draft",
    scale: float = 1.0,
    names: Mapping[str, str] | None = None,
) -> go.Figure:
    """One panel for every value of `column`, in it one series for every value of `by`, over the column `x`.

    Args:
        rows: rows of a result, with `y` and, where there are any, the interval's ends in `low` and `high`.
        kind: grouped bars, markers joined by lines, or markers alone.
        column: what the panels stand for; None draws a single one.
        scale: factor of values and ends, 100 for shares in per cent.
        names: series to draw, in order, by value of `by`, with what the legend calls them; default: all, as they are.

    Raises:
        UsageError: there is no row to draw.
    """
    if rows.empty:
        raise UsageError("there is nothing to draw: the result holds no row of this figure's kind.")
    shown = names or {str(value): str(value) for value in dict.fromkeys(rows[by])}
    titles = [""] if column is None else list(dict.fromkeys(rows[column]))
    figure, named = row_of_panels(titles), set[str]()
    for place, title in enumerate(titles, start=1):
        panel = rows if column is None else rows[rows[column] == title]
        for index, (value, name) in enumerate(shown.items()):
            part = panel[panel[by].astype(str) == value]
            if len(part):
                trace = _series(part, x, y, kind, index, scale)
                trace.update(name=name, legendgroup=name, showlegend=name not in named)
                figure.add_trace(trace, row=1, col=place)
                named.add(name)
    if kind == "bars":
        figure.update_layout(barmode="group")
    return figure


def floors(figure: go.Figure, rows: pd.DataFrame, *, by: str, column: str | None = "draft", scale: float = 1.0) -> None:
    """Dotted lines across the panels of `panels`, at the mean of each row, named by its value of `by`."""
    titles = [annotation.text for annotation in figure.layout.annotations]
    for _, row in rows.iterrows():
        place = 1 if column is None else titles.index(row[column]) + 1
        label = {"line_dash": "dot", "line_width": 1, "annotation_text": row[by]}
        figure.add_hline(y=scale * row["mean"], **label, row=1, col=place)


def grids(
    tables: Mapping[str, pd.DataFrame], *, unit: str, x: str, y: str, digits: int = 0, top: float | None = None
) -> go.Figure:
    """One heatmap a table, on one scale from 0 to `top` (None: the data's), numbers in the cells.

    Args:
        tables: values by panel title; rows of a table are rows of its heatmap, its columns the x axis.
        unit: title of the scale. x, y: titles of the axes. digits: decimals in the cells.
    """
    figure = row_of_panels(list(tables))
    for place, table in enumerate(tables.values(), start=1):
        trace = go.Heatmap(
            z=numbers(table.to_numpy(dtype=float)),
            x=[str(value) for value in table.columns],
            y=[str(value) for value in table.index],
            texttemplate=f"%{{z:.{digits}f}}",
            hovertemplate=f"{y} %{{y}}, {x} %{{x}}: %{{z:.{digits + 1}f}}<extra></extra>",
            coloraxis="coloraxis",
        )
        figure.add_trace(trace, row=1, col=place)
    figure.update_xaxes(title_text=x, type="category")
    figure.update_yaxes(type="category")
    figure.update_yaxes(title_text=y, row=1, col=1)
    ends = {} if top is None else {"cmin": 0, "cmax": top}
    bar = {"title": {"text": unit}}
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "colorbar": bar, **ends})
    return figure


def row_of_panels(titles: list[str]) -> go.Figure:
    """An empty figure with panels side by side on one y axis."""
    return make_subplots(cols=len(titles), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.06)


def _series(part: pd.DataFrame, x: str, y: str, kind: Kind, index: int, scale: float) -> go.Bar | go.Scatter:
    values = scale * numbers(part[y].astype(float))
    drawn: dict[str, Any] = {"x": part[x].tolist(), "y": values}
    if {"low", "high"} <= set(part.columns):
        low, high = (scale * numbers(part[end].astype(float)) for end in ("low", "high"))
        drawn["error_y"] = interval_bars(values, low, high)
    if kind == "bars":
        marker = {"color": CATEGORICAL[index % len(CATEGORICAL)], "pattern": {"shape": PATTERNS[index % len(PATTERNS)]}}
        return go.Bar(**drawn, marker=marker)
    return go.Scatter(**drawn, mode="lines+markers" if kind == "lines" else "markers", **look(index))
