"""Figures of the injection experiment: accuracy over the depth of injection, and shallow minus late by reliability."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dspine_probe.experiments.injection_depth.arms import ALL, BLOCKS, MARKOV, MLP
from dspine_probe.experiments.injection_depth.result import InjectionDepthResult
from dspine_probe.experiments.injection_depth.table import CONTRAST, FLOOR, RANK_2, TOP1, TRUE, family
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.style import INK, interval_bars, layout, look, numbers

_KEYS = ["draft", "seeds", "arm", "depth", "told", "mean", "low", "high", "n"]
_SERIES = {
    "true code": (r"depth-\d+", TRUE),
    "the target's second choice": (r"depth-\d+", RANK_2),
    "true token, random codes": (r"depth-\d+-random", TRUE),
    "noise": (r"depth-\d+-noise", TRUE),
    "late, extra MLP": (rf"depth-\d+-{MLP}", TRUE),
    "late, extra blocks": (rf"depth-\d+-{BLOCKS}", TRUE),
    "unfrozen draft": (r"depth-\d+-unfrozen", TRUE),
}
_LINES = {"no injection": FLOOR, "all depths": ALL, "Markov head": MARKOV}


def by_depth(result: InjectionDepthResult) -> FigureBlock:
    """Accuracy of slots 2…T over the depth of injection, one panel a draft, with controls; small dots are seeds."""
    drafts = result.headlines
    figure = make_subplots(
        cols=len(drafts), subplot_titles=drafts, shared_yaxes=True, horizontal_spacing=0.06
    )
    tables = []
    for column, draft in enumerate(drafts, start=1):
        top = result.rows(draft, TOP1)
        tables.append(top)
        for index, (label, part) in enumerate(_series(top)):
            trace = _curve(part, label, index, first=column == 1)
            figure.add_trace(trace, row=1, col=column)
        for dots in _seed_dots(result, draft):
            figure.add_trace(dots, row=1, col=column)
        for label, arm in _LINES.items():
            for _, row in top[(top["arm"] == arm) & top["told"].isin([TRUE, "nothing"])].iterrows():
                text = f"{label} {100 * row['mean']:.1f}"
                line = {"y": 100 * row["mean"], "line_dash": "dot", "line_width": 1, "annotation_text": text}
                figure.add_hline(**line, row=1, col=column)
        figure.update_xaxes(title_text="depth of injection (0 = block embedding)", dtick=1, row=1, col=column)
    figure.update_yaxes(title_text="top-1 accuracy, mean of slots 2…T, %", row=1, col=1)
    table = pd.concat(tables)
    return FigureBlock(
        layout(figure, height=480),
        "The same predecessor code, injected early or late",
        "Every depth has an injector of its own, of equal size and training, on a frozen draft. Bars: 95 % intervals "
        f"over prompts; small dots are single seeds. n = {int(table['n'].max())} slots of held-out prompts.",
        " ".join(_describe(result, draft) for draft in drafts),
        table[_KEYS],
    )


def by_reliability(result: InjectionDepthResult) -> FigureBlock:
    """Shallow minus late against the share of true codes, for injectors trained on true codes."""
    figure = go.Figure()
    tables = []
    for index, draft in enumerate(result.headlines):
        rows = result.rows(draft, CONTRAST)
        rows = rows[rows["told"] != RANK_2]
        share = [1.0 if told == TRUE else float(told.split()[-1]) for told in rows["told"]]
        rows = rows.assign(share=share).sort_values("share")
        tables.append(rows)
        ends = {end: 100 * numbers(rows[end]) for end in ("mean", "low", "high")}
        figure.add_scatter(
            x=rows["share"].tolist(), y=ends["mean"], error_y=interval_bars(**ends), mode="lines+markers",
            name=draft, **look(index),
        )  # fmt: skip
    figure.add_hline(y=0, line_width=1, line_color=INK)
    figure.update_xaxes(title_text="share of true codes; the rest are the draft's own guesses")
    figure.update_yaxes(title_text="shallow − late, points")
    table = pd.concat(tables)
    parts = [f"{row['draft']} at {row['share']:.2f}: {100 * row['mean']:+.1f}" for _, row in table.iterrows()]
    return FigureBlock(
        layout(figure, height=400),
        "Shallow minus late injection, by the reliability of the code",
        f"Injectors trained on true codes; bars are 95 % intervals over prompts. n = {int(table['n'].max())} slots.",
        "; ".join(parts) + " points.",
        table[[*_KEYS, "share"]],
    )


def _series(top: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for label, (pattern, told) in _SERIES.items():
        part = top[top["arm"].str.fullmatch(pattern) & (top["told"] == told)]
        if len(part):
            yield label, part.sort_values("depth")


def _curve(part: pd.DataFrame, label: str, index: int, *, first: bool) -> go.Scatter:
    ends = {end: 100 * numbers(part[end]) for end in ("mean", "low", "high")}
    return go.Scatter(
        x=[int(depth) for depth in part["depth"]], y=ends["mean"], error_y=interval_bars(**ends),
        mode="lines+markers", name=label, legendgroup=label, showlegend=first, **look(index),
    )  # fmt: skip


def _seed_dots(result: InjectionDepthResult, draft: str) -> Iterator[go.Scatter]:
    """Single seeds of a family, on the curve of the true code."""
    members = [name for name in result.drafts if family(name) == family(draft) and name != draft]
    for name in members:
        rows = result.select(draft=name, metric=TOP1, slot=0, set="mean", told=TRUE, seeds=1)
        rows = rows[rows["arm"].str.fullmatch(r"depth-\d+")]
        yield go.Scatter(
            x=[int(depth) for depth in rows["depth"]], y=100 * numbers(rows["mean"]), mode="markers", name=name,
            showlegend=False, marker={"color": INK, "size": 4}, hovertemplate=name + ": %{y:.1f} %<extra></extra>",
        )  # fmt: skip


def _describe(result: InjectionDepthResult, draft: str) -> str:
    top = result.rows(draft, TOP1)
    true = top[top["arm"].str.fullmatch(r"depth-\d+") & (top["told"] == TRUE)]
    curve = ", ".join(f"{100 * row['mean']:.1f} % at depth {row['depth']}" for _, row in true.iterrows())
    floor = 100 * float(top[top["arm"] == FLOOR]["mean"].iloc[0])
    return f"{draft}: {floor:.1f} % without injection, {curve}."
