"""The outcome of the injection experiment: its table (see `table.py`), what it says, and its line of the ledger.

Everything said is computed from the table, for or against the claim P2: that the true predecessor is worth more in
shallow layers than late. A headline is a family of seeds, or a draft that has no second seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd

from dspine_probe.experiments.common.claims import Claim, published
from dspine_probe.experiments.common.schema import MEAN, MINUS, Result
from dspine_probe.experiments.common.verdicts import ClaimVerdict, Measurement, compare, judge, over_seeds
from dspine_probe.experiments.common.wording import counted, number, points
from dspine_probe.experiments.injection_depth.arms import ALL, MARKOV, contrasted
from dspine_probe.experiments.injection_depth.table import (
    CONTRAST,
    DIFFERENCE,
    FACTORS,
    FLOOR,
    NO_OP,
    RANK_2,
    TOP1,
    TREND,
    TRUE,
)

COMMAND = "dspine-probe probe injection-depth"
LEAK = "leak"
CAUSAL = "a causal trunk"
WANTED = {
    "random codes": "random",
    "noise in place of codes": "noise",
    "late injection with an extra MLP": "mlp",
    "late injection with extra layers": "layers",
    "a late Markov head": MARKOV,
    "the draft trained along": "unfrozen",
    "all slots at once, which leaks": LEAK,
    "training on unreliable codes": "rho",
}
"""Controls that a full run has, and how the arms they need are named."""
_VERDICTS = {True: "supports", False: "speaks against", None: "does not decide"}


@dataclass(frozen=True, eq=False)
class InjectionDepthResult(Result):
    """Table, configuration and provenance.

    drafts: of each draft its build, its family and seed, and the record of its arms (rates tried and chosen, budget,
        held-out loss).
    data: where the blocks come from, and what of the method checklist was skipped.
    """

    NAME: ClassVar[str] = "injection_depth"
    FACTORS: ClassVar[tuple[str, ...]] = FACTORS

    @property
    def headlines(self) -> list[str]:
        """What the findings speak of: families of seeds, and drafts that have no second seed."""
        return list(dict.fromkeys(about["family"] for about in self.drafts.values()))

    def members(self, headline: str) -> dict[str, Mapping[str, Any]]:
        """The drafts behind a headline, and what is known of each."""
        return {name: about for name, about in self.drafts.items() if about["family"] == headline}

    def rows(self, draft: str | list[str], metric: str, **wanted: str | list[str]) -> pd.DataFrame:
        """Rows of drafts or headlines, averaged over slots and sets."""
        return self.select(draft=draft, metric=metric, slot="", set=MEAN, **wanted)

    def curve(self, draft: str, suffix: str = "", predecessor: str = TRUE) -> pd.DataFrame:
        """Accuracies of the injectors at one depth each, by depth; `suffix` names another kind of arm."""
        rows = self.rows(draft, TOP1, predecessor=predecessor).sort_values("depth")
        return rows[rows["arm"] == "depth-" + rows["depth"].astype(str) + suffix]

    def control_rows(self, draft: str) -> pd.DataFrame:
        """Differences that could overturn the contrast, and the check that an untrained injector does nothing."""
        arm = (rows := self.rows(draft, DIFFERENCE))["arm"]
        kept = arm.str.contains("random|noise|mlp|layers|unfrozen|leak") & ~arm.str.endswith(MINUS + FLOOR)
        kept |= arm.str.contains(rf"^depth.*{MINUS}{MARKOV}$")
        return rows[kept | (arm == f"{NO_OP}{MINUS}{FLOOR}")]

    def trained_alike(self, draft: str) -> pd.DataFrame:
        """Early minus late, where codes were as unreliable in training as they are now."""
        rows = self.rows(draft, DIFFERENCE)
        return rows[rows["arm"].str.contains(rf"rho.*{MINUS}.*rho")]

    def causal(self, headline: str) -> bool:
        """Whether a headline's drafts have causal blocks."""
        return bool(next(iter(self.members(headline).values()))["causal"])

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        return [f"{draft}{sentence}" for draft in self.headlines for sentence in self._findings(draft)]

    def claims(self) -> list[Claim]:
        """One line of the ledger for each headline in which shallow and late were both measured."""
        return [claim for draft in self.headlines for claim in self._claims(draft)]

    def _findings(self, draft: str) -> Iterator[str]:
        members = self.members(draft)
        floor = self.rows(draft, TOP1, arm=FLOOR).iloc[0]
        curve = [(ALL, row) for _, row in self.rows(draft, TOP1, arm=ALL, predecessor=TRUE).iterrows()]
        curve += [(str(row["depth"]), row) for _, row in self.curve(draft).iterrows()]
        said = ", ".join(f"{depth}: {_share(row)}" for depth, row in curve)
        seeds = f"{len(members)} seeds" if len(members) > 1 else "one seed"
        yield f" ({seeds}): without injection {_share(floor)}; true code at depth {said}."
        for _, row in self.rows(draft, CONTRAST, predecessor=TRUE).iterrows():
            yield f": {row['arm']} = {points(row)}, which {_VERDICTS[_sign(row)]} that shallow is better."
            if len(members) > 1:
                each = [self.rows(one, CONTRAST, predecessor=TRUE, arm=row["arm"]).iloc[0] for one in members]
                parts = (f"{one['draft']} {100 * one['mean']:+.1f}" for one in each)
                yield f", by seed: {', '.join(parts)} points."
        for _, trend in self.rows(draft, TREND).iterrows():
            by_set = self.select(draft=draft, metric=TREND)
            by_set = by_set[by_set["set"] != MEAN]
            yield (
                f": rank correlation of accuracy with depth {number(trend, signed=True)}, below zero in "
                f"{int((by_set['mean'] < 0).sum())} of {len(by_set)} sets."
            )
        yield from self._settling(list(members.values()))
        yield from self._edges(list(members.values()))
        for _, row in self.control_rows(draft).iterrows():
            yield f", control: {row['arm']} = {points(row)}."
        for _, row in self.rows(draft, CONTRAST, predecessor=RANK_2).iterrows():
            yield f", given the target's second choice: {row['arm']} = {points(row)}."
        sweep = self.rows(draft, CONTRAST)
        sweep = sweep[sweep["predecessor"].str.startswith("rho")]
        for label, column, rows in (
            ("shallow − late as fewer codes are true", "predecessor", sweep),
            ("trained at the reliability they are used at", "arm", self.trained_alike(draft)),
        ):
            if len(rows):
                parts = (f"{row[column]}: {points(row)}" for _, row in rows.iterrows())
                yield f", {label}: {'; '.join(parts)}."

    @staticmethod
    def _settling(members: list[Mapping[str, Any]]) -> Iterator[str]:
        """Whether shallow − late was still moving when training ended, on held-out texts of the training corpus."""
        sides = contrasted(members[0]["layers"])
        curves = [
            {"late": depth in sides[1], **{p["blocks"]: p["top1"] for p in about["arms"][name]["held_out"]}}
            for about in members
            for depth in (*sides[0], *sides[1])
            if (name := f"depth-{depth}") in about["arms"]
        ]
        if len(curves) < len(members) * len(sides[0] + sides[1]):
            return
        means = pd.DataFrame(curves).groupby("late").mean()
        gaps = (means.loc[False] - means.loc[True]) * 100
        parts = ", ".join(f"{gap:+.1f} after {blocks:,}" for blocks, gap in gaps.items())
        yield f": shallow − late on held-out training texts, by blocks trained: {parts}."

    @staticmethod
    def _edges(members: list[Mapping[str, Any]]) -> Iterator[str]:
        """How many arms would perhaps have liked a rate outside the range tried."""
        arms = (arm for about in members for arm in about["arms"].values() if arm["trials"])
        tried = [(arm["rate"], [float(rate) for rate in arm["trials"]]) for arm in arms]
        if tried:
            low, high = (sum(rate == end(rates) for rate, rates in tried) for end in (min, max))
            yield (
                f": of {len(tried)} arms {low} chose the lowest and {high} the highest learning rate tried, "
                f"{min(tried[0][1]):g}…{max(tried[0][1]):g}."
            )

    def _claims(self, draft: str) -> Iterator[Claim]:
        """The line on one headline, with everything that could overturn it, measured or not."""
        for _, row in self.rows(draft, CONTRAST, predecessor=TRUE).iterrows():
            judged = pd.concat([self.control_rows(draft), self.trained_alike(draft)])
            controls = [(r["arm"], points(r), _passed(r)) for _, r in judged.iterrows()]
            wrong = self.rows(draft, CONTRAST, predecessor=RANK_2)
            controls += [("given the target's second choice", points(r), None) for _, r in wrong.iterrows()]
            controls += self._other_trunks(draft)
            controls += [(name, "not measured", None) for name in self._unmeasured(draft)]
            seeds = counted(len(self.members(draft)), "seed")
            each = [self.rows(one, CONTRAST, predecessor=TRUE, arm=row["arm"]) for one in self.members(draft)]
            gain, said = over_seeds([Measurement.of(one.iloc[0]) for one in each]), published("P2")
            yield Claim.on(
                "P2",
                here=f"frozen {draft}, {row['arm']}, {seeds}: {points(gain.estimate)}, n = {row['n']} slots of "
                "held-out prompts",
                controls=controls,
                verdict=ClaimVerdict(judge(gain, said.smallest), size=compare(gain, said.number)),
                command=COMMAND,
            )

    def _other_trunks(self, draft: str) -> Iterator[tuple[str, str, bool | None]]:
        """What a bidirectional trunk can be held against: the same contrast in the causal drafts of the same result."""
        for other in self.headlines if not self.causal(draft) else ():
            if self.causal(other):
                for _, row in self.rows(other, CONTRAST, predecessor=TRUE).iterrows():
                    yield CAUSAL, f"{other}, {row['arm']}: {points(row)}", _passed(row)

    def _unmeasured(self, draft: str) -> list[str]:
        """Controls whose arms are missing, and the trunk that was not tried; a causal one has nothing to leak."""
        arms = [name for about in self.members(draft).values() for name in about["arms"]]
        missing = [control for control, mark in WANTED.items() if not any(mark in arm for arm in arms)]
        if self.causal(draft):
            return [control for control in missing if WANTED[control] != LEAK]
        return missing + [CAUSAL] * (not any(map(self.causal, self.headlines)))


def _passed(row: pd.Series) -> bool | None:
    """Whether a control leaves the claim standing: the arm beats its control, and an untrained injector does nothing.

    The leak is shown, not passed: it says how wrong the naive set-up would be.
    """
    if row["arm"].startswith(NO_OP):
        return bool(row["mean"] == 0)
    return None if LEAK in row["arm"] else _sign(row)


def _sign(row: pd.Series) -> bool | None:
    """Whether a difference lies above zero (True), below it (False), or is not distinguishable from it."""
    return True if row["low"] > 0 else False if row["high"] < 0 else None


def _share(row: pd.Series) -> str:
    return f"{100 * row['mean']:.1f} %"
