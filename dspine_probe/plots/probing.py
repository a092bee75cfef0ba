"""Figures of the probing study: accuracy over depth beside its controls, and over depth and slot."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspine_probe.experiments.probing.result import ProbingResult
from dspine_probe.experiments.probing.table import (
    ACCURACY,
    COMMONEST,
    CONTROL,
    SLOT_ALONE,
    TRAINED,
    UNTRAINED,
)
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import SEQUENTIAL, interval_bars, layout, look, numbers

_CURVES = (TRAINED, UNTRAINED, CONTROL)
_FLOORS = (SLOT_ALONE, COMMONEST)
_COLUMNS = ["target", "condition", "depth", "slot", "mean", "low", "high", "seed_sd", "n", "prompts"]


def curves(result: ProbingResult, draft: str) -> FigureBlock:
    """Accuracy over depth for every target of one draft, the trained draft beside its controls."""
    rows = result.select(draft=draft, measure=ACCURACY, slot=0)
    rows = rows[rows["condition"].isin([*_CURVES, *_FLOORS])]
    targets = list(result.config["targets"])
    figure = make_subplots(
        cols=len(targets), subplot_titles=targets, shared_yaxes=True, horizontal_spacing=0.03
    )
    for column, target in enumerate(targets, start=1):
        mine = rows[rows["target"] == target]
        for index, condition in enumerate(_CURVES):
            part = mine[mine["condition"] == condition]
            scaled = {end: 100 * numbers(part[end]) for end in ("mean", "low", "high")}
            trace = go.Scatter(
                x=part["depth"].tolist(), y=scaled["mean"], error_y=interval_bars(**scaled), mode="lines+markers",
                name=condition, legendgroup=condition, showlegend=column == 1, **look(index),
            )  # fmt: skip
            figure.add_trace(trace, row=1, col=column)
        for condition in _FLOORS:
            floor = 100 * float(mine[mine["condition"] == condition]["mean"].iloc[0])
            figure.add_hline(
                y=floor, line_dash="dot", line_width=1, annotation_text=condition, row=1, col=column
            )
        figure.update_xaxes(title_text="depth", dtick=1, row=1, col=column)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="accuracy, %", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        f"What a linear probe reads in {draft}",
        "One probe a depth for all slots, tested on other prompts; bars are 95 % intervals over prompts. Dotted lines "
        f"read no state. {_sizes(rows)} Decodable does not mean used.",
        " ".join(_describe(rows[rows["target"] == target], target) for target in targets),
        rows[_COLUMNS],
    )


def heatmap(result: ProbingResult, draft: str, target: str) -> FigureBlock:
    """Depth × slot accuracy for one target, numbers in the cells (percent)."""
    rows = result.select(draft=draft, target=target, measure=ACCURACY, condition=TRAINED)
    rows = rows[rows["slot"] > 0]
    grid = 100 * rows.pivot(index="depth", columns="slot", values="mean").astype(float)
    trace = go.Heatmap(
        z=numbers(grid.to_numpy()),
        x=[str(slot) for slot in grid.columns],
        y=[str(depth) for depth in grid.index],
        texttemplate="%{z:.0f}",
        hovertemplate="depth %{y}, slot %{x}: %{z:.1f} %<extra></extra>",
        colorscale=SEQUENTIAL,
        colorbar={"title": {"text": "accuracy, %"}},
    )
    figure = go.Figure(trace)
    figure.update_xaxes(title_text="slot", type="category")
    figure.update_yaxes(title_text="depth (0 = block embedding)", type="category")
    best = grid.stack().idxmax()
    return FigureBlock(
        layout(figure, height=380, legend=False),
        f"Where {draft} holds the {target}",
        f"Linear probe, one a depth for all slots. {_sizes(rows)} Decodable does not mean used.",
        f"{draft}, {target}: best {grid.loc[best]:.0f} % at depth {best[0]}, slot {best[1]}; after the last layer "
        f"{grid.iloc[-1, 0]:.0f} % in slot {grid.columns[0]} and {grid.iloc[-1, -1]:.0f} % in slot {grid.columns[-1]}.",
        rows[_COLUMNS],
    )


def _sizes(rows: pd.DataFrame) -> str:
    return f"n = at most {int(rows['n'].max())} slots of {int(rows['prompts'].max())} held-out prompts."


def _describe(rows: pd.DataFrame, target: str) -> str:
    deepest = rows[rows["depth"] == rows["depth"].max()].set_index("condition")["mean"]
    floors = rows[rows["condition"].isin(_FLOORS)].set_index("condition")["mean"]
    texts = [f"{name} {100 * value:.0f} %" for name, value in [*deepest.items(), *floors.items()]]
    return f"{target}, after the last layer: {', '.join(texts)}."
