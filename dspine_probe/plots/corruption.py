"""Figures of predecessor corruption: by place, by protocol, by slot, and what the draft picks instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from dspine_probe.experiments.corruption.protocols import ROW, TOKEN, A
from dspine_probe.experiments.corruption.result import PAPER_POINTS, CorruptionResult
from dspine_probe.experiments.corruption.substitutes import RANK_2
from dspine_probe.experiments.corruption.table import ALL, MINUS, PREDECESSOR
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import CATEGORICAL, interval_bars, layout, look, numbers

_KEYS = ["draft", "protocol", "site", "edit", "kind", "subset", "metric"]
_NUMBERS = ["first_slot", "last_slot", "mean", "low", "high", "n", "prompts"]
_PATTERNS = ("", "/", ".", "x", "-", "+")
_CHANNEL = (
    "Earlier tokens are heard through the target's states, which also hold what the target expects next."
)
_PICKS = {
    "clean": "true token, before",
    "top1": "true token, after",
    "followed": "target's new answer, after",
}


def places(result: CorruptionResult, *, protocol: str = A) -> FigureBlock:
    """Change in accuracy by the place of the corrupted token, bars by kind, one panel a draft."""
    rows = _plain(result, protocol, "change")
    rows = rows[(rows["edit"] == ROW) | (rows["site"] == PREDECESSOR) | (protocol != A)]
    figure = _panels(rows, "kind", partial(_bars, x="site"))
    figure.add_hline(
        y=PAPER_POINTS,
        line_dash="dot",
        line_width=1,
        annotation_text="paper, Qwen3",
        annotation_position="bottom left",
    )
    figure.update_xaxes(title_text="place of the corrupted token", **_far_to_near(rows))
    figure.update_yaxes(title_text="change in accuracy, points", row=1, col=1)
    figure.update_layout(barmode="group")
    return FigureBlock(
        layout(figure, height=440),
        f"What a wrong token costs, by its place (protocol {protocol})",
        f"Accuracy on the true tokens of {_slots(rows)}, after minus before; 95 % intervals over prompts. The dotted "
        f"line is the paper's number on its own models. {_CHANNEL if protocol == A else ''} {_sizes(rows)}",
        _each(_describe, rows),
        rows[_KEYS + _NUMBERS],
    )


def protocols(result: CorruptionResult, *, kind: str = RANK_2) -> FigureBlock:
    """Change in accuracy over the distance of the corrupted token, one line a protocol, one panel a draft."""
    rows = pd.concat([_plain(result, protocol, "change") for protocol in result.data["headline_slots"]])
    rows = rows[
        (rows["kind"] == kind) & rows["edit"].isin([TOKEN, ROW, "message"]) & (rows["site"] != "none")
    ]
    names = {protocol: f"protocol {protocol}" for protocol in result.data["headline_slots"]}
    figure = _panels(rows, "protocol", partial(_line, x="site"), names)
    figure.update_xaxes(title_text="place of the corrupted token", **_far_to_near(rows))
    figure.update_yaxes(title_text="change in accuracy, points", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        "The same question by three protocols",
        f"A {kind} token as anchor, in the shown prefix, or as message to the next slot; A is read in slot 1, B and C "
        f"in {_slots(rows[rows['protocol'] != A]) or 'later slots'}. 95 % intervals over prompts. {_sizes(rows)}",
        _each(_describe, rows),
        rows[_KEYS + _NUMBERS],
    )


def slots(result: CorruptionResult) -> FigureBlock:
    """How far into the block a wrong anchor reaches: change in accuracy by slot, one line a kind, one panel a draft."""
    rows = result.select(protocol=A, site=PREDECESSOR, subset=ALL, metric="change")
    rows = _single(rows)[lambda r: r["first_slot"] == r["last_slot"]]
    figure = _panels(rows, "kind", partial(_line, x="first_slot"))
    figure.update_xaxes(title_text="slot", dtick=1)
    figure.update_yaxes(title_text="change in accuracy, points", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        "How far a wrong anchor reaches",
        f"The anchor is replaced and the context left intact; slot k lies k places behind it. 95 % intervals over "
        f"prompts. {_sizes(rows)}",
        _each(_describe_reach, rows),
        rows[_KEYS + _NUMBERS],
    )


def picks(result: CorruptionResult) -> FigureBlock:
    """What slot 1 picks before and after its anchor is replaced: the true token, or the target's new answer."""
    rows = pd.concat([_plain(result, A, metric, site=PREDECESSOR) for metric in _PICKS])
    rows = rows[rows["edit"] == TOKEN]
    figure = _panels(rows, "metric", partial(_bars, x="kind"), _PICKS)
    figure.update_yaxes(title_text="share of blocks, %", row=1, col=1)
    figure.update_layout(barmode="group")
    return FigureBlock(
        layout(figure, height=420),
        "What the draft picks behind a wrong anchor",
        f"Slot 1, by what replaces the anchor. The target's new answer is its own next token in the corrupted text. "
        f"95 % intervals over prompts. {_sizes(rows)}",
        _each(_describe_picks, rows),
        rows[_KEYS + _NUMBERS],
    )


