"""Figures of the supervision experiment: acceptance by arm, acceptance against blocks, and the stream by layer."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspine_probe.experiments.acceptance import MEAN
from dspine_probe.experiments.supervision.readings import FITTED, FIXED, OWN, SHUFFLED
from dspine_probe.experiments.supervision.result import SupervisionResult
from dspine_probe.experiments.supervision.table import ALL, BASE, COLUMNS
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import interval_bars, layout, look, numbers

_READERS = {
    FIXED: "principal directions (same for all)",
    FITTED: "fitted on other prompts",
    OWN: "own readout",
}
_RANKS = {"effective_rank": "rows at unit RMS", "effective_rank_raw": "rows as they are"}


def arms(result: SupervisionResult, *, set: str = MEAN) -> FigureBlock:
    """Acceptance length of every arm: the mean of its seeds with an interval over prompts, and each seed as a point."""
    rows = result.select(metric="al", set=set)
    figure = go.Figure()
    for index, arm in enumerate(result.arms):
        mine = rows[rows["arm"] == arm]
        pooled, seeds = mine[mine["seed"] == ALL], mine[mine["seed"] != ALL]
        figure.add_scatter(
            x=[arm], y=numbers(pooled["value"]), mode="markers", name=arm, showlegend=False,
            error_y=interval_bars(pooled["value"], pooled["low"], pooled["high"]), **look(index),
            hovertemplate="%{x}: %{y:.3f} tokens a round<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=[arm] * len(seeds), y=numbers(seeds["value"]), mode="markers", showlegend=False,
            marker={"symbol": "line-ew-open", "size": 18, "color": look(index)["marker"]["color"]},
            text=seeds["seed"].tolist(), hovertemplate="seed %{text}: %{y:.3f}<extra></extra>",
        )  # fmt: skip
    base = float(rows[(rows["arm"] == BASE) & (rows["seed"] == ALL)]["value"].iloc[0])
    figure.add_hline(y=base, line_dash="dot", line_width=1)
    figure.update_yaxes(title_text="tokens per round (1 = no help)")
    prompts = int(rows["prompts"].max())
    return FigureBlock(
        layout(figure, height=420, legend=False),
        "Acceptance by what intermediate layers were trained to say",
        f"Greedy decoding, {'mean of the sets' if set == MEAN else set}; bars are 95 % intervals over n = {prompts} "
        "prompts, strokes are seeds, the dotted line is no supervision. The axis does not start at zero.",
        " ".join(_describe_arm(rows, arm) for arm in result.arms),
        _columns(rows),
    )


def curves(result: SupervisionResult) -> FigureBlock:
    """Held-out tokens per anchor against blocks trained, and the gain over no supervision on the same seeds."""
    rows = result.select(metric="validation")
    figure = make_subplots(
        cols=2,
        subplot_titles=["held out, mean of seeds", f"minus {BASE}, same seeds"],
        horizontal_spacing=0.1,
    )
    for index, arm in enumerate(result.arms):
        mine = rows[rows["arm"] == arm].groupby("blocks")["value"].mean()
        _line(figure, mine, arm, index, column=1)
        if arm != BASE:
            shared = rows[rows["seed"].isin(result.seeds(arm))]
            by_arm = (shared[shared["arm"] == name].groupby("blocks")["value"].mean() for name in (arm, BASE))
            ours, theirs = by_arm
            _line(figure, (ours - theirs).dropna(), arm, index, column=2)
    figure.add_hline(y=0, line_dash="dot", line_width=1, row=1, col=2)
    figure.update_xaxes(title_text="blocks trained")
    figure.update_yaxes(title_text="tokens per anchor", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        "How the order of the arms settled",
        "Tokens a draft would commit from fixed anchors of held-out training sequences, at every saved state; not the "
        "acceptance length of decoding, which skips anchors. No intervals: the same few anchors throughout.",
        " ".join(_describe_settling(result, arm) for arm in result.arms if arm != BASE),
        _columns(rows),
    )


def cosines(result: SupervisionResult) -> FigureBlock:
    """How well each layer's stream points at the label's code, by three readers, beside the floor of wrong labels."""
    figure = make_subplots(cols=3, subplot_titles=list(_READERS.values()), horizontal_spacing=0.06)
    for column, reader in enumerate(_READERS, start=1):
        for index, arm in enumerate(result.arms):
            rows = result.select(arm=arm, metric=f"cosine, {reader}", seed=ALL)
            if len(rows):
                _by_layer(figure, rows, arm, index, column)
        floor = result.select(arm=BASE, metric=f"cosine, {reader}{SHUFFLED}", seed=ALL)
        if len(floor):
            figure.add_scatter(
                x=floor["layer"].tolist(), y=numbers(floor["value"]), mode="lines", name="labels of other blocks",
                line={"dash": "dot", "width": 1, "color": "#666666"}, showlegend=column == 1, row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(title_text="layer", dtick=1)
    figure.update_yaxes(title_text="cosine with the label's code", row=1, col=1)
    rows = result.table[result.table["metric"].str.startswith("cosine, ") & (result.table["seed"] == ALL)]
    return FigureBlock(
        layout(figure, height=420),
        "How far the stream points at the label's code",
        f"Mean over slots, sets and seeds; bars are 95 % intervals over n = {int(rows['prompts'].max())} prompts. "
        "Own readouts exist only for layers that were supervised with codes. The fitted readout is asked for the "
        "deviation from the mean code, so that knowing the frequent tokens earns nothing.",
        " ".join(_describe_cosine(result, arm) for arm in result.arms),
        _columns(rows),
    )


def ranks(result: SupervisionResult) -> FigureBlock:
    """Effective rank of the stream after every layer, mean of the seeds with every seed as a point."""
    figure = make_subplots(cols=2, subplot_titles=list(_RANKS.values()), horizontal_spacing=0.1)
    for column, metric in enumerate(_RANKS, start=1):
        for index, arm in enumerate(result.arms):
            rows = result.select(arm=arm, metric=metric)
            _by_layer(figure, rows[rows["seed"] == ALL], arm, index, column, bars=False)
            seeds = rows[rows["seed"] != ALL]
            figure.add_scatter(
                x=seeds["layer"].tolist(), y=numbers(seeds["value"]), mode="markers", showlegend=False,
                marker={"symbol": "line-ew-open", "color": look(index)["marker"]["color"]}, row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(title_text="layer", dtick=1)
    figure.update_yaxes(title_text="effective rank", row=1, col=1)
    rows = result.table[result.table["metric"].isin(_RANKS)]
    return FigureBlock(
        layout(figure, height=420),
        "How many directions the residual stream uses",
        f"Exponential of the entropy of the normalised singular values of {result.data['rows']:,} centred rows (every "
        "draft slot of every block). Strokes are seeds.",
        " ".join(_describe_rank(result, arm) for arm in result.arms),
        _columns(rows),
    )


def _line(figure: go.Figure, values: pd.Series, arm: str, index: int, *, column: int) -> None:
    figure.add_scatter(
        x=values.index.tolist(), y=numbers(values), mode="lines+markers", name=arm, legendgroup=arm,
        showlegend=column == 1, row=1, col=column, **look(index),
    )  # fmt: skip


def _by_layer(
    figure: go.Figure, rows: pd.DataFrame, arm: str, index: int, column: int, *, bars: bool = True
) -> None:
    ends = interval_bars(rows["value"], rows["low"], rows["high"]) if bars else None
    figure.add_scatter(
        x=rows["layer"].tolist(), y=numbers(rows["value"]), error_y=ends, mode="lines+markers", name=arm,
        legendgroup=arm, showlegend=column == 1, row=1, col=column, **look(index),
    )  # fmt: skip


def _columns(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[[name for name in COLUMNS if not rows[name].isna().all()]]


def _describe_arm(rows: pd.DataFrame, arm: str) -> str:
    mine = rows[rows["arm"] == arm]
    pooled, seeds = mine[mine["seed"] == ALL].iloc[0], mine[mine["seed"] != ALL]["value"]
    return (
        f"{arm}: {pooled['value']:.3f} tokens a round ({pooled['low']:.3f} to {pooled['high']:.3f}), seeds from "
        f"{seeds.min():.3f} to {seeds.max():.3f}."
    )


def _describe_settling(result: SupervisionResult, arm: str) -> str:
    half, end = result.settling(arm)
    return f"{arm} minus {BASE}: {half:+.3f} at half of the blocks, {end:+.3f} at the end."


def _describe_cosine(result: SupervisionResult, arm: str) -> str:
    rows = result.select(arm=arm, metric=f"cosine, {FITTED}", seed=ALL).sort_values("layer")["value"]
    return f"{arm}, fitted: from {rows.iloc[0]:.3f} after layer 1 to {rows.iloc[-1]:.3f} after layer {len(rows)}."


def _describe_rank(result: SupervisionResult, arm: str) -> str:
    rows = result.select(arm=arm, metric="effective_rank", seed=ALL).sort_values("layer")["value"]
    return f"{arm}: " + ", ".join(f"{value:.0f}" for value in rows) + f" after layers 1 to {len(rows)}."
