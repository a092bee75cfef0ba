"""Figures of one block: what every depth would write in each slot, and where the clean stream repairs it."""

from __future__ import annotations

import html

import plotly.graph_objects as go

from dspine_probe.experiments.one_block import BlockPatch, DepthReading
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import grids, row_of_panels
from dspine_probe.plots.style import SEQUENTIAL, layout


def depth_lens(reading: DepthReading) -> FigureBlock:
    """Depth × slot with the tokens in the cells, one panel a draft; colour: the first choice's probability, 0…1."""
    figure = row_of_panels(list(dict.fromkeys(reading.table["draft"])))
    for place, (_, rows) in enumerate(reading.table.groupby("draft", sort=False), start=1):
        shown = rows.assign(
            token=[_visible(token) + "*" * (rank == 0) for token, rank in zip(rows["token"], rows["rank"], strict=True)]
        )
        names = ("probability", "token", "rank")
        grid = {name: shown.pivot(index="depth", columns="slot", values=name) for name in names}
        labels = rows[rows["depth"] == 0].sort_values("slot")["label"]
        trace = go.Heatmap(
            z=grid["probability"].to_numpy(dtype=float),
            x=[f"{slot}<br>{_visible(label)}" for slot, label in enumerate(labels, start=1)],
            y=[str(depth) for depth in grid["probability"].index],
            text=grid["token"].to_numpy(),
            customdata=grid["rank"].to_numpy(dtype=int),
            texttemplate="%{text}",
            hovertemplate="depth %{y}, slot %{x}: %{text} %{z:.2f}; rank of the label %{customdata}<extra></extra>",
            coloraxis="coloraxis",
        )
        figure.add_trace(trace, row=1, col=place)
    figure.update_xaxes(title_text="slot, and the token the target writes there", type="category")
    figure.update_yaxes(type="category")
    figure.update_yaxes(title_text="depth (0 = block embedding)", row=1, col=1)
    bar = {"title": {"text": "probability"}}
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "colorbar": bar, "cmin": 0, "cmax": 1})
    return FigureBlock(
        layout(figure, height=420, legend=False),
        "What every depth would write",
        f"One block behind “…{reading.before}”, read by the frozen norm and head alone (a logit lens). A star "
        "marks the target's own token. Readable does not mean used.",
        " ".join(reading.findings()),
        reading.table,
    )


def patch_map(patch: BlockPatch) -> FigureBlock:
    """Depth × slot: how much of the damage the clean stream repairs there."""
    grid = patch.table.pivot(index="depth", columns="slot", values="recovered")
    figure = grids(
        {patch.draft: grid}, unit="share repaired", x="slot (0 = anchor)", y="depth (0 = block embedding)", digits=2
    )
    return FigureBlock(
        layout(figure, height=420, legend=False),
        f"Where the clean stream repairs slot {patch.slot}",
        f"The anchor {patch.anchor!r} is replaced by {patch.replacement!r}; then one slot at one depth gets back its "
        "state of the undisturbed run. 1: the log-probability is as before; 0: nothing is repaired. One block, no "
        "interval. In a DSpine the anchor also sends its code past the stream, which no patch here undoes.",
        " ".join(patch.findings()),
        patch.table,
    )


def _visible(token: str) -> str:
    return html.escape(token.replace("\n", "↵").strip(" ")) or "␣"
