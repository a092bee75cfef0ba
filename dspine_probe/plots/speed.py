"""Figures of real decoding: tokens a second, plainly and with each draft, and where the time goes.

`bars` draws the short comparison of the main job; the others draw a bench: `time_per_token`, `speedup_by_rows`,
`speedup_by_set`.
"""

from __future__ import annotations

import pandas as pd
from plotly.subplots import make_subplots

from dspine_probe.errors import UsageError
from dspine_probe.experiments.bench.result import ALL, PARTS, PLAIN, BenchResult, spoken
from dspine_probe.experiments.speed import SpeedResult
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import CATEGORICAL, DASHES, MARKERS, interval_bars, layout, numbers

_PATTERNS = ("/", "x", "", ".")
_PARTS = {"drafting_share": ("drafting", "/"), "verifying_share": ("verifying", ""), "rest": ("rest", ".")}


def bars(result: SpeedResult) -> FigureBlock:
    """Tokens per second with 95 % intervals, and shares of drafting, verifying and the rest."""
    rows = result.to_frame()
    rows["rest"] = 1 - rows["drafting_share"] - rows["verifying_share"]
    figure = make_subplots(
        cols=2, subplot_titles=["tokens per second", "where the time goes"], horizontal_spacing=0.1
    )
    rate = [rows[f"tokens_per_second{end}"] for end in ("", "_low", "_high")]
    figure.add_bar(
        x=rows["mode"].tolist(), y=numbers(rate[0]), error_y=interval_bars(*rate), showlegend=False,
        marker_color=CATEGORICAL[0], text=[f"{s:.2f}×" for s in rows["speedup"]], textposition="inside",
        row=1, col=1,
    )  # fmt: skip
    for index, (column, (name, pattern)) in enumerate(_PARTS.items(), start=1):
        figure.add_bar(
            x=rows["mode"].tolist(), y=100 * numbers(rows[column]), name=name, row=1, col=2,
            marker={"color": CATEGORICAL[index], "pattern": {"shape": pattern}},
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title_text="tokens/s", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="share of decoding time, %", range=[0, 100], row=1, col=2)
    return FigureBlock(
        layout(figure, height=400),
        "Real decoding",
        f"The same prompts by turns, prefill not counted, {result.config.get('threads', '?')} threads, engines: "
        f"{spoken(result.config)}. Bars say times plain decoding. n = {int(rows['prompts'].max())} prompts.",
        " ".join(_describe(row) for _, row in rows.iterrows()),
        rows,
    )


def time_per_token(result: BenchResult) -> FigureBlock:
    """Milliseconds per committed token by part, one panel a sampling, with the fewest rows."""
    table = result.to_frame()
    rows = table[(table["set"] == ALL) & (table["rows"] == result.rows[0])]
    labels = [sampling.label for sampling in result.samplings]
    figure = make_subplots(
        cols=len(labels), subplot_titles=labels, shared_yaxes=True, horizontal_spacing=0.05
    )
    for column, label in enumerate(labels, start=1):
        mine = rows[rows["sampling"] == label]
        for index, (part, pattern) in enumerate(zip(PARTS, _PATTERNS, strict=True)):
            figure.add_bar(
                x=mine["draft"].tolist(), y=numbers(mine[f"{part}_ms_per_token"]), name=part, legendgroup=part,
                showlegend=column == 1, marker={"color": CATEGORICAL[index], "pattern": {"shape": pattern}},
                hovertemplate="%{x}: %{y:.2f} ms a token<extra>" + part + "</extra>",
                row=1, col=column,
            )  # fmt: skip
        figure.add_scatter(
            x=mine["draft"].tolist(), y=numbers(sum(mine[f"{part}_ms_per_token"] for part in PARTS)),
            text=[f"{speedup:.2f}×" for speedup in mine["speedup"]], mode="text", textposition="top center",
            showlegend=False, hoverinfo="skip", row=1, col=column,
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title_text="ms per committed token", rangemode="tozero", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        "Where the time of a token goes",
        f"Seconds after the prefill over tokens, {result.rows[0]} at once; numbers say times plain decoding. "
        f"{_setting(result, rows)}",
        " ".join(
            f"{row['draft']}, {row['sampling']}: "
            + ", ".join(f"{part} {row[f'{part}_ms_per_token']:.2f} ms" for part in PARTS)
            + f" a token, {row['speedup']:.2f} times plain decoding."
            for _, row in rows.iterrows()
        ),
        rows.dropna(axis="columns", how="all"),
    )


