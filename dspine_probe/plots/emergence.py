"""Figures of the emergence experiment: depth by slot, slot by depth, and the finding beside its controls."""

from __future__ import annotations

from typing import Any

import pandas as pd

from dspine_probe.experiments.common.schema import MINUS, each_row
from dspine_probe.experiments.emergence.conditions import COUNTS
from dspine_probe.experiments.emergence.controls import TRAINED, TRANSLATOR
from dspine_probe.experiments.emergence.table import EmergenceResult
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import floors, grids, panels
from dspine_probe.plots.style import layout

_READERS = {
    TRANSLATOR: "a trained translator before the frozen norm and head",
    "lens": "the frozen norm and head alone",
    "nearest code": "the nearest transfer code to the draft's own prediction feature",
    "linear probe": "a linear probe over the commonest tokens",
}
_METRICS = {"top1": "top-1 accuracy", "recall16": "label among the best 16", "mrr": "mean reciprocal rank"}


def heatmaps(result: EmergenceResult, *, reader: str = TRANSLATOR, metric: str = "top1") -> FigureBlock:
    """Depth × slot readability, one panel a draft on one scale, numbers in the cells (percent)."""
    rows = result.select(draft=[*result.drafts], setting=TRAINED, reader=reader, metric=metric)
    tables = {draft: 100 * result.grid(draft, reader=reader, metric=metric) for draft in dict.fromkeys(rows["draft"])}
    top = max(float(table.to_numpy().max()) for table in tables.values())
    figure = grids(tables, unit=f"{_METRICS[metric]}, %", x="slot", y="depth (0 = block embedding)", top=top)
    return FigureBlock(
        layout(figure, height=380, legend=False),
        f"Where a prediction becomes readable: {_METRICS[metric]}",
        f"Read by {_READERS[reader]}. Every slot is asked for the same tokens. {_sizes(result, rows)} "
        "Readable does not mean used.",
        " ".join(_describe_grid(draft, table) for draft, table in tables.items()),
        rows,
    )


def slot_curves(result: EmergenceResult, *, reader: str = TRANSLATOR, metric: str = "top1") -> FigureBlock:
    """Readability over slots, one curve a depth with 95 % intervals, one panel a draft."""
    rows = result.select(draft=[*result.drafts], setting=TRAINED, reader=reader, metric=metric)
    depths = {str(depth): f"depth {depth}" for depth in sorted(rows["depth"].unique())}
    figure = panels(rows, by="depth", x="slot", scale=100, names=depths)
    figure.update_xaxes(title_text="slot")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text=f"{_METRICS[metric]}, %", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        f"Readability over the block: {_METRICS[metric]}",
        f"Read by {_READERS[reader]}; bars are 95 % intervals over prompts. {_sizes(result, rows)}",
        " ".join(_describe_fall(result, draft, reader) for draft in dict.fromkeys(rows["draft"])),
        rows,
    )


def controls(result: EmergenceResult) -> FigureBlock:
    """Mean readability of slots 2…T over depth, the trained draft beside every control."""
    rows = result.select(draft=[*result.drafts], metric="top1_mean", reader=[TRANSLATOR, "unigram", "skip-gram"])
    rows = rows[~rows["setting"].str.contains(MINUS)]
    curves = rows[rows["setting"] != COUNTS]
    figure = panels(curves, by="setting", x="depth", scale=100)
    floors(figure, rows[rows["setting"] == COUNTS], by="reader", scale=100)
    figure.update_xaxes(title_text="depth", dtick=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="top-1 accuracy, mean of slots 2…T, %", row=1, col=1)
    return FigureBlock(
        layout(figure, height=440),
        "The finding beside its controls",
        "Every setting has translators of its own. Dotted lines count tokens and look at no state: the commonest "
        f"token, and the commonest at this distance from the anchor. {_sizes(result, rows)}",
        " ".join(_describe_controls(rows[rows["draft"] == draft], draft) for draft in result.drafts),
        rows,
    )


def _sizes(result: EmergenceResult, rows: pd.DataFrame) -> str:
    return f"n = {rows['n'].max()} tokens of {result.data['test_prompts']} held-out prompts."


def _describe_grid(draft: str, grid: pd.DataFrame) -> str:
    best: Any = grid.stack().idxmax()
    first, last = grid.columns[0], grid.columns[-1]
    return (
        f"{draft}: best {grid.loc[best]:.0f} % at depth {best[0]}, slot {best[1]}; after the first layer "
        f"{grid.loc[1, first]:.0f} % in slot {first} and {grid.loc[1, last]:.0f} % in slot {last}; "
        f"after the last {grid.iloc[-1, 0]:.0f} % and {grid.iloc[-1, -1]:.0f} %."
    )


def _describe_fall(result: EmergenceResult, draft: str, reader: str) -> str:
    falls = result.select(draft=draft, setting=TRAINED, reader=reader, metric="top1_fall")
    texts = [f"{100 * row['mean']:+.0f} at depth {row['depth']}" for row in each_row(falls)]
    return f"{draft}: first slot minus last slot, in points: {', '.join(texts)}."


def _describe_controls(rows: pd.DataFrame, draft: str) -> str:
    deepest = rows[(rows["reader"] == TRANSLATOR) & (rows["depth"] == rows["depth"].max())]
    texts = [f"{row['setting']} {100 * row['mean']:.0f} %" for row in each_row(deepest)]
    counted = [f"{row['reader']} {100 * row['mean']:.0f} %" for row in each_row(rows[rows["setting"] == COUNTS])]
    return f"{draft}, after the last layer: {', '.join(texts)}; counting alone: {', '.join(counted)}."
