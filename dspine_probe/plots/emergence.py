"""Figures of the emergence experiment: depth by slot, slot by depth, and the finding beside its controls."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspine_probe.experiments.emergence.result import EmergenceResult
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import SEQUENTIAL, interval_bars, layout, look, numbers

_KEYS = ["draft", "condition", "reader", "depth", "slot", "mean", "low", "high", "n", "prompts"]
_READERS = {
    "translator": "a trained translator before the frozen norm and head",
    "lens": "the frozen norm and head alone",
    "nearest code": "the nearest transfer code to the draft's own prediction feature",
    "linear probe": "a linear probe over the commonest tokens",
}
_METRICS = {"top1": "top-1 accuracy", "recall16": "label among the best 16", "mrr": "mean reciprocal rank"}


def heatmaps(result: EmergenceResult, *, reader: str = "translator", metric: str = "top1") -> FigureBlock:
    """Depth × slot readability, one panel a draft on one scale, numbers in the cells (percent)."""
    rows = result.select(condition="trained", reader=reader, metric=metric)
    grids = {draft: 100 * result.grid(draft, reader=reader, metric=metric) for draft in result.drafts}
    grids = {draft: grid for draft, grid in grids.items() if len(grid)}
    figure = make_subplots(
        cols=len(grids), subplot_titles=list(grids), shared_yaxes=True, horizontal_spacing=0.06
    )
    top = max(float(grid.to_numpy().max()) for grid in grids.values())
    for column, grid in enumerate(grids.values(), start=1):
        trace = go.Heatmap(
            z=numbers(grid.to_numpy()),
            x=[str(slot) for slot in grid.columns],
            y=[str(depth) for depth in grid.index],
            texttemplate="%{z:.0f}",
            hovertemplate="depth %{y}, slot %{x}: %{z:.1f} %<extra></extra>",
            coloraxis="coloraxis",
        )
        figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="slot", type="category", row=1, col=column)
    figure.update_yaxes(type="category")
    figure.update_yaxes(title_text="depth (0 = block embedding)", row=1, col=1)
    bar = {"title": {"text": f"{_METRICS[metric]}, %"}}
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": top, "colorbar": bar})
    return FigureBlock(
        layout(figure, height=380, legend=False),
        f"Where a prediction becomes readable: {_METRICS[metric]}",
        f"Read by {_READERS[reader]}. Every slot is asked for the same tokens. {_sizes(rows)} "
        "Readable does not mean used.",
        " ".join(_describe_grid(draft, grid) for draft, grid in grids.items()),
        rows[rows["slot"] > 0][_KEYS],
    )


def slot_curves(result: EmergenceResult, *, reader: str = "translator", metric: str = "top1") -> FigureBlock:
    """Readability over slots, one curve a depth with 95 % intervals, one panel a draft."""
    rows = result.select(condition="trained", reader=reader, metric=metric)
    drafts = [draft for draft in result.drafts if (rows["draft"] == draft).any()]
    figure = make_subplots(
        cols=len(drafts), subplot_titles=drafts, shared_yaxes=True, horizontal_spacing=0.06
    )
    for column, draft in enumerate(drafts, start=1):
        for depth, part in rows[rows["draft"] == draft].groupby("depth"):
            scaled = {end: 100 * numbers(part[end]) for end in ("mean", "low", "high")}
            trace = go.Scatter(
                x=part["slot"].tolist(), y=scaled["mean"], error_y=interval_bars(**scaled), mode="lines+markers",
                name=f"depth {depth}", legendgroup=str(depth), showlegend=column == 1, **look(int(depth)),
            )  # fmt: skip
            figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="slot", dtick=1, row=1, col=column)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text=f"{_METRICS[metric]}, %", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        f"Readability over the block: {_METRICS[metric]}",
        f"Read by {_READERS[reader]}; bars are 95 % intervals over prompts. {_sizes(rows)}",
        " ".join(_describe_fall(result, draft, reader) for draft in drafts),
        rows[rows["slot"] > 0][_KEYS],
    )


def controls(result: EmergenceResult) -> FigureBlock:
    """Mean readability of slots 2…T over depth, the trained draft beside every control."""
    rows = result.select(metric="top1_mean")
    plain = rows["draft"].isin(list(result.drafts)) & ~rows["condition"].str.contains("−")
    rows = rows[plain & rows["reader"].isin(["translator", "unigram", "skip-gram"])]
    conditions = [c for c in dict.fromkeys(rows["condition"]) if c != "counts"]
    figure = make_subplots(
        cols=len(result.drafts),
        subplot_titles=list(result.drafts),
        shared_yaxes=True,
        horizontal_spacing=0.06,
    )
    for column, draft in enumerate(result.drafts, start=1):
        mine = rows[rows["draft"] == draft]
        for index, condition in enumerate(conditions):
            part = mine[(mine["condition"] == condition) & (mine["reader"] == "translator")]
            scaled = {end: 100 * numbers(part[end]) for end in ("mean", "low", "high")}
            trace = go.Scatter(
                x=part["depth"].tolist(), y=scaled["mean"], error_y=interval_bars(**scaled), mode="lines+markers",
                name=condition, legendgroup=condition, showlegend=_first_seen(rows, condition, draft), **look(index),
            )  # fmt: skip
            figure.add_trace(trace, row=1, col=column)
        for reader in ("unigram", "skip-gram"):
            floor = 100 * float(mine[mine["reader"] == reader]["mean"].iloc[0])
            figure.add_hline(
                y=floor, line_dash="dot", line_width=1, annotation_text=reader, row=1, col=column
            )
        figure.update_xaxes(title_text="depth", dtick=1, row=1, col=column)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="top-1 accuracy, mean of slots 2…T, %", row=1, col=1)
    return FigureBlock(
        layout(figure, height=440),
        "The finding beside its controls",
        "Every condition has translators of its own. Dotted lines count tokens and look at no state: the commonest "
        f"token, and the commonest at this distance from the anchor. {_sizes(rows)}",
        " ".join(_describe_controls(rows[rows["draft"] == draft], draft) for draft in result.drafts),
        rows[_KEYS],
    )


def _first_seen(rows: pd.DataFrame, condition: str, draft: str) -> bool:
    return bool(rows[rows["condition"] == condition]["draft"].iloc[0] == draft)


def _sizes(rows: pd.DataFrame) -> str:
    return f"n = {int(rows['n'].max())} tokens of {int(rows['prompts'].max())} held-out prompts."


def _describe_grid(draft: str, grid: pd.DataFrame) -> str:
    depth, slot = grid.stack().idxmax()
    first, last = grid.columns[0], grid.columns[-1]
    return (
        f"{draft}: best {grid.loc[depth, slot]:.0f} % at depth {depth}, slot {slot}; after the first layer "
        f"{grid.loc[1, first]:.0f} % in slot {first} and {grid.loc[1, last]:.0f} % in slot {last}; "
        f"after the last {grid.iloc[-1, 0]:.0f} % and {grid.iloc[-1, -1]:.0f} %."
    )


def _describe_fall(result: EmergenceResult, draft: str, reader: str) -> str:
    falls = result.select(draft=draft, condition="trained", reader=reader, metric="top1_fall")
    texts = [f"{100 * row['mean']:+.0f} at depth {row['depth']}" for _, row in falls.iterrows()]
    return f"{draft}: first slot minus last slot, in points: {', '.join(texts)}."


def _describe_controls(rows: pd.DataFrame, draft: str) -> str:
    deepest = (
        rows[rows["reader"] == "translator"].sort_values("depth").groupby("condition", sort=False).last()
    )
    texts = [f"{condition} {100 * row['mean']:.0f} %" for condition, row in deepest.iterrows()]
    floors = [
        f"{row['reader']} {100 * row['mean']:.0f} %"
        for _, row in rows[rows["condition"] == "counts"].iterrows()
    ]
    return f"{draft}, after the last layer: {', '.join(texts)}; counting alone: {', '.join(floors)}."
