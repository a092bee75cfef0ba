"""The outcome of the injection experiment: its table, what it says in sentences, and its line in the claims ledger.

The table's columns and metrics are described in `table.py`. Everything said here is computed from it, for or
against the claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.injection_depth.arms import ALL, MARKOV, contrasted
from dspine_probe.experiments.injection_depth.table import (
    CONTRAST,
    DIFFERENCE,
    FLOOR,
    MEAN,
    MINUS,
    NO_OP,
    RANK_2,
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
LEAK = "leak"
CAUSAL = "a causal trunk"
COMMAND = "dspine-probe probe injection-depth"
SKIPPED = {
    "held-out token types": "labels are the target's own tokens; injectors are scored on held-out prompts, not types",
    "decoding": "true predecessors are not known when drafting, so no acceptance length belongs to these arms",
    "training from scratch": "unfrozen arms go on from the same trained draft, since a draft a depth is out of budget",
}
WANTED = {
    "random codes": "random",
    "noise in place of codes": "noise",
    "late injection with an extra MLP": "mlp",
    "late injection with extra blocks": "blocks",
    "a late Markov head": MARKOV,
    "the draft trained along": "unfrozen",
    "all slots at once, which leaks": LEAK,
    "training on unreliable codes": "rho",
}
"""Controls that a full run has, and how the arms they need are named."""


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

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        return [sentence for draft in self.headlines for sentence in _findings(self, draft)]

    def claims(self) -> list[Claim]:
        """One line of the ledger for each headline."""
        return [claim for draft in self.headlines for claim in _claims(self, draft)]

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
    for _, row in _control_rows(result, draft).iterrows():
        yield f"{draft}, control: {row['arm']} = {points(row)}."
    for row in _wrong(result, draft):
        yield f"{draft}, told the target's second choice: {row['arm']} = {points(row)}."
    sweep = result.rows(draft, CONTRAST)
    sweep = sweep[sweep["told"].str.startswith("rho")]
    if len(sweep):
        parts = "; ".join(f"{row['told']}: {points(row)}" for _, row in sweep.iterrows())
        yield f"{draft}, shallow − late as fewer codes are true: {parts}."
    alike = _trained_alike(result, draft)
    if len(alike):
        parts = "; ".join(f"{row['arm']}: {points(row)}" for _, row in alike.iterrows())
        yield f"{draft}, trained at the reliability they are told at: {parts}."


def _settling(result: InjectionDepthResult, draft: str) -> Iterator[str]:
    """Whether shallow − late was still moving when training ended, on the held-out texts of the training corpus."""
    members = [about for name, about in result.drafts.items() if family(name) == family(draft)]
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
        for name, about in result.drafts.items()
        if family(name) == family(draft)
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
    members = [name for name in result.drafts if family(name) == family(draft)]
    if len(members) < 2:
        return
    rows = result.select(metric=CONTRAST, told=TRUE, arm=arm, seeds=1)
    parts = [
        f"{row['draft']} {100 * row['mean']:+.1f}" for _, row in rows.iterrows() if row["draft"] in members
    ]
    yield f"{draft}, by seed: {', '.join(parts)} points."


def _control_rows(result: InjectionDepthResult, draft: str) -> pd.DataFrame:
    """Differences that could overturn the contrast, and the check that an untrained injector does nothing."""
    rows = result.rows(draft, DIFFERENCE)
    gain = rows["arm"].str.endswith(MINUS + FLOOR)
    kept = rows["arm"].str.contains("random|noise|mlp|blocks|unfrozen|leak") & ~gain
    kept |= rows["arm"].str.contains(rf"^depth.*{MINUS}{MARKOV}$")
    return rows[kept | (rows["arm"] == f"{NO_OP}{MINUS}{FLOOR}")]


def _claims(result: InjectionDepthResult, draft: str) -> Iterator[Claim]:
    rows = result.rows(draft, CONTRAST, told=TRUE)
    if rows.empty:
        return
    row = rows.iloc[0]
    judged = pd.concat([_control_rows(result, draft), _trained_alike(result, draft)])
    controls = [(r["arm"], points(r), _passed(r)) for _, r in judged.iterrows()]
    controls += [("told the target's second choice", points(r), None) for r in _wrong(result, draft)]
    controls += _other_trunks(result, draft)
    controls += [(name, "not measured", None) for name in _unmeasured(result, draft)]
    holds = True if row["low"] > 0 else False if row["high"] < 0 else None
    yield Claim.on(
        "P2",
        here=f"{draft}, {row['arm']}, {row['seeds']} seed(s): {points(row)}, n = {row['n']} slots of held-out prompts",
        controls=controls,
        holds=holds,
        command=COMMAND,
    )


def _trained_alike(result: InjectionDepthResult, draft: str) -> pd.DataFrame:
    """Early minus late, where codes were as unreliable in training as they are now."""
    rows = result.rows(draft, DIFFERENCE)
    return rows[rows["arm"].str.contains(rf"rho.*{MINUS}.*rho")]


def _wrong(result: InjectionDepthResult, draft: str) -> list[pd.Series]:
    """Shallow − late when every site is told the target's second choice."""
    return [row for _, row in result.rows(draft, CONTRAST, told=RANK_2).iterrows()]


def _other_trunks(result: InjectionDepthResult, draft: str) -> Iterator[tuple[str, str, bool | None]]:
    """What a bidirectional trunk can be held against: the same contrast in the causal drafts of the same result."""
    if _causal(result, draft):
        return
    for other in result.headlines:
        if _causal(result, other):
            for _, row in result.rows(other, CONTRAST, told=TRUE).iterrows():
                yield CAUSAL, f"{other}, {row['arm']}: {points(row)}", _passed(row)


def _unmeasured(result: InjectionDepthResult, draft: str) -> list[str]:
    """Controls whose arms are missing, and the trunk that was not tried; a causal one has nothing to leak."""
    arms = [name for about in _members(result, draft) for name in about["arms"]]
    missing = [control for control, mark in WANTED.items() if not any(mark in arm for arm in arms)]
    if _causal(result, draft):
        return [control for control in missing if WANTED[control] != LEAK]
    tried = any(_causal(result, other) for other in result.headlines)
    return missing + [CAUSAL] * (not tried)


def _members(result: InjectionDepthResult, draft: str) -> list[Mapping[str, Any]]:
    """What is known of the seeds of a headline."""
    return [about for name, about in result.drafts.items() if family(name) == family(draft)]


def _causal(result: InjectionDepthResult, draft: str) -> bool:
    return bool(_members(result, draft)[0]["causal"])


def _passed(row: pd.Series) -> bool | None:
    """Whether a control leaves the claim standing: the arm beats its control, and an untrained injector does nothing.

    The leak is shown, not passed: it says how wrong the naive set-up would be.
    """
    if row["arm"].startswith(NO_OP):
        return bool(row["mean"] == 0)
    if LEAK in row["arm"]:
        return None
    return True if row["low"] > 0 else False if row["high"] < 0 else None


def _verdict(row: pd.Series) -> str:
    return "supports" if row["low"] > 0 else "speaks against" if row["high"] < 0 else "does not decide"


def _percent(row: pd.Series) -> str:
    return f"{100 * row['mean']:.1f} %"


def _number(row: pd.Series) -> str:
    return f"{row['mean']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
