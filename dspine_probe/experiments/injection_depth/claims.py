"""The ledger's lines on P2 from an injection result: is the true predecessor worth more in shallow layers than late?

A line for each headline draft, with everything that could overturn it, measured or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pandas as pd

from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.injection_depth.arms import MARKOV
from dspine_probe.experiments.injection_depth.table import (
    CONTRAST,
    DIFFERENCE,
    FLOOR,
    MINUS,
    NO_OP,
    RANK_2,
    TRUE,
)
from dspine_probe.experiments.wording import points

if TYPE_CHECKING:
    from dspine_probe.experiments.injection_depth.result import InjectionDepthResult

COMMAND = "dspine-probe probe injection-depth"
LEAK = "leak"
CAUSAL = "a causal trunk"
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


def claims(result: InjectionDepthResult, draft: str) -> Iterator[Claim]:
    """The line on one headline; none where shallow and late were not both measured."""
    rows = result.rows(draft, CONTRAST, told=TRUE)
    if rows.empty:
        return
    row = rows.iloc[0]
    judged = pd.concat([control_rows(result, draft), trained_alike(result, draft)])
    controls = [(r["arm"], points(r), _passed(r)) for _, r in judged.iterrows()]
    controls += [("told the target's second choice", points(r), None) for r in told_wrong(result, draft)]
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


def control_rows(result: InjectionDepthResult, draft: str) -> pd.DataFrame:
    """Differences that could overturn the contrast, and the check that an untrained injector does nothing."""
    rows = result.rows(draft, DIFFERENCE)
    gain = rows["arm"].str.endswith(MINUS + FLOOR)
    kept = rows["arm"].str.contains("random|noise|mlp|blocks|unfrozen|leak") & ~gain
    kept |= rows["arm"].str.contains(rf"^depth.*{MINUS}{MARKOV}$")
    return rows[kept | (rows["arm"] == f"{NO_OP}{MINUS}{FLOOR}")]


def trained_alike(result: InjectionDepthResult, draft: str) -> pd.DataFrame:
    """Early minus late, where codes were as unreliable in training as they are now."""
    rows = result.rows(draft, DIFFERENCE)
    return rows[rows["arm"].str.contains(rf"rho.*{MINUS}.*rho")]


def told_wrong(result: InjectionDepthResult, draft: str) -> list[pd.Series]:
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
    arms = [name for about in result.members(draft).values() for name in about["arms"]]
    missing = [control for control, mark in WANTED.items() if not any(mark in arm for arm in arms)]
    if _causal(result, draft):
        return [control for control in missing if WANTED[control] != LEAK]
    tried = any(_causal(result, other) for other in result.headlines)
    return missing + [CAUSAL] * (not tried)


def _causal(result: InjectionDepthResult, draft: str) -> bool:
    return bool(next(iter(result.members(draft).values()))["causal"])


def _passed(row: pd.Series) -> bool | None:
    """Whether a control leaves the claim standing: the arm beats its control, and an untrained injector does nothing.

    The leak is shown, not passed: it says how wrong the naive set-up would be.
    """
    if row["arm"].startswith(NO_OP):
        return bool(row["mean"] == 0)
    if LEAK in row["arm"]:
        return None
    return True if row["low"] > 0 else False if row["high"] < 0 else None
