"""The outcome of the corruption experiment and what it says (the columns of its table are described in `table.py`).

The claim is judged by protocol A with rank-2 tokens, a second reading of P1 in `docs/protocols.md`: what the anchor
costs slot 1, and whether it costs more than any earlier token does. Everything else is a control, reported beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from dspine_probe.config import DSPINE
from dspine_probe.experiments.common.claims import Claim, published
from dspine_probe.experiments.common.schema import MINUS, Result
from dspine_probe.experiments.common.verdicts import (
    NOT_MEASURED,
    ClaimVerdict,
    Measurement,
    compare,
    judge,
    over_seeds,
    together,
    worst,
)
from dspine_probe.experiments.common.wording import number, percent, points
from dspine_probe.experiments.corruption.protocols import CLEAN, NOISE, RERUN, ROW, UNEDITED, A, B, C
from dspine_probe.experiments.corruption.replacements import MASK, RANK_2
from dspine_probe.experiments.corruption.table import ALL, CHANGES, DECODE, FACTORS, PREDECESSOR, STAYS, TUNED

COMMAND = "dspine-probe probe corruption"
PAPER_POINTS = -31.8
"""The paper's number (arXiv 2609.36173; Qwen3-4B or 8B, an average whose protocol is not published)."""
PARENT_TOLERANCE = 0.003
"""By how much showing prefixes in training may change a draft that is shown none (share of tokens)."""
RERUN_TOLERANCE, FAR_TOLERANCE = 0.01, 0.02
"""By how much an unedited re-run and the answer's first token may change slot 1 (share of tokens)."""
SMALLEST_GAP = 0.02
"""The smallest difference between the loss to the predecessor and to an earlier place that counts."""
_HOW = {
    A: "anchor replaced, context intact",
    B: "prefix shown, its last token replaced",
    C: "message replaced in every layer",
}
_VERDICTS = {True: "holds", False: "fails", None: "is not settled"}


