"""Figures of the probing study: accuracy over depth beside its controls, and over depth and slot."""

from __future__ import annotations

from typing import Any

import pandas as pd

from dspine_probe.experiments.common.schema import each_row
from dspine_probe.experiments.probing.table import (
    ACCURACY,
    COMMONEST,
    CONTROL,
    SLOT_ALONE,
    TRAINED,
    UNTRAINED,
    ProbingResult,
)
from dspine_probe.plots.figure_block import FigureBlock
from dspine_probe.plots.panels import floors, grids, panels
from dspine_probe.plots.style import layout

_CURVES, _FLOORS = [TRAINED, UNTRAINED, CONTROL], [SLOT_ALONE, COMMONEST]


def curves(result: ProbingResult) -> dict[str, FigureBlock]:
    """Accuracy over depth for every question, the trained draft beside its controls; a figure a draft."""
    return {draft: _curves(result, draft) for draft in result.drafts}


def heatmap(result: ProbingResult, draft: str, question: str) -> FigureBlock:
    """Depth × slot accuracy for one question, numbers in the cells (percent)."""
    rows = result.select(draft=draft, question=question, metric=ACCURACY, probe=TRAINED)
    rows = rows[rows["slot"] != ""]
    numbered = rows.assign(slot=rows["slot"].astype(int), mean=100 * rows["mean"])
    grid = numbered.pivot(index="depth", columns="slot", values="mean")
    figure = grids({draft: grid}, unit="accuracy, %", x="slot", y="depth (0 = block embedding)")
    best: Any = grid.stack().idxmax()
    return FigureBlock(
        layout(figure, height=380, legend=False),
        f"Where {draft} holds the {question}",
        f"Linear probe, one a depth for all slots. {_sizes(result, rows)} Decodable does not mean used.",
        f"{draft}, {question}: best {grid.loc[best]:.0f} % at depth {best[0]}, slot {best[1]}; after the last layer "
        f"{grid.iloc[-1, 0]:.0f} % in slot {grid.columns[0]} and {grid.iloc[-1, -1]:.0f} % in slot {grid.columns[-1]}.",
        rows,
    )


def _curves(result: ProbingResult, draft: str) -> FigureBlock:
    rows = result.select(draft=draft, metric=ACCURACY, slot="", probe=_CURVES + _FLOORS)
    figure = panels(rows, by="probe", x="depth", column="question", scale=100, names={name: name for name in _CURVES})
    floors(figure, rows[rows["probe"].isin(_FLOORS)], by="probe", column="question", scale=100)
    figure.update_xaxes(title_text="depth", dtick=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="accuracy, %", row=1, col=1)
    return FigureBlock(
        layout(figure, height=420),
        f"What a linear probe reads in {draft}",
        "One probe a depth for all slots, tested on other prompts; bars are 95 % intervals over prompts. Dotted lines "
        f"read no state. {_sizes(result, rows)} Decodable does not mean used.",
        " ".join(_describe(rows[rows["question"] == one], one) for one in dict.fromkeys(rows["question"])),
        rows,
    )


def _sizes(result: ProbingResult, rows: pd.DataFrame) -> str:
    return f"n = at most {rows['n'].max()} slots of {result.data['answers']} held-out prompts."


def _describe(rows: pd.DataFrame, question: str) -> str:
    deepest = rows[rows["depth"] == rows["depth"].max()]
    shown = [*each_row(deepest), *each_row(rows[rows["probe"].isin(_FLOORS)])]
    texts = [f"{row['probe']} {100 * row['mean']:.0f} %" for row in shown]
    return f"{question}, after the last layer: {', '.join(texts)}."
