"""Figures of acceptance: tokens per round by set, and how far into the block drafts are kept."""

from __future__ import annotations

import pandas as pd

from dspine_probe.experiments.acceptance.counts import AL, CONDITIONAL, SURVIVAL
from dspine_probe.experiments.acceptance.table import AcceptanceResult
from dspine_probe.experiments.common.schema import MEAN
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import panels
from dspine_probe.plots.style import layout

_KEPT = {SURVIVAL: "kept, with all before it", CONDITIONAL: "kept, given all before it"}


def bars(result: AcceptanceResult) -> FigureBlock:
    """Acceptance length of every draft on every set and their mean, with 95 % intervals."""
    rows = result.select(metric=AL)
    figure = panels(rows, by="draft", x="set", kind="bars", column=None)
    figure.update_yaxes(title_text="tokens per round (1 = no help)", rangemode="tozero")
    figure.add_hline(y=1, line_dash="dot", line_width=1)
    said = []
    for draft, part in rows.groupby("draft", sort=False):
        mine = part.set_index("set")["mean"]
        sets = mine.drop(MEAN)
        said.append(
            f"{draft}: mean {mine[MEAN]:.2f} tokens a round, from {sets.min():.2f} on {sets.idxmin()} "
            f"to {sets.max():.2f} on {sets.idxmax()}."
        )
    return FigureBlock(
        layout(figure, height=420),
        "Acceptance length by set",
        f"Tokens committed per round, bonus included, on greedy answers; 95 % intervals over prompts. {_sizes(rows)}",
        " ".join(said),
        rows,
    )


def survival(result: AcceptanceResult, *, set: str = MEAN) -> FigureBlock:
    """Share of rounds that keep slot k and all before it, and slot k given all before it."""
    rows = result.select(set=set, metric=list(_KEPT))
    rows = rows.assign(kept=rows["metric"].map(_KEPT)).sort_values("kept", ascending=False, kind="stable")
    figure = panels(rows, by="draft", x="slot", column="kept", scale=100)
    figure.update_xaxes(title_text="slot", type="category")
    figure.update_yaxes(range=[0, 100])
    figure.update_yaxes(title_text="share of rounds, %", row=1, col=1)
    said = []
    for draft, part in rows[rows["metric"] == SURVIVAL].groupby("draft", sort=False):
        shares = 100 * part["mean"]
        said.append(
            f"{draft}: {shares.iloc[0]:.0f} % of rounds keep slot 1 and {shares.iloc[-1]:.0f} % keep all {len(part)}."
        )
    return FigureBlock(
        layout(figure, height=420),
        "How far into the block drafts are kept",
        f"Set: {set}. Slots beyond an answer's end are not counted; 95 % intervals over prompts. {_sizes(rows)}",
        " ".join(said),
        rows,
    )


def over_blocks(result: AcceptanceResult) -> FigureBlock | None:
    """Acceptance length over the blocks that a draft was trained on; None without two budgets of one kind."""
    blocks = {name: count for by in result.ladders.values() for name, count in by.items()}
    if not blocks:
        return None
    rows = result.select(metric=AL, set=MEAN, draft=list(blocks))
    kinds = {name: result.drafts[name]["architecture"].removesuffix("DraftModel") for name in blocks}
    rows = rows.assign(kind=rows["draft"].map(kinds), blocks=rows["draft"].map(blocks)).sort_values("blocks")
    figure = panels(rows, by="kind", x="blocks", column=None)
    budgets = sorted(set(blocks.values()))
    ticks = {"tickvals": budgets, "ticktext": [f"{count / 1000:,.0f}k" for count in budgets]}
    figure.update_xaxes(title_text="training blocks", type="log", **ticks)
    figure.update_yaxes(title_text="tokens per round, mean of the sets")
    return FigureBlock(
        layout(figure, height=420),
        "Acceptance length over training",
        "Drafts of one recipe, decayed from one stable run at each budget; 95 % intervals over prompts, one training "
        f"seed. {_sizes(rows)}",
        " ".join(sentence for sentence in result.findings() if "doubling" in sentence),
        rows,
    )


def _sizes(rows: pd.DataFrame) -> str:
    return f"n = {rows['n'].max()} prompts."
