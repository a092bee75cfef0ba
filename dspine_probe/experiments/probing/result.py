"""The outcome of the probing study: one tidy table with bootstrap intervals, every fit on record, and what it says.

Columns: draft, target, condition, depth (empty for what reads no state), slot (0: all), measure, mean, low, high,
seed_sd, n, prompts. Measures: `accuracy`, `accuracy, unseen anchor types`, `bits a label` and `compression` (uniform
bits over bits). A condition "trained − control task" is selectivity; the other differences are against an untrained
draft, the slot index alone and the commonest class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from dspine_probe.experiments.probing.table import ACCURACY, COMPRESSION, CONTROLS, MINUS, TRAINED, UNSEEN
from dspine_probe.experiments.results import TableResult
from dspine_probe.experiments.wording import points

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME = "probing"


@dataclass(frozen=True, eq=False)
class ProbingResult(TableResult):
    """Table, configuration and provenance.

    fits: every probe: penalty chosen, penalties at which it did not converge, rows, training and validation accuracy.
    failed_codes: fits of the description lengths that did not converge, of how many.
    coverage: by draft and target, the share of rows that were asked, over repeats.
    skipped: usual checks that were left out, and why.
    """

    FILE: ClassVar[str] = NAME
    config: Mapping[str, Any]
    drafts: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Any]
    coverage: Mapping[str, Mapping[str, float]]
    fits: Sequence[Mapping[str, Any]]
    failed_codes: int
    skipped: Mapping[str, str]
    seconds: float

    @property
    def failed_fits(self) -> int:
        """Fits that did not converge and were not used, over all penalties."""
        return sum(fit["failed"] for fit in self.fits)

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        return [*(line for draft in self.drafts for line in _findings(self, draft)), self._convergence()]

    @classmethod
    def _typed(cls, table: pd.DataFrame) -> pd.DataFrame:
        return table.astype({"depth": "Int64"})

    def figure(self) -> Figure:
        """Accuracy over depth beside its controls, one panel a target (`dspine_probe.plots.probing`)."""
        from dspine_probe.plots.probing import curves  # plots build on experiments, not the other way round

        return curves(self, next(iter(self.drafts))).figure

    def _convergence(self) -> str:
        penalties = len(self.config["probe"]["penalties"])
        edges = {min(self.config["probe"]["penalties"]), max(self.config["probe"]["penalties"])}
        edge = sum(fit["penalty"] in edges for fit in self.fits)
        return (
            f"{self.failed_fits} of {penalties * len(self.fits)} fits did not converge and were not used; "
            f"{self.failed_codes} fits of description lengths did not; {edge} of {len(self.fits)} probes "
            "chose a penalty at an end of the range."
        )


def _findings(result: ProbingResult, draft: str) -> Iterator[str]:
    for target in result.config["targets"]:
        rows = result.select(draft=draft, target=target, slot=0)
        asked = rows[rows["measure"] == ACCURACY]
        trained = asked[asked["condition"] == TRAINED].set_index("depth")["mean"]
        last = int(trained.index.max())
        text = f"{draft}, {target} ({100 * result.coverage[draft][target]:.0f} % of slots asked): "
        text += f"read at {', '.join(f'{100 * value:.1f}' for value in trained)} % at depths 0…{last}"
        for control in CONTROLS:
            contrast = asked[
                (asked["condition"] == f"{TRAINED}{MINUS}{control}") & (asked["depth"] == last)
            ].iloc[0]
            text += f"; after the last layer {points(contrast)} over {control}"
        unseen = rows[(rows["measure"] == UNSEEN) & (rows["condition"] == TRAINED) & (rows["depth"] == last)]
        if len(unseen):
            text += f"; {100 * unseen['mean'].iloc[0]:.1f} % behind anchor types never trained on"
        code = rows[rows["measure"] == COMPRESSION].set_index("depth")["mean"]
        if len(code):
            text += f"; compression {', '.join(f'{value:.2f}' for value in code)} at depths 0…{last}"
        yield text + "."
