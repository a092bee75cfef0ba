"""Figures of predecessor corruption: by place, by protocol, by slot, and what the draft picks instead."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import plotly.graph_objects as go

from dspine_probe.experiments.common.schema import MINUS
from dspine_probe.experiments.corruption.protocols import MESSAGE, ROW, TOKEN, A
from dspine_probe.experiments.corruption.replacements import RANK_2
from dspine_probe.experiments.corruption.result import PAPER_POINTS, CorruptionResult, slots_in_words
from dspine_probe.experiments.corruption.table import ALL, PREDECESSOR
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import panels
from dspine_probe.plots.style import layout

_CHANNEL = "Earlier tokens act through the target's states, which also hold what the target expects next. "
_PICKS = {"clean": "true token, before", "top1": "true token, after", "followed": "target's new choice, after"}


def places(result: CorruptionResult, *, protocol: str = A) -> FigureBlock:
    """Change in accuracy by the place of the corrupted token, bars by kind, one panel a draft."""
    rows = _headline(result, protocol, "change")
    rows = rows[(rows["edit"] == ROW) | (rows["site"] == PREDECESSOR) | (protocol != A)]
    figure = _over_places(panels(rows, by="kind", x="site", kind="bars", scale=100), rows)
    figure.add_hline(
        y=PAPER_POINTS, line_dash="dot", line_width=1, annotation_text="paper, Qwen3", annotation_position="bottom left"
    )
    return _block(
        result,
        figure,
        rows,
        f"What a wrong token costs, by its place (protocol {protocol})",
        f"Accuracy on the true tokens of {_slots(rows)}, after minus before. The dotted line is the paper's number on "
        f"its own models. {_CHANNEL if protocol == A else ''}",
        _of_place,
    )


def protocols(result: CorruptionResult, *, kind: str = RANK_2) -> FigureBlock | None:
    """Change in accuracy over the distance of the corrupted token, one line a protocol; None if only A was run."""
    measured = [protocol for protocol in result.data["headline_slots"] if result.measured(protocol)]
    if measured == [A]:
        return None
    rows = pd.concat([_headline(result, protocol, "change") for protocol in measured])
    rows = rows[(rows["kind"] == kind) & rows["edit"].isin([TOKEN, ROW, MESSAGE])]
    names = {protocol: f"protocol {protocol}" for protocol in measured}
    return _block(
        result,
        _over_places(panels(rows, by="protocol", x="site", scale=100, names=names), rows),
        rows,
        "The same question by three protocols",
        f"A {kind} token as anchor, in the shown prefix, or as message to the next slot; A is read in slot 1, B and C "
        f"in {_slots(rows[rows['protocol'] != A])}. ",
        _of_place,
    )


def slots(result: CorruptionResult) -> FigureBlock:
    """How far into the block a wrong anchor reaches: change in accuracy by slot, one line a kind, one panel a draft."""
    rows = _single(result.select(protocol=A, site=PREDECESSOR, subset=ALL, metric="change"))
    figure = panels(rows, by="kind", x="slot", scale=100)
    figure.update_xaxes(title_text="slot", type="category")
    figure.update_yaxes(title_text="change in accuracy, points", row=1, col=1)
    return _block(
        result,
        figure,
        rows,
        "How far a wrong anchor reaches",
        "The anchor is replaced and the context left intact; slot k lies k places behind it. ",
        lambda row: f"{100 * row['mean']:+.0f} points in slot {row['slot']}",
    )


def picks(result: CorruptionResult) -> FigureBlock:
    """What slot 1 picks before and after its anchor is replaced: the true token, or the target's new choice."""
    rows = pd.concat([_headline(result, A, metric, site=PREDECESSOR) for metric in _PICKS])
    rows = rows[rows["edit"] == TOKEN]
    figure = panels(rows, by="metric", x="kind", kind="bars", scale=100, names=_PICKS)
    figure.update_yaxes(title_text="share of blocks, %", row=1, col=1)
    return _block(
        result,
        figure,
        rows,
        "What the draft picks behind a wrong anchor",
        "Slot 1, by what replaces the anchor. The target's new choice is its own next token in the corrupted text. ",
        lambda row: f"{_PICKS[row['metric']]} {100 * row['mean']:.0f} %",
    )


def _block(
    result: CorruptionResult,
    figure: go.Figure,
    rows: pd.DataFrame,
    title: str,
    caption: str,
    text: Callable[[pd.Series], str],
) -> FigureBlock:
    """The figure with its words: `text` says one row of a rank-2 token."""
    said = [
        f"{draft}, after a {RANK_2} token: {', '.join(text(row) for _, row in part.iterrows())}."
        for draft, part in rows[rows["kind"] == RANK_2].groupby("draft", sort=False)
    ]
    sizes = f"n = {rows['n'].max()} predictions of {result.data['answers']} held-out prompts."
    caption += f"95 % intervals over prompts. {sizes}"
    return FigureBlock(layout(figure, height=430), title, caption, " ".join(said), rows)


def _of_place(row: pd.Series) -> str:
    return f"{row['site']} {100 * row['mean']:+.0f} points (protocol {row['protocol']})"


def _headline(result: CorruptionResult, protocol: str, metric: str, **wanted: str) -> pd.DataFrame:
    """Headline rows of all drafts that are no differences between conditions."""
    parts = [result.headline(draft, protocol, metric=metric, **wanted) for draft in result.drafts]
    rows = _single(pd.concat(parts))
    return rows[rows["site"] != "none"]


def _single(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~rows[["draft", "site", "kind"]].apply(lambda c: c.str.contains(MINUS)).any(axis=1)]


def _over_places(figure: go.Figure, rows: pd.DataFrame) -> go.Figure:
    """Places in the order of the text."""
    order = ["first", *sorted({*rows["site"]} - {"first"}, reverse=True)]
    figure.update_xaxes(title_text="place of the corrupted token", categoryorder="array", categoryarray=order)
    return figure.update_yaxes(title_text="change in accuracy, points", row=1, col=1)


def _slots(rows: pd.DataFrame) -> str:
    return " or ".join(dict.fromkeys(map(slots_in_words, rows["slot"])))