class CorruptionResult(Result):
    """What every corruption changed.

    data: the arena, `answers` and `blocks` in it, `headline_slots` by protocol, and `exchanged_for_itself`: how often
    each draft passed the exchange of a thing for itself, which must not change a bit.
    """

    NAME = "corruption"
    FACTORS = FACTORS

    def headline(self, draft: str, protocol: str, **wanted: str) -> pd.DataFrame:
        """Rows of one draft and protocol over the slots by which places are compared, all blocks."""
        slot = self.data["headline_slots"][protocol]
        return self.select(draft=draft, protocol=protocol, slot=slot, **({"subset": ALL} | wanted))

    def cost(self, draft: str, protocol: str = A, **wanted: str) -> pd.DataFrame:
        """Of the headline, the change in accuracy after a rank-2 token, by default in the predecessor's place."""
        return self.headline(draft, protocol, metric="change", **({"kind": RANK_2, "site": PREDECESSOR} | wanted))

    def measured(self, protocol: str) -> list[str]:
        """Drafts on which a protocol was run."""
        names = set(self.select(protocol=protocol)["draft"])
        return [name for name in self.drafts if name in names]

    def holds(self, draft: str, protocol: str = A) -> bool | None:
        """Whether a wrong predecessor costs more than a wrong token anywhere earlier; None where it is not settled."""
        rows = self.headline(draft, protocol, kind=RANK_2, metric="change")
        gaps = rows[rows["site"].str.startswith(PREDECESSOR + MINUS)]
        if len(gaps) and bool((gaps["high"] < 0).all()):
            return True
        return False if bool((gaps["low"] > 0).any()) else None

    def findings(self) -> list[str]:
        """What the table says, for or against the claim, in sentences computed from it."""
        said = [sentence for draft in self.drafts for sentence in self._findings_on(draft)]
        for protocol in (A, B, C):
            outcome = [f"{draft}: {_VERDICTS[self.holds(draft, protocol)]}" for draft in self.measured(protocol)]
            if outcome:
                said.append(
                    f"A wrong predecessor costs more than any earlier wrong token, protocol {protocol}: "
                    f"{'; '.join(outcome)}."
                )
        return said

    def claims(self) -> list[Claim]:
        """The ledger's line on the claim P1."""
        families: dict[str, list[str]] = {}
        for draft in self.measured(A):
            families.setdefault(self.drafts[draft].get("family", draft), []).append(draft)
        each = {name: self._verdict(seeds) for name, seeds in families.items()}
        verdict = ClaimVerdict(*(together({name: words[part] for name, words in each.items()}) for part in range(3)))
        losses = []
        for name, seeds in families.items():
            by_seed = ", ".join(f"{100 * self.cost(seed).iloc[0]['mean']:+.1f}" for seed in seeds)
            over = f" over {len(seeds)} seeds ({by_seed})" * (len(seeds) > 1)
            losses.append(f"{name} {points(self._change(seeds).estimate)}{over}")
        here = f"{'; '.join(losses)}, n = {self.data['answers']} prompts"
        text = f"second reading, slot 1 after a rank-2 anchor, protocol A: {here}"
        return [Claim.on("P1", here=text, controls=list(self._controls()), verdict=verdict, command=COMMAND)]

    def _verdict(self, seeds: list[str]) -> ClaimVerdict:
        """Protocol A on drafts that are seeds of one another: the loss, and the loss beyond that of earlier places."""
        sites = [set(self.headline(seed, A, kind=RANK_2, metric="change")["site"]) for seed in seeds]
        gaps = [site for site in set.intersection(*sites) if site.startswith(PREDECESSOR + MINUS)]
        specific = worst(judge(-self._change(seeds, gap), SMALLEST_GAP) for gap in gaps) if gaps else NOT_MEASURED
        loss, said = self._change(seeds), published("P1")
        return ClaimVerdict(judge(-loss, said.smallest), specific, compare(loss, said.number))

    def _change(self, seeds: list[str], site: str = PREDECESSOR) -> Measurement:
        """The change in accuracy after a rank-2 token at a place, over seeds."""
        return over_seeds([Measurement.of(self.cost(seed, site=site).iloc[0]) for seed in seeds])

    # ---- sentences

    def _findings_on(self, draft: str) -> Iterator[str]:
        for protocol in (A, B, C):
            rows = self.headline(draft, protocol, kind=RANK_2, metric="change")
            places = rows[~rows["site"].str.contains(MINUS) & rows["edit"].ne(RERUN)].set_index("site")
            if PREDECESSOR not in places.index:
                continue
            clean = self.headline(draft, protocol, site=PREDECESSOR, kind=RANK_2, metric="clean").iloc[0]
            earlier = _list(places.drop(index=PREDECESSOR), points)
            yield (
                f"{draft}, protocol {protocol} ({_HOW[protocol]}), {slots_in_words(clean['slot'])}: {percent(clean)} "
                f"of tokens right, {points(places.loc[PREDECESSOR])} after a rank-2 predecessor; the same farther "
                f"back: {earlier}."
            )
        yield from self._labels_finding(draft)
        kinds = self.headline(draft, A, site=PREDECESSOR, metric="change").set_index("kind")
        kinds = kinds[~kinds.index.str.contains(MINUS)]
        if len(kinds):
            yield f"{draft}: slot 1 by what replaces the anchor: {_list(kinds, points)}."
        decoded = self.select(draft=draft, protocol=DECODE)
        for _, row in decoded[(decoded["metric"] == "al_change") & (decoded["kind"] != CLEAN)].iterrows():
            clean = decoded[(decoded["metric"] == "al") & (decoded["kind"] == CLEAN)].iloc[0]
            yield (
                f"{draft}, decoding with a {row['kind']} token as every anchor: acceptance length {number(clean)} "
                f"changes by {number(row, signed=True)}."
            )

    def _labels_finding(self, draft: str) -> Iterator[str]:
        """Dependence or fragility: what becomes of the tokens on which the target itself would now write another."""
        moved = self.headline(draft, A, kind=RANK_2, metric="moved").drop_duplicates("site").set_index("site")
        followed = self.headline(draft, A, site=PREDECESSOR, kind=RANK_2, subset=CHANGES, metric="followed_change")
        stays = self.cost(draft, subset=STAYS)
        if not (len(followed) and len(stays)):
            return
        farther = _list(moved.drop(index=PREDECESSOR), percent)
        yield (
            f"{draft}: after a rank-2 anchor the target itself would write another token in "
            f"{percent(moved.loc[PREDECESSOR])} of blocks (farther back: {farther or 'not asked'}). There the draft's "
            f"agreement with that token changes by {points(followed.iloc[0])} (following); where the target keeps its "
            f"token, the draft's accuracy changes by {points(stays.iloc[0])} (breaking)."
        )

    def _controls(self) -> Iterator[tuple[str, str, bool | None]]:
        for draft in self.measured(A):
            tried = self.data["exchanged_for_itself"][draft]
            yield f"{draft}: no-op", f"{tried} exchanges of a thing for itself changed no bit", True
            for _, row in self.headline(draft, A, kind=UNEDITED, metric="change").iterrows():
                small = max(abs(row["low"]), abs(row["high"])) <= RERUN_TOLERANCE
                bar = f"passed within ±{100 * RERUN_TOLERANCE:.0f} point"
                yield f"{draft}: context re-run unedited", f"{points(row)}; {bar}", bool(small)
            for _, row in self.cost(draft, kind=RANK_2 + MINUS + NOISE).iterrows():
                yield f"{draft}: rank 2 against {NOISE}", points(row), bool(row["high"] < 0)
            for _, row in self.cost(draft, kind=RANK_2 + MINUS + MASK).iterrows():
                yield f"{draft}: rank 2 against {MASK}", points(row), None
            for _, row in self.cost(draft, site="first", edit=ROW).iterrows():
                bar, passed = f"passed above −{100 * FAR_TOLERANCE:.0f} points", row["low"] > -FAR_TOLERANCE
                yield f"{draft}: first token of the answer", f"{points(row)}; {bar}", bool(passed)
        for draft in self.measured(B):
            rows = self.select(draft=draft, protocol=B, kind=TUNED)
            for _, row in rows[rows["slot"] != "1"].iterrows():
                bar = f"passed within ±{100 * PARENT_TOLERANCE:.1f} points"
                name, passed = f"{draft}: fine-tuned against parent, nothing shown", abs(row["mean"])
                yield name, f"{points(row)}; {bar}", bool(passed <= PARENT_TOLERANCE)
        for protocol in (B, C):
            for draft in self.measured(protocol):
                for _, row in self.cost(draft, protocol).iterrows():
                    name = f"{draft}: protocol {protocol}, {slots_in_words(row['slot'])}"
                    yield name, points(row), self.holds(draft, protocol)
        for protocol in (B, C):
            # A message can only be replaced in a DSpine.
            possible = protocol == B or DSPINE in {about["architecture"] for about in self.drafts.values()}
            if possible and not self.measured(protocol):
                yield f"protocol {protocol} ({_HOW[protocol]})", "not measured", None


def slots_in_words(slot: str) -> str:
    """Slots of a row as a phrase: "slot 1", "slots 4…7"."""
    return f"slots {slot.replace('-', '…')}" if "-" in slot else f"slot {slot}"


def _list(rows: pd.DataFrame, written: Callable[[pd.Series], str]) -> str:
    """Rows by their index: "t−2 -20.9 points (-23.7, -18.0); …"."""
    return "; ".join(f"{name} {written(row)}" for name, row in rows.iterrows())
