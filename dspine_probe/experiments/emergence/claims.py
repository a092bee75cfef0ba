"""The ledger's line on P0 from an emergence result: do earlier slots become readable at shallower depths?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dspine_probe.experiments.common.claims import Claim, published
from dspine_probe.experiments.common.schema import MINUS, Result, each_row
from dspine_probe.experiments.common.verdicts import UNDECIDED, ClaimVerdict, Measurement, holm, judge, together, worst
from dspine_probe.experiments.common.wording import points
from dspine_probe.experiments.emergence.controls import (
    ATTENTION_CUT,
    BLOCK_CUT,
    SHUFFLED,
    TRAINED,
    TRANSLATOR,
    UNTRAINED,
)

COMMAND = "make reproduce"


def claims(result: Result) -> list[Claim]:
    """One line over all drafts: slots must fall off at every shallow depth with matched labels.

    With a single test prompt in a set nothing is decided.
    """
    fewest = min(result.data["test_prompts_by_set"].values())
    words = {draft: _effect(result, draft) if fewest > 1 else UNDECIDED for draft in result.drafts}
    here = "; ".join(_here(result, draft) for draft in result.drafts)
    setting = f"slot 1 − last slot, matched labels, n = {result.data['test_prompts']} held-out prompts"
    controls = [control for draft in result.drafts for control in _controls(result, draft)]
    controls.append(("test prompts in every set", f"{fewest} or more", fewest > 1))
    controls.append(("a draft trained with equal slot weights", "not measured", None))
    verdict = ClaimVerdict(together(words))
    return [Claim.on("P0", here=f"{setting}: {here}", controls=controls, verdict=verdict, command=COMMAND)]


def shallow(result: Result, metric: str, draft: str, setting: str = TRAINED) -> pd.DataFrame:
    """Rows of the translators at depths 1 to the middle of the draft."""
    rows = result.select(draft=draft, setting=setting, reader=TRANSLATOR, metric=metric)
    return rows[(rows["depth"] >= 1) & (rows["depth"] <= (rows["depth"].max() + 1) // 2)]


def _effect(result: Result, draft: str) -> str:
    """The word at the shallow depth that speaks least for the claim; the depths are a family."""
    family = [Measurement.of(row) for row in each_row(shallow(result, "top1_fall", draft))]
    smallest = published("P0").smallest
    return worst(judge(one, smallest, level=at) for one, at in zip(family, holm(family), strict=True))


def _here(result: Result, draft: str) -> str:
    falls = shallow(result, "top1_fall", draft)
    return f"{draft} " + ", ".join(f"{points(row)} at depth {row['depth']}" for row in each_row(falls))


def _controls(result: Result, draft: str) -> Iterator[tuple[str, str, bool | None]]:
    """Where there is nothing to find the fall must be smaller; cutting attention only says where it comes from."""
    for control, name in ((UNTRAINED, "an untrained draft shows less"), (SHUFFLED, "shuffled labels show less")):
        alone = shallow(result, "top1_fall", draft, control)
        gap = shallow(result, "top1_fall", draft, f"{TRAINED}{MINUS}{control}")
        if len(gap):
            text = f"{_deepest(alone)}; trained minus this {points(gap.iloc[-1])}"
            yield f"{draft}: {name}", text, bool((gap["low"] > 0).all())
    for control in (ATTENTION_CUT, BLOCK_CUT):
        alone = shallow(result, "top1_fall", draft, control)
        if len(alone):
            yield f"{draft}: {control}", _deepest(alone), None


def _deepest(rows: pd.DataFrame) -> str:
    return f"{points(rows.iloc[-1])} at depth {rows.iloc[-1]['depth']}"