def speedup_by_rows(result: BenchResult) -> FigureBlock:
    """Times plain decoding over the number of prompts decoded at once; hollow marks are what the passes promise."""
    table = result.to_frame()
    rows = table[(table["set"] == ALL) & (table["draft"] != PLAIN)]
    labels = [sampling.label for sampling in result.samplings]
    figure = make_subplots(
        cols=len(labels), subplot_titles=labels, shared_yaxes=True, horizontal_spacing=0.05
    )
    for column, label in enumerate(labels, start=1):
        for index, draft in enumerate(result.modes[1:]):
            mine = rows[(rows["sampling"] == label) & (rows["draft"] == draft)]
            found = [mine[f"speedup{end}"] for end in ("", "_low", "_high")]
            for y, name, hollow in (
                (found[0], draft, False),
                (mine["predicted_speedup"], f"{draft}, predicted", True),
            ):
                figure.add_scatter(
                    x=mine["rows"].tolist(), y=numbers(y), mode="markers" if hollow else "lines+markers", name=name,
                    legendgroup=name, showlegend=column == 1, error_y=None if hollow else interval_bars(*found),
                    line={"color": CATEGORICAL[index], "dash": DASHES[index]},
                    marker={
                        "color": CATEGORICAL[index], "symbol": MARKERS[index] + "-open" * hollow,
                        "size": 11 if hollow else 8,
                    },
                    row=1, col=column,
                )  # fmt: skip
        figure.update_xaxes(
            title_text="prompts at once", type="log", tickvals=list(result.rows), row=1, col=column
        )
    figure.add_hline(y=1, line_dash="dot", line_width=1)
    figure.update_yaxes(title_text="times plain decoding", rangemode="tozero", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        "Speedup against concurrency",
        "Tokens per second over those of plain decoding of the same batches; rows that finish are not replaced. 95 % "
        f"intervals over batches where there are enough. {_setting(result, rows)}",
        " ".join(
            f"{row['draft']}, {row['sampling']}, {row['rows']} at once: {row['speedup']:.2f} times, predicted "
            f"{row['predicted_speedup']:.2f}."
            for _, row in rows.iterrows()
        ),
        rows.dropna(axis="columns", how="all"),
    )


def speedup_by_set(result: BenchResult) -> FigureBlock:
    """Times plain decoding on every set of prompts, one at a time, bars in groups of drafts."""
    table = result.to_frame()
    rows = table[(table["set"] != ALL) & (table["draft"] != PLAIN)]
    if rows.empty:
        raise UsageError("no set was decoded with one row at a time; measure with 1 among the rows")
    labels = [sampling.label for sampling in result.samplings]
    figure = make_subplots(rows=len(labels), subplot_titles=labels, shared_xaxes=True, vertical_spacing=0.12)
    for panel, label in enumerate(labels, start=1):
        for index, draft in enumerate(result.modes[1:]):
            mine = rows[(rows["sampling"] == label) & (rows["draft"] == draft)]
            found = [mine[f"speedup{end}"] for end in ("", "_low", "_high")]
            figure.add_bar(
                x=mine["set"].tolist(), y=numbers(found[0]), error_y=interval_bars(*found), name=draft,
                legendgroup=draft, showlegend=panel == 1,
                marker={"color": CATEGORICAL[index], "pattern": {"shape": _PATTERNS[index % len(_PATTERNS)]}},
                row=panel, col=1,
            )  # fmt: skip
    figure.add_hline(y=1, line_dash="dot", line_width=1)
    figure.update_yaxes(title_text="times plain", rangemode="tozero")
    return FigureBlock(
        layout(figure, height=160 + 260 * len(labels)),
        "Speedup by set",
        f"One prompt at a time; 95 % intervals over prompts. {_setting(result, rows)}",
        " ".join(
            f"{row['draft']}, {row['sampling']}, {row['set']}: {row['speedup']:.2f} times."
            for _, row in rows.iterrows()
        ),
        rows.dropna(axis="columns", how="all"),
    )


def _setting(result: BenchResult, rows: pd.DataFrame) -> str:
    config = result.config
    return (
        f"{config.get('target')}, {config.get('dtype')}, {config.get('threads')} threads, engines: "
        f"{spoken(config)}. n = at most {int(rows['batches'].max())} batches."
    )


def _describe(row: pd.Series) -> str:
    return (
        f"{row['mode']}: {row['tokens_per_second']:.1f} tokens a second, {row['speedup']:.2f} times plain decoding, "
        f"{row['tokens_per_round']:.2f} tokens a round."
    )
