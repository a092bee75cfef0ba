"""The ledger's line on P0 from an emergence result: do earlier slots become readable at shallower depths?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.emergence.result import MINUS, EmergenceResult
from dspine_probe.experiments.wording import points

COMMAND = "make reproduce"
_TRAINED, _READER = "trained", "translator"


def claims(result: EmergenceResult) -> list[Claim]:
    """One line over all drafts; it holds if, for each, slots fall off at every shallow depth with matched labels.

    With a single test prompt in a set an interval has no width, and nothing is decided.
    """
    fewest = min(result.data["test_prompts_by_set"].values())
    held = {draft: _holds(result, draft) if fewest > 1 else None for draft in result.drafts}
    here = "; ".join(_here(result, draft) for draft in result.drafts)
    rows = _falls(result, next(iter(result.drafts)), _TRAINED)
    here = f"slot 1 − last slot, matched labels, n = {rows['prompts'].max()} held-out prompts: {here}"
    holds = True if set(held.values()) == {True} else False if False in held.values() else None
    controls = [control for draft in result.drafts for control in _controls(result, draft)]
    controls.append(("test prompts in every set", f"{fewest} or more", fewest > 1))
    controls.append(("a draft trained with equal slot weights", "not measured", None))
    return [Claim.on("P0", here=here, controls=controls, holds=holds, command=COMMAND)]


def _holds(result: EmergenceResult, draft: str) -> bool | None:
    falls = _falls(result, draft, _TRAINED)
    trends = _shallow(result.select(draft=draft, condition=_TRAINED, reader=_READER, metric="top1_trend"))
    if (falls["low"] > 0).all() and (trends["high"] < 0).all():
        return True
    return False if (falls["high"] < 0).any() else None


def _here(result: EmergenceResult, draft: str) -> str:
    falls = _falls(result, draft, _TRAINED)
    return f"{draft} " + ", ".join(f"{points(row)} at depth {row['depth']}" for _, row in falls.iterrows())


def _controls(result: EmergenceResult, draft: str) -> Iterator[tuple[str, str, bool | None]]:
    """Where there is nothing to find the fall must be smaller; cutting attention only says where it comes from."""
    for control, name in (
        ("untrained draft", "an untrained draft shows less"),
        ("shuffled labels", "shuffled labels show less"),
    ):
        alone, gap = _falls(result, draft, control), _falls(result, draft, f"{_TRAINED}{MINUS}{control}")
        if len(gap):
            text = f"{_deepest(alone)}; trained minus this {points(gap.iloc[-1])}"
            yield f"{draft}: {name}", text, bool((gap["low"] > 0).all())
    for control in ("attention cut", "attention and injection cut"):
        alone = _falls(result, draft, control)
        if len(alone):
            yield f"{draft}: {control}", _deepest(alone), None


def _falls(result: EmergenceResult, draft: str, condition: str) -> pd.DataFrame:
    return _shallow(result.select(draft=draft, condition=condition, reader=_READER, metric="top1_fall"))


def _shallow(rows: pd.DataFrame) -> pd.DataFrame:
    """Depths 1 to the middle of the draft."""
    return rows[(rows["depth"] >= 1) & (rows["depth"] <= (rows["depth"].max() + 1) // 2)]


def _deepest(rows: pd.DataFrame) -> str:
    return f"{points(rows.iloc[-1])} at depth {rows.iloc[-1]['depth']}"
