"""Figures of real decoding: tokens a second, where the time of a token goes, and speedups by rows and by set."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import plotly.graph_objects as go

from dspine_probe.experiments.common.wording import counted, number
from dspine_probe.experiments.speed.result import SpeedResult
from dspine_probe.experiments.speed.table import ALL, PARTS, PLAIN
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import panels
from dspine_probe.plots.style import layout


def tokens_per_second(result: SpeedResult) -> FigureBlock:
    """Tokens per second, plainly and with each draft, one panel a sampling, with the fewest rows."""
    rows = result.select(set=ALL, rows=result.fewest, metric="tokens_per_second")
    speedup = _speedups(result)
    figure = panels(rows, by="metric", x="draft", kind="bars", column="sampling")
    for bars, (_, panel) in zip(figure.data, rows.groupby("sampling", sort=False), strict=True):
        bars.text = [f"{speedup[row['draft'], row['sampling']]:.2f}×" for _, row in panel.iterrows()]
    figure.update_yaxes(title_text="tokens per second", rangemode="tozero", row=1, col=1)
    return _block(
        result,
        figure,
        rows,
        "Tokens per second",
        "The same prompts by all methods, the prefill not counted; bars say times plain decoding.",
        lambda row: f"{number(row, 1)} tokens a second, {speedup[row['draft'], row['sampling']]:.2f} times plain",
        legend=False,
    )


def time_per_token(result: SpeedResult) -> FigureBlock:
    """Milliseconds per committed token by part, one panel a sampling, with the fewest rows."""
    names = {f"{part}_ms_per_token": part for part in PARTS}
    rows = result.select(set=ALL, rows=result.fewest, metric=list(names))
    figure = panels(rows, by="metric", x="draft", kind="bars", column="sampling", names=names)
    figure.update_layout(barmode="stack")
    speedup = _speedups(result)
    for place, (sampling, panel) in enumerate(rows.groupby("sampling", sort=False), start=1):
        for draft, height in panel.groupby("draft", sort=False)["mean"].sum().items():
            said = {"text": f"{speedup[draft, sampling]:.2f}×", "showarrow": False, "yshift": 9}
            figure.add_annotation(x=draft, y=height, **said, row=1, col=place)
    figure.update_yaxes(title_text="ms per committed token", rangemode="tozero", row=1, col=1)
    return _block(
        result,
        figure,
        rows,
        "Where the time of a token goes",
        f"Seconds after the prefill over tokens, {result.fewest} at once; bars say times plain decoding.",
        lambda row: f"{names[row['metric']]} {row['mean']:.2f} ms",
    )


def speedup_by_rows(result: SpeedResult) -> FigureBlock | None:
    """Times plain decoding over the prompts decoded at once, beside the prediction; None for one number of rows."""
    rows = _drafted(result, set=ALL, metric=["speedup", "predicted_speedup"])
    if rows["rows"].nunique() < 2:
        return None
    promised = rows["metric"] == "predicted_speedup"
    rows = rows.assign(
        rows=rows["rows"].astype(int), series=rows["draft"].where(~promised, rows["draft"] + ", predicted")
    )
    figure = panels(rows, by="series", x="rows", column="sampling")
    figure.update_xaxes(title_text="prompts at once", type="log", tickvals=sorted({*rows["rows"]}))
    return _block(
        result,
        _beside_plain(figure),
        rows,
        "Speedup against concurrency",
        "Tokens per second over those of plain decoding of the same batches; rows that finish are not replaced.",
        lambda row: f"{row['rows']} at once{', predicted' * (row['series'] != row['draft'])} {row['mean']:.2f} times",
    )


def speedup_by_set(result: SpeedResult) -> FigureBlock | None:
    """Times plain decoding on every set, one prompt at a time; None where no set has several prompts."""
    rows = _drafted(result, metric="speedup")
    rows = rows[(rows["set"] != ALL) & (rows["n"] > 1)]
    if rows.empty:
        return None
    figure = panels(rows, by="draft", x="set", kind="bars", column="sampling")
    return _block(
        result,
        _beside_plain(figure),
        rows,
        "Speedup by set",
        "One prompt at a time.",
        lambda row: f"{row['set']} {row['mean']:.2f} times",
    )


def _speedups(result: SpeedResult) -> pd.Series:
    """Times plain decoding, by draft and sampling, with the fewest rows."""
    rows = result.select(set=ALL, rows=result.fewest, metric="speedup")
    return rows.set_index(["draft", "sampling"])["mean"]


def _drafted(result: SpeedResult, **wanted: str | list[str]) -> pd.DataFrame:
    rows = result.select(**wanted)
    return rows[rows["draft"] != PLAIN]


def _beside_plain(figure: go.Figure) -> go.Figure:
    figure.add_hline(y=1, line_dash="dot", line_width=1)
    return figure.update_yaxes(title_text="times plain decoding", rangemode="tozero", row=1, col=1)


def _block(
    result: SpeedResult,
    figure: go.Figure,
    rows: pd.DataFrame,
    title: str,
    caption: str,
    text: Callable[[pd.Series], str],
    *,
    legend: bool = True,
) -> FigureBlock:
    """The figure with its words: `text` says one row."""
    config = result.config
    drawn = " 95 % intervals over batches." if rows["low"].notna().any() else ""
    caption += (
        f"{drawn} {config['target']}, {config['dtype']}, "
        f"{counted(config['threads'], 'thread')}, engines: {result.engines}. n = at most {rows['n'].max()} batches."
    )
    said = [
        f"{draft}, {sampling}: {', '.join(text(row) for _, row in part.iterrows())}."
        for (draft, sampling), part in rows.groupby(["draft", "sampling"], sort=False)
    ]
    return FigureBlock(layout(figure, height=420, legend=legend), title, caption, " ".join(said), rows)
