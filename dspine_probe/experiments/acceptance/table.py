"""From counts to the table of acceptance, and what it says.

Metrics (`counts.METRICS`): `al` (pooled), `al_per_request` (mean over requests), `stop_share` (rounds that reach a stop
token, per round); `conditional` and `survival` by slot. `n` counts prompts. The counts stand in the record, so that
paired comparisons of any two drafts can be made from a saved result.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import pandas as pd

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.experiments.acceptance.counts import CONDITIONAL, METRICS, SURVIVAL, AcceptanceCounts, RequestCounts
from dspine_probe.experiments.common.claims import Claim, published
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.schema import MEAN, Result
from dspine_probe.experiments.common.verdicts import ClaimVerdict, Measurement, compare, judge
from dspine_probe.experiments.common.wording import number, percent


class AcceptanceResult(Result):
    """Acceptance of every draft on every set. data: the `requests`; config: target, limits, seed of the bootstrap."""

    NAME = "acceptance"

    @classmethod
    def of(
        cls,
        counts: AcceptanceCounts,
        config: Mapping[str, Any],
        drafts: Mapping[str, Mapping[str, Any]],
        seconds: float = 0.0,
    ) -> Self:
        """The result of counts; `config` and `drafts` say how they were made."""
        rows = RowBuilder()
        for draft in counts.drafts:
            for name in (*counts.sets, MEAN):
                for metric in METRICS:
                    found, n = counts.estimate(metric, draft, name), len(counts.of(draft, name))
                    by_slot = metric in (CONDITIONAL, SURVIVAL)
                    parts = [(found.at(t), t + 1) for t in range(len(found.value))] if by_slot else [(found, "")]
                    for part, slot in parts:
                        rows.add(part, draft=draft, set=name, metric=metric, slot=slot, n=n)
        bootstrap = {"seed": counts.seed, "resamples": counts.resamples}
        data = {"requests": [vars(request) for request in counts.requests]}
        return cls(rows.table(), {**config, **bootstrap}, drafts, data, seconds)

    @cached_property
    def counts(self) -> AcceptanceCounts:
        """The counts behind the table."""
        requests = (
            RequestCounts(**{**raw, "reached": tuple(raw["reached"]), "passed": tuple(raw["passed"])})
            for raw in self.data["requests"]
        )
        return AcceptanceCounts(tuple(requests), self.config["seed"], self.config["resamples"])

    def _first_slot(self, draft: str) -> pd.Series:
        return self.select(draft=draft, set=MEAN, metric=CONDITIONAL, slot="1").iloc[0]

    @property
    def ladders(self) -> dict[str, dict[str, int]]:
        """By architecture, the drafts that differ in training blocks, with these; only where there are two budgets."""
        found: dict[str, dict[str, int]] = {}
        for name in self.counts.drafts:
            blocks = self.drafts.get(name, {}).get("trained", {}).get("blocks")
            if blocks is not None:
                found.setdefault(self.drafts[name]["architecture"], {})[name] = blocks
        return {kind: by for kind, by in found.items() if len(set(by.values())) > 1}

    def findings(self) -> list[str]:
        """AL of every draft, over the first draft's, and by the doubling of its training."""
        base, *others = self.counts.drafts
        said = [
            f"{draft}: {number(self.counts.acceptance_length(draft))} tokens a round, mean of {len(self.counts.sets)} "
            f"sets; slot 1 is kept in {percent(self._first_slot(draft))} of rounds."
            for draft in (base, *others)
        ]
        said += [
            f"{draft} over {base}: {number(self.counts.paired_ratio(draft, base))} times as many tokens a round."
            for draft in others
        ]
        return said + [
            f"{', '.join(by)}: {number(self.counts.doubling(by), signed=True)} tokens a round with every doubling of "
            f"the training blocks, from {min(by.values()):,} to {max(by.values()):,}."
            for by in self.ladders.values()
        ]

    def claims(self) -> list[Claim]:
        """The ledger's line on AL: every DSpine over the DFlash measured beside it, the i-th over the i-th."""
        kinds = {name: about["architecture"] for name, about in self.drafts.items()}
        bases, spines = ([n for n in self.counts.drafts if kinds.get(n) == kind] for kind in (DFLASH, DSPINE))
        return [self._claim(spine, base) for spine, base in zip(spines, bases, strict=False)]

    def _claim(self, spine: str, base: str) -> Claim:
        counts = self.counts
        found = counts.paired_ratio(spine, base)
        gain, said = Measurement.of(found) - 1, published("AL")
        ahead = sum(bool(counts.paired_ratio(spine, base, name).low > 1) for name in counts.sets)
        lengths = " / ".join(f"{float(counts.acceptance_length(name).value):.2f}" for name in (spine, base))
        firsts = " and ".join(f"{100 * self._first_slot(name)['mean']:.1f}" for name in (spine, base))
        return Claim.on(
            "AL",
            here=f"{spine} over {base}: {lengths} = {number(found)}, mean of {len(counts.sets)} sets, "
            f"n = {len(counts.of(spine))} prompts, at most {self.config.get('max_new_tokens')} new tokens, target "
            f"{self.config.get('target')}",
            controls=[
                (
                    "ahead in every set alone",
                    f"{ahead} of {len(counts.sets)} intervals above 1",
                    ahead == len(counts.sets),
                ),
                ("slot 1 accepted", f"{firsts} %", None),
            ],
            verdict=ClaimVerdict(judge(gain, said.smallest), size=compare(gain, said.number)),
            command=f"dspine-probe evaluate --draft {base} --draft {spine} --prompts FOLDER",
        )
