"""The outcome of the corruption experiment: its table (columns in `table.py`), its checks, what it says.

Whether the paper's claim holds here is decided by protocol A with rank-2 tokens: for every draft, the anchor must cost
slot 1 more than any earlier token does, by a paired interval that leaves out zero. Everything else is a control or a
second opinion and is reported beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from dspine_probe.config import DSPINE
from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.corruption.protocols import NOISE, RERUN, ROW, UNEDITED, A, B, C
from dspine_probe.experiments.corruption.substitutes import MASK, RANK_2
from dspine_probe.experiments.corruption.table import ALL, CHANGES, DECODE, MINUS, PREDECESSOR, STAYS
from dspine_probe.experiments.results import TableResult
from dspine_probe.experiments.wording import percent, points

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME = "corruption"
COMMAND = "dspine-probe probe corruption"
PAPER_POINTS = -31.8
"""The paper's number (arXiv 2609.36173; Qwen3-4B or 8B, an average whose protocol is not published)."""
PARENT_TOLERANCE = 0.003
"""By how much showing prefixes in training may change a draft that is shown none (share of tokens)."""
RERUN_TOLERANCE, FAR_TOLERANCE = 0.01, 0.02
"""By how much an unedited re-run and the answer's first token may change slot 1 (share of tokens)."""
_HOW = {
    A: "anchor replaced, context intact",
    B: "prefix shown, its last token replaced",
    C: "message replaced in every layer",
}


@dataclass(frozen=True, eq=False)
class CorruptionResult(TableResult):
    """Table, configuration and provenance; `to_frame`, `select`, `findings`, `claims`, `save`, `load`, `figure`.

    checks: what must hold for the table to mean anything, measured in the same run, per draft.
    skipped: parts of the method's checklist that were left out, each with the reason.
    """

    FILE: ClassVar[str] = NAME
    config: Mapping[str, Any]
    drafts: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Any]
    checks: Mapping[str, Mapping[str, Any]]
    skipped: Mapping[str, str]
    seconds: float

    def headline(self, draft: str, protocol: str, **wanted: str) -> pd.DataFrame:
        """Rows of one draft and protocol over the slots by which places are compared, all blocks."""
        first, last = self.data["headline_slots"][protocol]
        return self.select(
            draft=draft, protocol=protocol, first_slot=first, last_slot=last, **({"subset": ALL} | wanted)
        )

    def measured(self, protocol: str) -> list[str]:
        """Drafts on which a protocol was run."""
        names = set(self.table[self.table["protocol"] == protocol]["draft"])
        return [name for name in self.drafts if name in names]

    def holds(self, draft: str, protocol: str = A) -> bool | None:
        """Whether a wrong predecessor costs more than a wrong token anywhere earlier; None where it is not settled."""
        rows = self.headline(draft, protocol, kind=RANK_2, metric="change")
        gaps = rows[rows["site"].str.startswith(PREDECESSOR + MINUS)]
        if gaps.empty:
            return None
        if bool((gaps["high"] < 0).all()):
            return True
        return False if bool((gaps["low"] > 0).any()) else None

    def findings(self) -> list[str]:
        """What the table says, for or against the claim, in sentences computed from it."""
        said = [sentence for draft in self.drafts for sentence in _draft_findings(self, draft)]
        return said + list(_verdict(self))

    def claims(self) -> list[Claim]:
        """The ledger's line on the claim P1."""
        here = "; ".join(
            f"{draft} {points(row)}, n = {row['prompts']} prompts"
            for draft in self.measured(A)
            for _, row in self.headline(draft, A, site=PREDECESSOR, kind=RANK_2, metric="change").iterrows()
        )
        verdicts = {self.holds(draft) for draft in self.measured(A)}
        holds = True if verdicts == {True} else (False if False in verdicts else None)
        text = f"slot 1 after a rank-2 anchor, protocol A: {here}"
        return [Claim.on("P1", here=text, controls=list(_controls(self)), holds=holds, command=COMMAND)]

    def figure(self) -> Figure:
        """Change by place of the corrupted token, one panel a draft (`dspine_probe.plots.corruption`)."""
        from dspine_probe.plots.corruption import (
            places,
        )  # plots build on experiments, not the other way round

        return places(self).figure


def _draft_findings(result: CorruptionResult, draft: str) -> Iterator[str]:
    for protocol in (A, B, C):
        rows = result.headline(draft, protocol, kind=RANK_2, metric="change")
        places = rows[~rows["site"].str.contains(MINUS) & rows["edit"].ne(RERUN)].set_index("site")
        if PREDECESSOR not in places.index:
            continue
        clean = result.headline(draft, protocol, site=PREDECESSOR, kind=RANK_2, metric="clean").iloc[0]
        earlier = "; ".join(f"{name} {points(row)}" for name, row in places.iterrows() if name != PREDECESSOR)
        yield (
            f"{draft}, protocol {protocol} ({_HOW[protocol]}), {_slots(clean)}: {percent(clean)} of tokens right, "
            f"{points(places.loc[PREDECESSOR])} after a rank-2 predecessor; the same farther back: {earlier}."
        )
    yield from _labels_finding(result, draft)
    yield from _kinds_finding(result, draft)
    decoded = result.select(draft=draft, protocol=DECODE, metric="al_change")
    for _, row in decoded[decoded["kind"] != "clean"].iterrows():
        clean = result.select(draft=draft, protocol=DECODE, metric="al", kind="clean").iloc[0]
        yield (
            f"{draft}, decoding with a {row['kind']} token as every anchor: acceptance length "
            f"{_number(clean, '')} changes by {_number(row)}."
        )