def _plain(result: CorruptionResult, protocol: str, metric: str, **wanted: str) -> pd.DataFrame:
    """Headline rows of all drafts that are no differences between conditions."""
    parts = [result.headline(draft, protocol, metric=metric, **wanted) for draft in result.drafts]
    return _single(pd.concat(parts))


def _single(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~rows[["draft", "site", "kind"]].apply(lambda c: c.str.contains(MINUS)).any(axis=1)]


def _present(rows: pd.DataFrame, column: str) -> list[str]:
    return list(dict.fromkeys(rows[column]))


def _panels(
    rows: pd.DataFrame, by: str, draw: Callable[..., BaseTraceType], names: Mapping[str, str] | None = None
) -> go.Figure:
    """One panel a draft, in it one trace for every value of the column `by`; each is once in the legend."""
    drafts, named = _present(rows, "draft"), set[str]()
    titles = names or {value: value for value in _present(rows, by)}
    figure = make_subplots(
        cols=len(drafts), subplot_titles=drafts, shared_yaxes=True, horizontal_spacing=0.06
    )
    for column, draft in enumerate(drafts, start=1):
        for index, (value, name) in enumerate(titles.items()):
            part = rows[(rows["draft"] == draft) & (rows[by] == value)]
            if len(part):
                trace = draw(part, name=name, index=index, legend=value not in named)
                figure.add_trace(trace, row=1, col=column)
                named.add(value)
    return figure


def _far_to_near(rows: pd.DataFrame) -> dict[str, Any]:
    """Places in the order of the text."""
    places = sorted((site for site in _present(rows, "site") if site != "first"), reverse=True)
    return {"categoryorder": "array", "categoryarray": ["first", *places]}


def _scaled(rows: pd.DataFrame) -> dict[str, Iterable[float]]:
    return {end: 100 * numbers(rows[end]) for end in ("mean", "low", "high")}


def _bars(rows: pd.DataFrame, *, x: str, name: str, index: int, legend: bool) -> go.Bar:
    scaled = _scaled(rows)
    return go.Bar(
        x=rows[x].tolist(), y=scaled["mean"], error_y=interval_bars(**scaled), name=name, legendgroup=name,
        showlegend=legend, hovertemplate="%{x}: %{y:.1f}<extra>" + name + "</extra>",
        marker={"color": CATEGORICAL[index % len(CATEGORICAL)], "pattern": {"shape": _PATTERNS[index % 6]}},
    )  # fmt: skip


def _line(rows: pd.DataFrame, *, x: str, name: str, index: int, legend: bool) -> go.Scatter:
    scaled = _scaled(rows)
    return go.Scatter(
        x=rows[x].tolist(), y=scaled["mean"], error_y=interval_bars(**scaled), mode="lines+markers", name=name,
        legendgroup=name, showlegend=legend, **look(index),
    )  # fmt: skip


def _slots(rows: pd.DataFrame) -> str:
    spans = dict.fromkeys(zip(rows["first_slot"], rows["last_slot"], strict=True))
    return " or ".join(f"slot {a}" if a == b else f"slots {a}…{b}" for a, b in spans)


def _sizes(rows: pd.DataFrame) -> str:
    return f"n = {int(rows['n'].max())} predictions of {int(rows['prompts'].max())} held-out prompts."


def _each(describe: Callable[[pd.DataFrame, str], str], rows: pd.DataFrame) -> str:
    return " ".join(describe(rows[rows["draft"] == draft], draft) for draft in _present(rows, "draft"))


def _describe(rows: pd.DataFrame, draft: str) -> str:
    mine = rows[rows["kind"] == RANK_2]
    texts = [f"{r['site']} {100 * r['mean']:+.0f} (protocol {r['protocol']})" for _, r in mine.iterrows()]
    return f"{draft}, points after a {RANK_2} token: {', '.join(texts)}."


def _describe_reach(rows: pd.DataFrame, draft: str) -> str:
    mine = rows[rows["kind"] == RANK_2].sort_values("first_slot")
    texts = [f"{100 * row['mean']:+.0f} in slot {row['first_slot']}" for _, row in mine.iterrows()]
    return f"{draft}, points after a {RANK_2} anchor: {', '.join(texts)}."


def _describe_picks(rows: pd.DataFrame, draft: str) -> str:
    mine = rows[rows["kind"] == RANK_2].set_index("metric")["mean"]
    texts = [f"{name} {100 * mine[metric]:.0f} %" for metric, name in _PICKS.items() if metric in mine.index]
    return f"{draft}, a {RANK_2} token as anchor: {', '.join(texts)}."
