"""Figures of the gates experiment: how far gates stand open, what they follow, and what clamping them costs."""

from __future__ import annotations

import pandas as pd

from dspine_probe.experiments.gates.table import EVERY, HELD, GatesResult
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import grids, panels
from dspine_probe.plots.style import layout

_FOLLOWED = {
    "predecessor right": "the predecessor's own token is right",
    "gain": "what the injection gains at that layer",
    "gain at all layers": "what it gains at all layers",
}
_GRIDS = {
    "gate": ("mean gate", "How far the gates stand open"),
    "written": ("length of the write / stream", "How much is written"),
    "gain": ("gain, nats", "What a write gains"),
}


def heatmaps(result: GatesResult, *, metric: str = "gate") -> FigureBlock:
    """Layer × slot, one panel a draft on one scale, numbers in the cells. `metric`: gate, written or gain."""
    rows = result.select(metric=metric, group=EVERY)
    rows = rows[(rows["slot"] != "") & rows["depth"].notna()]
    tables = {
        draft: part.assign(slot=part["slot"].astype(int)).pivot(index="depth", columns="slot", values="mean")
        for draft, part in rows.groupby("draft", sort=False)
    }
    what, title = _GRIDS[metric]
    figure = grids(tables, unit=what, x="slot", y="layer", digits=2)
    return FigureBlock(
        layout(figure, height=380, legend=False),
        title,
        f"Mean over channels and blocks. {_sizes(rows, result)} An open gate is no proof that its message is used.",
        " ".join(_describe_grid(draft, grid, what) for draft, grid in tables.items()),
        _table(rows),
    )


def followed(result: GatesResult) -> FigureBlock:
    """Correlation of the gate with what it might follow, by layer, with 95 % intervals."""
    rows = result.select(metric="correlation with gate", slot="")
    figure = panels(rows, by="group", x="place", names=_FOLLOWED)
    figure.add_hline(y=0, line_width=1)
    figure.update_xaxes(title_text="layer", type="category")
    figure.update_yaxes(title_text="correlation with the mean gate", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        "What the gates follow",
        "Pearson's correlation over the blocks of one slot and set, averaged over slots, then sets; "
        f"95 % intervals over prompts. {_sizes(rows, result)}",
        " ".join(_describe_followed(part, draft) for draft, part in rows.groupby("draft", sort=False)),
        _table(rows),
    )


def clamped(result: GatesResult, *, metric: str = "top1 walked change") -> FigureBlock:
    """Change of accuracy when gates are held at a value, by place, against the untouched draft."""
    rows = result.select(metric=metric, slot="")
    figure = panels(rows, by="group", x="place", kind="points", scale=100, names=HELD)
    figure.add_hline(y=0, line_width=1)
    figure.update_xaxes(title_text="gates of layer", type="category")
    figure.update_yaxes(title_text="change in top-1 accuracy, points", row=1, col=1)
    read = "the greedy walk" if "walked" in metric else "unary scores"
    return FigureBlock(
        layout(figure, height=420),
        "What clamped gates cost",
        f"Tokens read by {read}, mean of all slots, then sets; paired 95 % intervals over prompts. "
        f"{_sizes(rows, result)}",
        " ".join(_describe_clamped(part, draft) for draft, part in rows.groupby("draft", sort=False)),
        _table(rows),
    )


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[["draft", "place", "slot", "group", "mean", "low", "high", "n"]]


def _sizes(rows: pd.DataFrame, result: GatesResult) -> str:
    return f"n = at most {int(rows['n'].max())} slots of {result.data['answers']} held-out prompts."


def _describe_grid(draft: str, grid: pd.DataFrame, what: str) -> str:
    most, least = grid.stack().idxmax(), grid.stack().idxmin()
    return (
        f"{draft}: {what} from {grid.loc[least]:.2f} at layer {least[0]}, slot {least[1]}, to {grid.loc[most]:.2f} at "
        f"layer {most[0]}, slot {most[1]}."
    )


def _describe_followed(rows: pd.DataFrame, draft: str) -> str:
    ends = rows.groupby("group")["mean"].agg(["min", "max"])
    texts = (f"{name} {ends.loc[g, 'min']:+.2f} to {ends.loc[g, 'max']:+.2f}" for g, name in _FOLLOWED.items())
    return f"{draft}, correlation over layers with: {'; '.join(texts)}."


def _describe_clamped(rows: pd.DataFrame, draft: str) -> str:
    every = rows[rows["place"] == "all"].set_index("group")["mean"]
    texts = [f"{name} {100 * every[value]:+.1f}" for value, name in HELD.items() if value in every.index]
    return f"{draft}, all gates, change in points: {', '.join(texts)}."
