"""What the speeds say: speedups beside what was predicted, where the time goes, and whether injecting pays.

A draft that costs δ more time a round than another pays if it commits more by a larger share:
ΔAL / AL > δ / (t_verify + t_draft). Every sentence is computed from the table (its columns: `table.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.experiments.common.claims import Claim, published
from dspine_probe.experiments.common.schema import Result, each_row
from dspine_probe.experiments.common.verdicts import (
    REVERSED,
    SHOWN,
    UNDECIDED,
    ClaimVerdict,
    Measurement,
    best,
    holm,
    judge,
)
from dspine_probe.experiments.common.wording import counted, number
from dspine_probe.experiments.speed.table import ALL, FACTORS, PARTS, PLAIN
from dspine_probe.sampling import GREEDY

COMMAND = "dspine-probe probe speed"
ACCOUNTED = 0.92
"""Share of the predicted speedup below which the passes do not account for the time measured."""


class SpeedResult(Result):
    """Decoding of every prompt plainly and with each draft. data: every timed batch (`runs`) and pass (`costs`)."""

    NAME = "speed"
    FACTORS = FACTORS

    @property
    def methods(self) -> list[str]:
        """Plain decoding first, then the drafts."""
        return list(dict.fromkeys(self.table["draft"]))

    @property
    def fewest(self) -> str:
        """The smallest number of prompts decoded at once, as the factor `rows` has it."""
        return min(set(self.select()["rows"]), key=int)

    @property
    def engines(self) -> str:
        """The engines in words."""
        about = self.config.get("engines") or {"compute": "unknown"}
        return ", ".join(value for value in about.values() if isinstance(value, str))

    @property
    def same_tokens(self) -> bool:
        """Whether every greedy answer equals that of plain decoding."""
        return bool((self.select(metric="same_tokens", set=ALL)["mean"] == 1).all())

    def row(self, draft: str, metric: str, *, sampling: str = GREEDY.label, rows: str | None = None) -> pd.Series:
        """One measurement on all prompts, by default of greedy decoding with the fewest rows at once."""
        return self.select(draft=draft, metric=metric, sampling=sampling, rows=rows or self.fewest, set=ALL).iloc[0]

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        return [*self._findings(), *(claim.here for claim in self._injection_cost())]

    def claims(self) -> list[Claim]:
        """The ledger's lines on the speedup and on what the injections cost."""
        return [*self._faster(), *self._injection_cost()]

    def _faster(self) -> list[Claim]:
        """Every draft against plain decoding, greedy, with the fewest prompts at once; one that is faster is enough."""
        rows = self.select(metric="speedup", sampling=GREEDY.label, rows=self.fewest, set=ALL)
        rows = rows[rows["draft"] != PLAIN]
        if rows.empty:
            return []
        found = ", ".join(f"{row['draft']} {number(row)}" for row in each_row(rows))
        unit = "prompts" if self.fewest == "1" else f"batches of {self.fewest}"
        here = (
            f"{found} times plain decoding, n = {rows['n'].max()} {unit}, {self.config['dtype']}, "
            f"{self.config['device']}, {counted(self.config['threads'], 'thread')}, {self.engines}"
        )
        controls = [("greedy answers are those of plain decoding", str(self.same_tokens).lower(), self.same_tokens)]
        family = [Measurement.of(row) - 1 for row in each_row(rows)]
        smallest = published("faster").smallest
        words = [judge(one, smallest, level=at, seeds_required=1) for one, at in zip(family, holm(family), strict=True)]
        verdict = ClaimVerdict(best(words), SHOWN if self.same_tokens else REVERSED)
        return [Claim.on("faster", here=here, controls=controls, verdict=verdict, command=COMMAND)]

    def _injection_cost(self) -> list[Claim]:
        """What the injections cost, for the first DFlash and the first DSpine, greedy."""
        timed = self.select(metric="trunk_ms", sampling=GREEDY.label, rows=self.fewest)["draft"]
        found = [
            next((name for name in timed if self.drafts[name]["architecture"] == kind), None)
            for kind in (DFLASH, DSPINE)
        ]
        if None in found:
            return []
        flash, spine = (str(name) for name in found)
        trunks = {name: self.row(name, "trunk_ms")["mean"] for name in (flash, spine)}
        lengths = {name: self.row(name, "acceptance_length") for name in (flash, spine)}
        extra, longer = trunks[spine] - trunks[flash], lengths[spine]["mean"] / lengths[flash]["mean"] - 1
        share = extra / (trunks[flash] + sum(self.row(flash, part)["mean"] for part in ("verify_ms", "head_ms")))
        config = self.config
        here = (
            f"the block of {spine} takes {trunks[spine]:.2f} ms, that of {flash} {trunks[flash]:.2f} ({extra:+.2f} ms, "
            f"{100 * share:+.1f} % of a round of {flash}, for {100 * longer:+.1f} % tokens a round; {self.fewest} at "
            f"once, {config['dtype']}, {config['device']}, {counted(config['threads'], 'thread')}, {self.engines})"
        )
        accounted = self.row(spine, "measured_over_predicted")["mean"]
        controls = [
            ("greedy answers are those of plain decoding", str(self.same_tokens).lower(), self.same_tokens),
            (
                "the passes account for the time",
                f"{accounted:.2f} of the predicted speedup",
                bool(accounted >= ACCOUNTED),
            ),
            ("AL", ", ".join(f"{name} {number(length)}" for name, length in lengths.items()), None),
        ]
        return [
            Claim.on(
                "speed", here=here, controls=controls, verdict=ClaimVerdict(UNDECIDED, size=UNDECIDED), command=COMMAND
            )
        ]

    def _findings(self) -> Iterator[str]:
        whole = self.select(set=ALL)
        drafted = whole[whole["draft"] != PLAIN]
        same = drafted[drafted["metric"] == "same_tokens"]
        if len(same):
            yield (
                f"{round((same['mean'] * same['n']).sum())} of {same['n'].sum()} batches decoded greedily with a draft "
                "have the tokens of plain decoding."
            )
        cells = drafted.drop_duplicates(["draft", *FACTORS])
        for _, cell in cells[cells["rows"] == self.fewest].iterrows():
            at = {"sampling": cell["sampling"], "rows": cell["rows"]}
            of = whole[(whole[["draft", *FACTORS]] == cell[["draft", *FACTORS]]).all(axis=1)].set_index("metric")
            promised = ""
            if "predicted_speedup" in of.index:
                promised = (
                    f", {of.loc['measured_over_predicted', 'mean']:.2f} of the "
                    f"{of.loc['predicted_speedup', 'mean']:.2f} predicted from its passes"
                )
            shares = ", ".join(f"{part} {100 * of.loc[f'{part}_share', 'mean']:.0f}" for part in PARTS)
            yield (
                f"{cell['draft']}, {at['sampling']}, {at['rows']} at once: {of.loc['acceptance_length', 'mean']:.2f} "
                f"tokens a round, {number(of.loc['speedup'])} times plain decoding{promised}; time by part, %: "
                f"{shares}."
            )
        speedups = drafted[drafted["metric"] == "speedup"]
        for (draft, sampling), part in speedups.groupby(["draft", "sampling"], sort=False):
            if len(part) > 1:
                curve = ", ".join(f"{r['rows']}: {r['mean']:.2f}" for _, r in part.iterrows())
                yield f"{draft}, {sampling}, times plain decoding by prompts at once: {curve}."
