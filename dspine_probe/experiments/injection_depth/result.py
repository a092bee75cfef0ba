"""The outcome of the injection experiment: its table, and what it says in sentences.

The table's columns and metrics are described in `table.py`, the lines of the claims ledger are in `claims.py`.
Everything said is computed from the table, for or against the claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.injection_depth.arms import ALL, contrasted
from dspine_probe.experiments.injection_depth.claims import claims, control_rows, told_wrong, trained_alike
from dspine_probe.experiments.injection_depth.table import (
    CONTRAST,
    FLOOR,
    MEAN,
    TOP1,
    TREND,
    TRUE,
    family,
)
from dspine_probe.experiments.results import TableResult
from dspine_probe.experiments.wording import points

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME = "injection_depth"
SKIPPED = {
    "held-out token types": "labels are the target's own tokens; injectors are scored on held-out prompts, not types",
    "decoding": "true predecessors are not known when drafting, so no acceptance length belongs to these arms",
    "training from scratch": "unfrozen arms go on from the same trained draft, since a draft a depth is out of budget",
}


@dataclass(frozen=True, eq=False)
class InjectionDepthResult(TableResult):
    """Table, configuration and provenance; `to_frame`, `select`, `findings`, `claims`, `save`, `load`, `figure`.

    drafts: of each draft its build and the record of its arms (rates tried and chosen, budget, held-out loss).
    data: where the blocks come from, and what of the method checklist was skipped.
    """

    FILE: ClassVar[str] = NAME
    config: Mapping[str, Any]
    drafts: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Any]
    seconds: float

    @property
    def headlines(self) -> list[str]:
        """What the findings speak of: families of seeds, and drafts that have no second seed."""
        names = dict.fromkeys(family(name) for name in self.drafts)
        averaged = set(self.table[self.table["seeds"] > 1]["draft"])
        single = {family(name): name for name in self.drafts}
        return [name if name in averaged else single[name] for name in names]

    def rows(self, draft: str, metric: str, **wanted: str | int) -> pd.DataFrame:
        """Rows of one headline, averaged over slots and sets; a family's own where a seed has the same name."""
        found = self.select(draft=draft, metric=metric, slot=0, set=MEAN, **wanted)
        return found[found["seeds"] == found["seeds"].max()]

    def members(self, draft: str) -> dict[str, Mapping[str, Any]]:
        """The drafts behind a headline, which are the seeds of its family, and what is known of each."""
        return {name: about for name, about in self.drafts.items() if family(name) == family(draft)}

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        return [sentence for draft in self.headlines for sentence in _findings(self, draft)]

    def claims(self) -> list[Claim]:
        """One line of the ledger for each headline."""
        return [claim for draft in self.headlines for claim in claims(self, draft)]

    def figure(self) -> Figure:
        """Accuracy over the depth of injection (`dspine_probe.plots.injection_depth`)."""
        from dspine_probe.plots.injection_depth import by_depth  # plots build on experiments

        return by_depth(self).figure


def _findings(result: InjectionDepthResult, draft: str) -> Iterator[str]:
    floor = result.rows(draft, TOP1, arm=FLOOR).iloc[0]
    top = result.rows(draft, TOP1, told=TRUE)
    plain = top[top["arm"].str.fullmatch(r"depth-\d+|all")]
    curve = ", ".join(
        f"{'all' if r['depth'] == ALL else r['depth']}: {_percent(r)}" for _, r in plain.iterrows()
    )
    seeds = f"{floor['seeds']} seeds" if floor["seeds"] > 1 else "one seed"
    yield f"{draft} ({seeds}): without injection {_percent(floor)}; true code at depth {curve}."
    for _, row in result.rows(draft, CONTRAST, told=TRUE).iterrows():
        yield f"{draft}: {row['arm']} = {points(row)}, which {_verdict(row)} that shallow is better."
        yield from _seeds(result, draft, row["arm"])
    trend = result.rows(draft, TREND)
    if len(trend):
        by_set = result.select(draft=draft, metric=TREND)
        by_set = by_set[(by_set["set"] != MEAN) & (by_set["seeds"] == by_set["seeds"].max())]
        falling = int((by_set["mean"] < 0).sum())
        yield (
            f"{draft}: rank correlation of accuracy with depth {_number(trend.iloc[0])}, below zero in {falling} of "
            f"{len(by_set)} sets."
        )
    yield from _settling(result, draft)
    yield from _edges(result, draft)
    for _, row in control_rows(result, draft).iterrows():
        yield f"{draft}, control: {row['arm']} = {points(row)}."
    for row in told_wrong(result, draft):
        yield f"{draft}, told the target's second choice: {row['arm']} = {points(row)}."
    sweep = result.rows(draft, CONTRAST)
    sweep = sweep[sweep["told"].str.startswith("rho")]
    if len(sweep):
        parts = "; ".join(f"{row['told']}: {points(row)}" for _, row in sweep.iterrows())
        yield f"{draft}, shallow − late as fewer codes are true: {parts}."
    alike = trained_alike(result, draft)
    if len(alike):
        parts = "; ".join(f"{row['arm']}: {points(row)}" for _, row in alike.iterrows())
        yield f"{draft}, trained at the reliability they are told at: {parts}."


def _settling(result: InjectionDepthResult, draft: str) -> Iterator[str]:
    """Whether shallow − late was still moving when training ended, on the held-out texts of the training corpus."""
    members = list(result.members(draft).values())
    sides = contrasted(members[0]["layers"])
    curves = [[about["arms"].get(f"depth-{d}") for d in depths] for about in members for depths in sides]
    if any(arm is None for arms in curves for arm in arms):
        return
    steps = [[point["top1"] for point in arm["held_out"]] for arms in curves for arm in arms]
    late = [depth in sides[1] for _ in members for depths in sides for depth in depths]
    halves = pd.DataFrame(steps).groupby(late).mean()
    gaps = (halves.loc[False] - halves.loc[True]) * 100
    blocks = [point["blocks"] for point in curves[0][0]["held_out"]]
    parts = ", ".join(f"{gap:+.1f} after {count:,}" for gap, count in zip(gaps, blocks, strict=True))
    yield f"{draft}: shallow − late on held-out training texts, by blocks trained: {parts}."


def _edges(result: InjectionDepthResult, draft: str) -> Iterator[str]:
    """How many arms would perhaps have liked a rate outside the range tried."""
    tried = [
        (arm["rate"], [float(rate) for rate in arm["trials"]])
        for about in result.members(draft).values()
        for arm in about["arms"].values()
        if arm["trials"]
    ]
    if tried:
        low, high = (sum(rate == end(rates) for rate, rates in tried) for end in (min, max))
        yield (
            f"{draft}: of {len(tried)} arms {low} chose the lowest and {high} the highest learning rate tried, "
            f"{min(tried[0][1]):g}…{max(tried[0][1]):g}."
        )


def _seeds(result: InjectionDepthResult, draft: str, arm: str) -> Iterator[str]:
    members = result.members(draft)
    if len(members) < 2:
        return
    rows = result.select(metric=CONTRAST, told=TRUE, arm=arm, seeds=1)
    parts = [
        f"{row['draft']} {100 * row['mean']:+.1f}" for _, row in rows.iterrows() if row["draft"] in members
    ]
    yield f"{draft}, by seed: {', '.join(parts)} points."


def _verdict(row: pd.Series) -> str:
    return "supports" if row["low"] > 0 else "speaks against" if row["high"] < 0 else "does not decide"


def _percent(row: pd.Series) -> str:
    return f"{100 * row['mean']:.1f} %"


def _number(row: pd.Series) -> str:
    return f"{row['mean']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