def _labels_finding(result: CorruptionResult, draft: str) -> Iterator[str]:
    """Dependence or fragility: what becomes of the tokens on which the target itself would now write another."""
    wanted = {"site": PREDECESSOR, "kind": RANK_2}
    moved = result.headline(draft, A, kind=RANK_2, metric="moved").drop_duplicates("site").set_index("site")
    followed = result.headline(draft, A, subset=CHANGES, metric="followed_change", **wanted)
    stays = result.headline(draft, A, subset=STAYS, metric="change", **wanted)
    if not (len(followed) and len(stays)):
        return
    farther = "; ".join(f"{site} {percent(row)}" for site, row in moved.iterrows() if site != PREDECESSOR)
    yield (
        f"{draft}: after a rank-2 anchor the target itself would write another token in "
        f"{percent(moved.loc[PREDECESSOR])} of blocks (farther back: {farther or 'not asked'}). There the draft's "
        f"agreement with that token changes by {points(followed.iloc[0])} (following); where the target keeps its "
        f"token, the draft's accuracy changes by {points(stays.iloc[0])} (breaking)."
    )


def _kinds_finding(result: CorruptionResult, draft: str) -> Iterator[str]:
    rows = result.headline(draft, A, site=PREDECESSOR, metric="change")
    plain = rows[~rows["kind"].str.contains(MINUS)]
    if len(plain):
        parts = "; ".join(f"{row['kind']} {points(row)}" for _, row in plain.iterrows())
        yield f"{draft}: slot 1 by what replaces the anchor: {parts}."


def _verdict(result: CorruptionResult) -> Iterator[str]:
    for protocol in (A, B, C):
        outcome = {draft: result.holds(draft, protocol) for draft in result.measured(protocol)}
        if outcome:
            words = {True: "holds", False: "fails", None: "is not settled"}
            said = "; ".join(f"{draft}: {words[value]}" for draft, value in outcome.items())
            yield f"A wrong predecessor costs more than any earlier wrong token, protocol {protocol}: {said}."


def _controls(result: CorruptionResult) -> Iterator[tuple[str, str, bool | None]]:
    for draft in result.measured(A):
        tried = result.checks[draft]["exchanged_for_itself"]
        yield f"{draft}: no-op", f"{tried} exchanges of a thing for itself changed no bit", True
        for _, row in result.headline(draft, A, kind=UNEDITED, metric="change").iterrows():
            small = max(abs(row["low"]), abs(row["high"])) <= RERUN_TOLERANCE
            bar = f"passed within ±{100 * RERUN_TOLERANCE:.0f} point"
            yield f"{draft}: context re-run unedited", f"{points(row)}; {bar}", bool(small)
        for other, passed in ((NOISE, "high"), (MASK, None)):
            gap = result.headline(draft, A, site=PREDECESSOR, kind=RANK_2 + MINUS + other, metric="change")
            for _, row in gap.iterrows():
                verdict = None if passed is None else bool(row["high"] < 0)
                yield f"{draft}: rank 2 against {other}", points(row), verdict
        far = result.headline(draft, A, site="first", edit=ROW, kind=RANK_2, metric="change")
        for _, row in far.iterrows():
            bar = f"passed above −{100 * FAR_TOLERANCE:.0f} points"
            yield (
                f"{draft}: first token of the answer",
                f"{points(row)}; {bar}",
                bool(row["low"] > -FAR_TOLERANCE),
            )
    for draft in result.measured(B):
        for _, row in result.select(draft=draft, protocol=B, site="none", metric="change").iterrows():
            if row["kind"].startswith("fine-tuned") and row["first_slot"] != row["last_slot"]:
                unchanged = abs(row["mean"]) <= PARENT_TOLERANCE
                bar = f"passed within ±{100 * PARENT_TOLERANCE:.1f} points"
                name = f"{draft}: fine-tuned against parent, nothing shown"
                yield name, f"{points(row)}; {bar}", bool(unchanged)
    for protocol in (B, C):
        for draft in result.measured(protocol):
            rows = result.headline(draft, protocol, site=PREDECESSOR, kind=RANK_2, metric="change")
            for _, row in rows.iterrows():
                yield (
                    f"{draft}: protocol {protocol}, {_slots(row)}",
                    points(row),
                    result.holds(draft, protocol),
                )
    for name in _unmeasured(result):
        yield name, "not measured", None


def _unmeasured(result: CorruptionResult) -> list[str]:
    """Protocols that could have been run on some of the drafts and were on none."""
    spines = any(about["architecture"] == DSPINE for about in result.drafts.values())
    wanted = [B] + [C] * spines
    return [f"protocol {one} ({_HOW[one]})" for one in wanted if not result.measured(one)]


def _slots(row: pd.Series) -> str:
    first, last = row["first_slot"], row["last_slot"]
    return f"slot {first}" if first == last else f"slots {first}…{last}"


def _number(row: pd.Series, sign: str = "+") -> str:
    return f"{row['mean']:{sign}.2f} [{row['low']:{sign}.2f}, {row['high']:{sign}.2f}]"
