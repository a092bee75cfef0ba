"""Figures of acceptance: tokens per round by set, and how far into the block drafts survive."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspine_probe.experiments.acceptance import MEAN, AcceptanceResult
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import CATEGORICAL, interval_bars, layout, look, numbers

_PATTERNS = ("", "/", ".", "x", "-")


def bars(result: AcceptanceResult) -> FigureBlock:
    """Acceptance length of every draft on every set and their mean, with 95 % intervals."""
    frame = result.to_frame()
    rows = frame[frame["metric"] == "al"]
    figure = go.Figure()
    for index, draft in enumerate(result.drafts):
        part = rows[rows["draft"] == draft]
        figure.add_bar(
            x=part["set"].tolist(),
            y=numbers(part["value"]),
            error_y=interval_bars(part["value"], part["low"], part["high"]),
            name=draft,
            marker={
                "color": CATEGORICAL[index % len(CATEGORICAL)],
                "pattern": {"shape": _PATTERNS[index % 5]},
            },
            hovertemplate="%{x}: %{y:.2f} tokens a round<extra>" + draft + "</extra>",
        )
    figure.update_layout(barmode="group")
    figure.update_yaxes(title_text="tokens per round (1 = no help)", rangemode="tozero")
    figure.add_hline(y=1, line_dash="dot", line_width=1)
    return FigureBlock(
        layout(figure, height=420),
        "Acceptance length by set",
        f"Tokens committed per round, bonus included, on greedy answers; 95 % intervals over prompts. {_sizes(rows)}",
        _describe_bars(rows, result.drafts),
        _columns(rows),
    )


def survival(result: AcceptanceResult, *, set: str = MEAN) -> FigureBlock:
    """Share of rounds that keep slot k and all before it, and slot k given all before it."""
    frame = result.to_frame()
    rows = frame[(frame["set"] == set) & frame["metric"].isin(["survival", "conditional"])]
    titles = {"survival": "kept, with all before it", "conditional": "kept, given all before it"}
    figure = make_subplots(
        cols=2, subplot_titles=list(titles.values()), shared_yaxes=True, horizontal_spacing=0.06
    )
    for column, metric in enumerate(titles, start=1):
        for index, draft in enumerate(result.drafts):
            part = rows[(rows["draft"] == draft) & (rows["metric"] == metric)]
            scaled = [100 * numbers(part[end].astype(float)) for end in ("value", "low", "high")]
            trace = go.Scatter(
                x=part["slot"].tolist(), y=scaled[0], error_y=interval_bars(*scaled), mode="lines+markers",
                name=draft, legendgroup=draft, showlegend=column == 1, **look(index),
            )  # fmt: skip
            figure.add_trace(trace, row=1, col=column)
        figure.update_xaxes(title_text="slot", dtick=1, row=1, col=column)
    figure.update_yaxes(range=[0, 100])
    figure.update_yaxes(title_text="share of rounds, %", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        "How far into the block drafts are kept",
        f"Set: {set}. Slots beyond an answer's end are not counted; 95 % intervals over prompts. {_sizes(rows)}",
        _describe_survival(rows, result.drafts),
        _columns(rows),
    )


def _columns(rows: pd.DataFrame) -> pd.DataFrame:
    kept = [column for column in rows.columns if not rows[column].isna().all()]
    return rows[kept].rename(columns={"value": "mean"})


def _sizes(rows: pd.DataFrame) -> str:
    return f"n = {int(rows['requests'].max())} prompts, at most {int(rows['rounds'].max())} rounds a draft."


def _describe_bars(rows: pd.DataFrame, drafts: tuple[str, ...]) -> str:
    texts = []
    for draft in drafts:
        mine = rows[rows["draft"] == draft].set_index("set")["value"]
        sets = mine.drop(MEAN)
        texts.append(
            f"{draft}: mean {mine[MEAN]:.2f} tokens a round, from {sets.min():.2f} on {sets.idxmin()} "
            f"to {sets.max():.2f} on {sets.idxmax()}."
        )
    return " ".join(texts)


def _describe_survival(rows: pd.DataFrame, drafts: tuple[str, ...]) -> str:
    texts = []
    for draft in drafts:
        mine = rows[(rows["draft"] == draft) & (rows["metric"] == "survival")].sort_values("slot")["value"]
        texts.append(
            f"{draft}: {100 * mine.iloc[0]:.0f} % of rounds keep slot 1 and {100 * mine.iloc[-1]:.0f} % "
            f"keep all {len(mine)}."
        )
    return " ".join(texts)
