"""Figures of the gates experiment: how far gates stand open, what they follow, and what clamping them costs."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspine_probe.experiments.gates.result import GatesResult
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import SEQUENTIAL, interval_bars, layout, look, numbers

_HELD = {"0": "held shut", "1": "held open", "mean": "at their mean", "drawn": "of other blocks"}
_FOLLOWED = {
    "predecessor right": "the predecessor's own token is right",
    "gain": "what the injection gains at that layer",
    "gain at all layers": "what it gains at all layers",
}


def heatmaps(result: GatesResult, *, measure: str = "gate") -> FigureBlock:
    """Layer × slot, one panel a draft on one scale, numbers in the cells. `measure`: gate, written or gain."""
    rows = result.select(measure=measure, group="every block")
    rows = rows[(rows["slot"] > 0) & (rows["layer"] != "all")]
    figure = _panels(result)
    grids = {
        draft: rows[rows["draft"] == draft].pivot(index="layer", columns="slot", values="mean")
        for draft in result.drafts
    }
    for column, grid in enumerate(grids.values(), start=1):
        trace = go.Heatmap(
            z=numbers(grid.to_numpy()),
            x=[str(slot) for slot in grid.columns],
            y=list(grid.index),
            texttemplate="%{z:.2f}",
            hovertemplate="layer %{y}, slot %{x}: %{z:.3f}<extra></extra>",
            coloraxis="coloraxis",
        )
        figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="slot", type="category", row=1, col=column)
    figure.update_yaxes(type="category")
    figure.update_yaxes(title_text="layer", row=1, col=1)
    what = {"gate": "mean gate", "written": "length of the write / stream", "gain": "gain, nats"}[measure]
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "colorbar": {"title": {"text": what}}})
    return FigureBlock(
        layout(figure, height=380, legend=False),
        {
            "gate": "How far the gates stand open",
            "written": "How much is written",
            "gain": "What a write gains",
        }[measure],
        f"Mean over channels and blocks. {_sizes(rows)} An open gate is no proof that its message is used.",
        " ".join(_describe_grid(draft, grid, what) for draft, grid in grids.items()),
        _table(rows),
    )


def followed(result: GatesResult) -> FigureBlock:
    """Correlation of the gate with what it might follow, by layer, with 95 % intervals."""
    rows = result.select(measure="correlation with gate", slot=0)
    figure = _panels(result)
    for column, draft in enumerate(result.drafts, start=1):
        for index, (group, name) in enumerate(_FOLLOWED.items()):
            part = rows[(rows["draft"] == draft) & (rows["group"] == group)]
            trace = go.Scatter(
                x=part["layer"].tolist(), y=numbers(part["mean"]), mode="lines+markers", name=name,
                error_y=interval_bars(part["mean"], part["low"], part["high"]), legendgroup=group,
                showlegend=column == 1, **look(index),
            )  # fmt: skip
            figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="layer", type="category", row=1, col=column)
    figure.add_hline(y=0, line_width=1)
    figure.update_yaxes(title_text="correlation with the mean gate", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        "What the gates follow",
        "Pearson's correlation over the blocks of one slot and set, averaged over slots, then sets; "
        f"95 % intervals over prompts. {_sizes(rows)}",
        " ".join(_describe_followed(rows[rows["draft"] == draft], draft) for draft in result.drafts),
        _table(rows),
    )


def clamped(result: GatesResult, *, measure: str = "top1 walked change") -> FigureBlock:
    """Change of accuracy when gates are held at a value, by place, against the untouched draft."""
    rows = result.select(measure=measure, slot=0)
    figure = _panels(result)
    for column, draft in enumerate(result.drafts, start=1):
        for index, (value, name) in enumerate(_HELD.items()):
            part = rows[(rows["draft"] == draft) & (rows["group"] == value)]
            scaled = {end: 100 * numbers(part[end]) for end in ("mean", "low", "high")}
            trace = go.Scatter(
                x=part["layer"].tolist(), y=scaled["mean"], error_y=interval_bars(**scaled), mode="markers",
                name=name, legendgroup=value, showlegend=column == 1, **look(index),
            )  # fmt: skip
            figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="gates of layer", type="category", row=1, col=column)
    figure.add_hline(y=0, line_width=1)
    figure.update_yaxes(title_text="change in top-1 accuracy, points", row=1, col=1)
    read = "the greedy walk" if "walked" in measure else "unary scores"
    return FigureBlock(
        layout(figure, height=420),
        "What clamped gates cost",
        f"Tokens read by {read}, mean of all slots, then sets; paired 95 % intervals over prompts. {_sizes(rows)}",
        " ".join(_describe_clamped(rows[rows["draft"] == draft], draft) for draft in result.drafts),
        _table(rows),
    )


def _panels(result: GatesResult) -> go.Figure:
    return make_subplots(
        cols=len(result.drafts),
        subplot_titles=list(result.drafts),
        shared_yaxes=True,
        horizontal_spacing=0.06,
    )


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[["draft", "layer", "slot", "group", "mean", "low", "high", "n", "prompts"]]


def _sizes(rows: pd.DataFrame) -> str:
    return f"n = at most {int(rows['n'].max())} slots of {int(rows['prompts'].max())} held-out prompts."


def _describe_grid(draft: str, grid: pd.DataFrame, what: str) -> str:
    most, least = grid.stack().idxmax(), grid.stack().idxmin()
    return (
        f"{draft}: {what} from {grid.loc[least]:.2f} at layer {least[0]}, slot {least[1]}, to {grid.loc[most]:.2f} at "
        f"layer {most[0]}, slot {most[1]}."
    )


def _describe_followed(rows: pd.DataFrame, draft: str) -> str:
    texts = []
    for group, name in _FOLLOWED.items():
        part = rows[rows["group"] == group]
        texts.append(f"{name} {part['mean'].min():+.2f} to {part['mean'].max():+.2f}")
    return f"{draft}, correlation over layers with: {'; '.join(texts)}."


def _describe_clamped(rows: pd.DataFrame, draft: str) -> str:
    every = rows[rows["layer"] == "all"].set_index("group")["mean"]
    texts = [f"{name} {100 * every[value]:+.1f}" for value, name in _HELD.items() if value in every.index]
    return f"{draft}, all gates, change in points: {', '.join(texts)}."
