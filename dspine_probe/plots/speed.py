"""Figure of real decoding: tokens a second, plainly and with each draft, and where the time goes."""

from __future__ import annotations

import pandas as pd
from plotly.subplots import make_subplots

from dspine_probe.experiments.speed import SpeedResult
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import CATEGORICAL, interval_bars, layout, numbers

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
        f"The same prompts by turns, prefill not counted, {result.config.get('threads', '?')} threads; the readable "
        f"loop, not a fast one. Bars say times plain decoding. n = {int(rows['prompts'].max())} prompts.",
        " ".join(_describe(row) for _, row in rows.iterrows()),
        rows,
    )


def _describe(row: pd.Series) -> str:
    return (
        f"{row['mode']}: {row['tokens_per_second']:.1f} tokens a second, {row['speedup']:.2f} times plain decoding, "
        f"{row['tokens_per_round']:.2f} tokens a round."
    )
