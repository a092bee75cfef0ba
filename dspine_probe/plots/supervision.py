"""Figures of the supervision experiment: acceptance by arm, acceptance against blocks, and the stream by layer."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dspine_probe.experiments.common.schema import MEAN
from dspine_probe.experiments.common.wording import number
from dspine_probe.experiments.supervision.readings import FITTED, FIXED, OWN, SHUFFLED
from dspine_probe.experiments.supervision.result import SupervisionResult
from dspine_probe.experiments.supervision.table import ALL, BASE, over_base
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import panels
from dspine_probe.plots.style import INK, layout, numbers

_READERS = {
    f"cosine, {FIXED}": "principal directions (same for all)",
    f"cosine, {FITTED}": "fitted on other prompts",
    f"cosine, {OWN}": "own readout",
}
_RANKS = {"effective_rank": "rows at unit RMS", "effective_rank_raw": "rows as they are"}
_WRONG = "labels of other blocks"


def arms(result: SupervisionResult, *, set: str = MEAN) -> FigureBlock:
    """Acceptance length of every arm: the mean of its seeds with an interval over prompts, and each seed as a point."""
    rows = result.select(draft=list(result.drafts), metric="al", set=set)
    pooled, seeds = rows[rows["seed"] == ALL], rows[rows["seed"] != ALL]
    figure = panels(pooled, by="draft", x="draft", kind="points", column=None)
    figure.add_trace(_strokes(seeds, "draft"))
    base = float(pooled[pooled["draft"] == BASE]["mean"].iloc[0])
    figure.add_hline(y=base, line_dash="dot", line_width=1)
    figure.update_yaxes(title_text="tokens per round (1 = no help)")
    return FigureBlock(
        layout(figure, height=420, legend=False),
        "Acceptance by what intermediate layers were trained to say",
        f"Greedy decoding, {'mean of the sets' if set == MEAN else set}; bars are 95 % intervals over n = "
        f"{int(rows['n'].max())} prompts, strokes are seeds, the dotted line is no supervision. The axis does not "
        "start at zero.",
        " ".join(_describe_arm(row, seeds) for _, row in pooled.iterrows()),
        _columns(rows),
    )


def curves(result: SupervisionResult) -> FigureBlock:
    """Held-out tokens per anchor against blocks trained, and the gain over no supervision on the same seeds."""
    sides: dict[str, dict[str, pd.Series]] = {"held out, mean of seeds": {}, f"minus {BASE}, same seeds": {}}
    every, gains = sides.values()
    for arm in result.drafts:
        every[arm] = result.validations(arm)
        if arm != BASE:
            gains[arm] = result.validation_gain(arm)
    rows = pd.concat(
        pd.DataFrame({"side": side, "draft": arm, "blocks": values.index, "mean": values.to_numpy()})
        for side, by_arm in sides.items()
        for arm, values in by_arm.items()
    )
    figure = panels(rows, by="draft", x="blocks", column="side", names={arm: arm for arm in result.drafts})
    figure.update_yaxes(matches=None, showticklabels=True)
    figure.add_hline(y=0, line_dash="dot", line_width=1, row=1, col=2)
    figure.update_xaxes(title_text="blocks trained")
    figure.update_yaxes(title_text="tokens per anchor", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        "How the order of the arms settled",
        "Tokens a draft would commit from fixed anchors of held-out training sequences, at every saved state; not the "
        "acceptance length of decoding, which skips anchors. No intervals: the same few anchors throughout.",
        " ".join(f"{over_base(arm)}: {result.settled(arm)}." for arm in result.drafts if arm != BASE),
        _columns(result.select(metric="validation")),
    )


def cosines(result: SupervisionResult) -> FigureBlock:
    """How well each layer's stream points at the label's code, by three readers, beside the floor of wrong labels."""
    rows = result.select(metric=list(_READERS), seed=ALL)
    floor = result.select(draft=BASE, metric=[name + SHUFFLED for name in _READERS], seed=ALL)
    floor = floor.assign(draft=_WRONG, metric=floor["metric"].str.removesuffix(SHUFFLED))
    figure = _by_layer(pd.concat([rows, floor]), _READERS, {**{a: a for a in result.drafts}, _WRONG: _WRONG})
    figure.update_traces(
        selector={"name": _WRONG}, mode="lines", line={"dash": "dot", "width": 1, "color": "#666666"}, error_y=None
    )
    figure.update_yaxes(title_text="cosine with the label's code", row=1, col=1)
    said = {arm: result.by_layer(arm, f"cosine, {FITTED}") for arm in result.drafts}
    return FigureBlock(
        layout(figure, height=420),
        "How far the stream points at the label's code",
        f"Mean over slots, sets and seeds; bars are 95 % intervals over n = {int(rows['n'].max())} prompts. "
        "Own readouts exist only for layers that were supervised with codes. The fitted readout is asked for the "
        "deviation from the mean code, so that knowing the frequent tokens earns nothing.",
        " ".join(
            f"{arm}, fitted: from {by_layer.iloc[0]:.3f} after layer 1 to {by_layer.iloc[-1]:.3f} after layer "
            f"{len(by_layer)}."
            for arm, by_layer in said.items()
        ),
        _columns(rows),
    )


def ranks(result: SupervisionResult) -> FigureBlock:
    """Effective rank of the stream after every layer, mean of the seeds with every seed as a point."""
    rows = result.select(metric=list(_RANKS))
    figure = _by_layer(rows[rows["seed"] == ALL], _RANKS, {arm: arm for arm in result.drafts})
    for column, metric in enumerate(_RANKS, start=1):
        seeds = rows[(rows["seed"] != ALL) & (rows["metric"] == metric)]
        figure.add_trace(_strokes(seeds, "depth"), row=1, col=column)
    figure.update_yaxes(matches=None, showticklabels=True)
    figure.update_yaxes(title_text="effective rank", row=1, col=1)
    said = {arm: result.by_layer(arm, "effective_rank") for arm in result.drafts}
    return FigureBlock(
        layout(figure, height=420),
        "How many directions the residual stream uses",
        f"Exponential of the entropy of the normalised singular values of {result.data['rows']:,} centred rows (every "
        "draft slot of every block). Strokes are seeds.",
        " ".join(
            f"{arm}: {', '.join(f'{value:.0f}' for value in values)} after layers 1 to {len(values)}."
            for arm, values in said.items()
        ),
        _columns(rows),
    )


def _by_layer(rows: pd.DataFrame, metrics: dict[str, str], names: dict[str, str]) -> go.Figure:
    """One panel a metric, one line an arm."""
    shown = rows.assign(metric=pd.Categorical(rows["metric"], list(metrics))).sort_values(["metric", "depth"])
    figure = panels(
        shown.assign(metric=shown["metric"].map(metrics)), by="draft", x="depth", column="metric", names=names
    )
    return figure.update_xaxes(title_text="layer", dtick=1)


def _strokes(seeds: pd.DataFrame, x: str) -> go.Scatter:
    """Single seeds."""
    return go.Scatter(
        x=seeds[x].tolist(),
        y=numbers(seeds["mean"]),
        mode="markers",
        showlegend=False,
        marker={"symbol": "line-ew-open", "size": 14, "color": INK},
        text=(seeds["draft"] + ", seed " + seeds["seed"]).tolist(),
        hovertemplate="%{text}: %{y:.3f}<extra></extra>",
    )


def _columns(rows: pd.DataFrame) -> pd.DataFrame:
    empty = [name for name in rows if rows[name].isna().all() or (rows[name] == "").all()]
    return rows.drop(columns=["condition", *empty])


def _describe_arm(pooled: pd.Series, seeds: pd.DataFrame) -> str:
    each = seeds[seeds["draft"] == pooled["draft"]]["mean"]
    return f"{pooled['draft']}: {number(pooled, 3)} tokens a round, seeds from {each.min():.3f} to {each.max():.3f}."
