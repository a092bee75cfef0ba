"""The outcome of the gates experiment: one tidy table with bootstrap intervals, and what it says.

Columns: draft, measure, layer ("1"…"L", "last write", "all"), slot (0: all slots), group, mean, low, high, n, prompts.
Measures: `gate` (mean over channels), `gate shut`, `gate open` (share of channels below 0.1, above 0.9), `written`
(length of the write over the stream's), `gain` (nats), `correlation with gate`; under a clamp, whose value is the
group, `top1`, `top1 walked`, `log prob`, each also as a `… change` from the untouched draft, `al` and `al ratio`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from dspine_probe.experiments.results import TableResult

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME = "gates"
COLUMNS = ("draft", "measure", "layer", "slot", "group", "mean", "low", "high", "n", "prompts")


@dataclass(frozen=True, eq=False)
class GatesResult(TableResult):
    """Table, configuration and provenance; `skipped` says which usual checks were left out, and why."""

    FILE: ClassVar[str] = NAME
    config: Mapping[str, Any]
    drafts: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Any]
    skipped: Mapping[str, str]
    seconds: float

    def to_frame(self) -> pd.DataFrame:
        """The tidy table, a copy."""
        return self.table.loc[:, list(COLUMNS)].copy()

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        return [sentence for draft in self.drafts for sentence in _findings(self, draft)]

    @classmethod
    def _typed(cls, table: pd.DataFrame) -> pd.DataFrame:
        return table.astype({"layer": str, "group": str})

    def figure(self) -> Figure:
        """Mean gates by layer and slot, one panel a draft (`dspine_probe.plots.gates`)."""
        from dspine_probe.plots.gates import heatmaps  # plots build on experiments, not the other way round

        return heatmaps(self).figure


def _findings(result: GatesResult, draft: str) -> Iterator[str]:
    mine = result.select(draft=draft)
    overall = mine[mine["slot"] == 0]
    layers = list(dict.fromkeys(mine[mine["measure"] == "gate"]["layer"]))

    def each(measure: str, group: str, show: str) -> str:
        rows = overall[(overall["measure"] == measure) & (overall["group"] == group)].set_index("layer")
        named = [layer for layer in layers if layer in rows.index]
        return "; ".join(f"layer {layer} {_show(rows.loc[layer], show)}" for layer in named)

    yield f"{draft}: mean gate: {each('gate', 'every block', 'plain')}."
    yield f"{draft}: gate where the predecessor is right − where it is wrong: " + (
        f"{each('gate', 'predecessor right − predecessor wrong', 'signed')}; correlation: "
        f"{each('correlation with gate', 'predecessor right', 'signed')}."
    )
    yield (f"{draft}: gate of kept − of refused tokens: {each('gate', 'kept − refused', 'signed')}.")
    whole = overall[(overall["measure"] == "gain") & (overall["layer"] == "all")].iloc[0]
    yield (
        f"{draft}: gain of a slot's own injection, nats: {each('gain', 'every block', 'signed')}; all layers "
        f"{_show(whole, 'signed')}; correlation of gate and gain: "
        f"{each('correlation with gate', 'gain', 'signed')}."
    )
    yield from _clamp_findings(overall, draft)


def _clamp_findings(overall: pd.DataFrame, draft: str) -> Iterator[str]:
    """One sentence for each value that all gates were held at."""
    held = overall[(overall["layer"] == "all") & (overall["measure"] == "top1 walked change")]
    for value in held["group"]:
        rows = overall[(overall["layer"] == "all") & (overall["group"] == value)].set_index("measure")
        words = {"0": "held shut", "1": "held open", "mean": "held at their mean", "drawn": "of other blocks"}
        text = f"{draft}: all gates {words[value]}: top-1 of the walk {_show(rows.loc['top1 walked change'], 'points')}"
        if "al ratio" in rows.index:
            text += f", acceptance length × {_show(rows.loc['al ratio'], 'plain')}"
        yield text + "."


def _show(row: pd.Series, how: str) -> str:
    ends = row[["mean", "low", "high"]]
    if ends.isna().any():
        return "undefined"
    if how == "points":
        mean, low, high = (f"{100 * end:+.1f}" for end in ends)
        return f"{mean} points [{low}, {high}]"
    mean, low, high = (f"{end:.3f}" if how == "plain" else f"{end:+.3f}" for end in ends)
    return f"{mean} [{low}, {high}]"
