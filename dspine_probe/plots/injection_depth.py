"""Figures of the injection experiment: accuracy over the depth of injection, and shallow minus late by reliability."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dspine_probe.experiments.common.wording import points
from dspine_probe.experiments.injection_depth.arms import ALL, LAYERS, MARKOV, MLP
from dspine_probe.experiments.injection_depth.result import InjectionDepthResult
from dspine_probe.experiments.injection_depth.table import CONTRAST, FLOOR, RANK_2, TOP1, TRUE
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import panels
from dspine_probe.plots.style import INK, layout, numbers

_SHOWN = ["draft", "arm", "predecessor", "depth", "mean", "low", "high", "n"]
_SERIES = {
    "true code": ("", TRUE),
    "the target's second choice": ("", RANK_2),
    "true token, random codes": ("-random", TRUE),
    "noise": ("-noise", TRUE),
    "late, extra MLP": (f"-{MLP}", TRUE),
    "late, extra layers": (f"-{LAYERS}", TRUE),
    "unfrozen draft": ("-unfrozen", TRUE),
}
_LINES = {"no injection": FLOOR, "all depths": ALL, "Markov head": MARKOV}


def by_depth(result: InjectionDepthResult) -> FigureBlock:
    """Accuracy of slots 2…T over the depth of injection, one panel a draft, with controls; small dots are seeds."""
    drafts = result.headlines
    rows = pd.concat(
        result.curve(draft, suffix, predecessor).assign(series=label)
        for draft in drafts
        for label, (suffix, predecessor) in _SERIES.items()
    )
    figure = panels(rows, by="series", x="depth", scale=100, names={label: label for label in _SERIES})
    for column, draft in enumerate(drafts, start=1):
        for name in result.members(draft):
            if name != draft:
                figure.add_trace(_dots(result.curve(name), name), row=1, col=column)
        for label, arm in _LINES.items():
            for _, row in result.rows(draft, TOP1, arm=arm, predecessor=[TRUE, "nothing"]).iterrows():
                text = f"{label} {100 * row['mean']:.1f}"
                line = {"y": 100 * row["mean"], "line_dash": "dot", "line_width": 1, "annotation_text": text}
                figure.add_hline(**line, row=1, col=column)
    figure.update_xaxes(title_text="depth of injection (0 = block embedding)", dtick=1)
    figure.update_yaxes(title_text="top-1 accuracy, mean of slots 2…T, %", row=1, col=1)
    return FigureBlock(
        layout(figure, height=480),
        "The same predecessor code, injected early or late",
        "Every depth has an injector of its own, of equal size and training, on a frozen draft. Bars: 95 % intervals "
        f"over prompts; small dots are single seeds. n = {int(rows['n'].max())} slots of held-out prompts.",
        " ".join(_describe(result, draft) for draft in drafts),
        pd.concat(result.rows(draft, TOP1) for draft in drafts)[_SHOWN],
    )


def by_reliability(result: InjectionDepthResult) -> FigureBlock | None:
    """Shallow minus late against the share of true codes, for injectors trained on true codes; None if not measured."""
    rows = result.rows(result.headlines, CONTRAST)
    rows = rows[rows["predecessor"] != RANK_2]
    if set(rows["predecessor"]) <= {TRUE}:
        return None
    share = rows["predecessor"].str.removeprefix("rho ").replace(TRUE, "1").astype(float)
    rows = rows.assign(share=share).sort_values(["draft", "share"])
    figure = panels(rows, by="draft", x="share", scale=100, column=None)
    figure.add_hline(y=0, line_width=1, line_color=INK)
    figure.update_xaxes(title_text="share of true codes; the rest are the draft's own guesses")
    figure.update_yaxes(title_text="shallow − late, points")
    parts = (f"{row['draft']} at {row['share']:.2f}: {points(row)}" for _, row in rows.iterrows())
    return FigureBlock(
        layout(figure, height=400),
        "Shallow minus late injection, by the reliability of the code",
        f"Injectors trained on true codes; bars are 95 % intervals over prompts. n = {int(rows['n'].max())} slots.",
        f"{'; '.join(parts)}.",
        rows[[*_SHOWN, "share"]],
    )


def _dots(rows: pd.DataFrame, name: str) -> go.Scatter:
    """A single seed of a family."""
    return go.Scatter(
        x=rows["depth"].tolist(),
        y=100 * numbers(rows["mean"]),
        mode="markers",
        name=name,
        showlegend=False,
        marker={"color": INK, "size": 4},
        hovertemplate=name + ": %{y:.1f} %<extra></extra>",
    )


def _describe(result: InjectionDepthResult, draft: str) -> str:
    rows = result.curve(draft)
    curve = ", ".join(f"{100 * row['mean']:.1f} % at depth {row['depth']}" for _, row in rows.iterrows())
    floor = 100 * float(result.rows(draft, TOP1, arm=FLOOR)["mean"].iloc[0])
    return f"{draft}: {floor:.1f} % without injection, {curve}."
