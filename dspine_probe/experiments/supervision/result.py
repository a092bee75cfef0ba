"""The outcome of the supervision experiment: its table (see `table.py`), and what it says.

Gains over no supervision are means over the seeds that both have; their intervals join seeds and prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from dspine_probe.experiments.common.claims import Claim, published
from dspine_probe.experiments.common.schema import MEAN, Result
from dspine_probe.experiments.common.verdicts import (
    NOT_MEASURED,
    ClaimVerdict,
    Measurement,
    compare,
    holm,
    judge,
    over_seeds,
    together,
)
from dspine_probe.experiments.common.wording import number
from dspine_probe.experiments.supervision.arms import variant_arms
from dspine_probe.experiments.supervision.readings import FITTED, FIXED
from dspine_probe.experiments.supervision.table import ALL, BASE, FACTORS, over_base
from dspine_probe.training.intermediate import TOKEN_CE

COMMAND = "dspine-probe probe supervision"
COSINE = "cosine"
_COMPARED = (TOKEN_CE, BASE, COSINE)
PUBLISHED_SHARES = {TOKEN_CE: 3.67 / 3.75 - 1, COSINE: 3.85 / 3.75 - 1}
"""Gains over no supervision on MATH-500 in the paper, as shares of its acceptance length there."""


@dataclass(frozen=True, eq=False)
class SupervisionResult(Result):
    """Table, configuration and provenance; `drafts` holds the settings of every run by arm and seed."""

    NAME: ClassVar[str] = "supervision"
    FACTORS: ClassVar[tuple[str, ...]] = FACTORS

    def seeds(self, arm: str) -> list[str]:
        """Seeds of an arm that the arm without supervision has too."""
        return [seed for seed in self.drafts[arm] if seed in self.drafts[BASE]]

    def length(self, draft: str, seed: str = ALL) -> pd.Series:
        """The row of the acceptance length of an arm, or of a gain ("a − none"), mean of the sets."""
        return self.select(draft=draft, metric="al", seed=seed, set=MEAN).iloc[0]

    def by_layer(self, arm: str, metric: str) -> pd.Series:
        """A metric's mean over the seeds, by layer."""
        rows = self.select(draft=arm, metric=metric, seed=ALL)
        return rows.set_index("depth")["mean"].sort_index()

    def gain(self, arm: str) -> Measurement:
        """Acceptance length over no supervision, over the seeds that both have."""
        return over_seeds([Measurement.of(self.length(over_base(arm), seed)) for seed in self.seeds(arm)])

    def verdict(self) -> ClaimVerdict:
        """Of the published order; both contrasts are a family, and each is compared in its share of AL."""
        lower, higher = -self.gain(TOKEN_CE), self.gain(COSINE)
        levels, base = holm([lower, higher]), float(self.length(BASE)["mean"])
        smallest = published("P3").smallest
        effect = {
            f"{TOKEN_CE} lower": judge(lower, smallest, level=levels[0]),
            f"{COSINE} higher": judge(higher, smallest, level=levels[1]),
        }
        size = {arm: compare(self.gain(arm) / base, share) for arm, share in PUBLISHED_SHARES.items()}
        return ClaimVerdict(together(effect), size=together(size))

    def settling(self, arm: str) -> tuple[float, float]:
        """Gain in held-out tokens per anchor while training, mean of the seeds: at half of the blocks, at the end."""
        gain = self.validation_gain(arm)
        half = gain[gain.index <= gain.index.max() / 2]
        return (float(half.iloc[-1]) if len(half) else float("nan")), float(gain.iloc[-1])

    def settled(self, arm: str) -> str:
        """`settling` in words."""
        half, end = self.settling(arm)
        first = "not measured by half of the blocks" if half != half else f"{half:+.3f} at half of the blocks"
        return f"{first}, {end:+.3f} at the end"

    def validation_gain(self, arm: str) -> pd.Series:
        """Held-out tokens per anchor minus those without supervision, by blocks trained, on the seeds of both."""
        ours, theirs = (self.validations(name, self.seeds(arm)) for name in (arm, BASE))
        return (ours - theirs).dropna()

    def validations(self, arm: str, seeds: Iterable[str] | None = None) -> pd.Series:
        """Held-out tokens per anchor by blocks trained, mean of some seeds or all."""
        rows = self.select(draft=arm, metric="validation", seed=list(self.drafts[arm] if seeds is None else seeds))
        return rows.groupby(rows["blocks"].astype(int))["mean"].mean()

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        arms = [arm for arm in self.drafts if arm != BASE]
        return [
            *(self._length_sentence(arm) for arm in self.drafts),
            *(self._gain_sentence(arm) for arm in arms),
            *(f"The published order, {TOKEN_CE} < {BASE} < {COSINE}: {claim.verdict}." for claim in self.claims()),
            *(f"{over_base(arm)}, held-out tokens per anchor while training: {self.settled(arm)}." for arm in arms),
            *(sentence for arm in self.drafts for sentence in self._stream_sentences(arm)),
            *(self._gradient_sentence(arm) for arm in self.drafts),
        ]

    def claims(self) -> list[Claim]:
        """The line of the claims ledger."""
        if not {TOKEN_CE, COSINE} <= set(self.drafts):
            return []
        gains = {arm: number(self.gain(arm).estimate, 3, signed=True) for arm in (TOKEN_CE, COSINE)}
        said = {arm: f", {gain} against none" for arm, gain in gains.items()}
        parts = (f"{arm} {self.length(arm)['mean']:.3f}{said.get(arm, '')}" for arm in _COMPARED)
        here = f"{'; '.join(parts)}; {self._setting()}"
        return [Claim.on("P3", here=here, controls=self._controls(), verdict=self.verdict(), command=COMMAND)]

    def _setting(self) -> str:
        training = next(iter(self.drafts[BASE].values()))["training"]
        seeds = len(self.seeds(COSINE)) if COSINE in self.drafts else len(self.drafts[BASE])
        return (
            f"DFlash on {self.data['target']}, {training['blocks']:,} blocks a run, {seeds} "
            f"seed{'s' if seeds > 1 else ''}, n = {self.length(BASE)['n']} prompts"
        )

    def _length_sentence(self, arm: str) -> str:
        each = ", ".join(f"{self.length(arm, seed)['mean']:.3f}" for seed in self.drafts[arm])
        return f"{arm}: {number(self.length(arm), 3)} tokens a round, mean of the sets; by seed {each}."

    def _gain_sentence(self, arm: str) -> str:
        each = ", ".join(f"{self.length(over_base(arm), seed)['mean']:+.3f}" for seed in self.seeds(arm))
        gain = number(self.gain(arm).estimate, 3, signed=True)
        return f"{over_base(arm)}: {gain} tokens a round over seeds and prompts; by seed {each}."

    def _stream_sentences(self, arm: str) -> Iterator[str]:
        ranks = self.by_layer(arm, "effective_rank")
        yield f"{arm}: effective rank of the stream after layers 1…{len(ranks)}: {_listed(ranks, '.0f')}."
        cosines = (f"{reader} {_listed(self.by_layer(arm, f'cosine, {reader}'), '.3f')}" for reader in (FIXED, FITTED))
        yield f"{arm}: mean cosine with the label's code by layer: {'; '.join(cosines)}."

    def _gradient_sentence(self, arm: str) -> str:
        norm, clipped = (self.select(draft=arm, metric=metric)["mean"] for metric in ("grad_norm", "clipped"))
        return f"{arm}: median gradient norm {norm.median():.2f}, clipped in {100 * clipped.mean():.0f} % of the steps."

    def _controls(self) -> Iterator[tuple[str, str, bool | None]]:
        for arm in (TOKEN_CE, COSINE):
            half, end = self.settling(arm)
            outcome = f"{arm}: {half:+.3f} tokens per anchor at half of the blocks, {end:+.3f} at the end"
            yield "order settled", outcome, None if half != half else (half > 0) == (end > 0)
        yield "learning rate chosen for each arm", *self._rates()
        for arm in dict.fromkeys((*self.drafts, *variant_arms())):
            if arm not in _COMPARED:
                gain = number(self.length(over_base(arm)), 3, signed=True) if arm in self.drafts else None
                outcome = NOT_MEASURED if gain is None else f"{gain}, one seed"
                yield f"{arm} in its place", outcome, None
        ranks = (f"{arm} {_listed(self.by_layer(arm, 'effective_rank'), '.0f')}" for arm in (TOKEN_CE, BASE))
        yield "crowding out (effective rank by layer)", "; ".join(ranks), None

    def _rates(self) -> tuple[str, bool]:
        """Rates chosen by short runs beside those trained with, and whether they are the same."""
        trained = {arm: {run["training"]["lr"] for run in self.drafts[arm].values()} for arm in _COMPARED}
        used = ", ".join(f"{arm} {_either(rates)}" for arm, rates in trained.items())
        tried = self.config["rates"]
        if not set(tried) >= set(_COMPARED):
            return f"not chosen; trained at {used}", False
        chosen = {arm: tried[arm]["chosen"] for arm in _COMPARED}
        said = ", ".join(
            f"{arm} {chosen[arm]:g} of {_either(map(float, tried[arm]['tokens_per_anchor']))}" for arm in _COMPARED
        )
        same = all(rates == {chosen[arm]} for arm, rates in trained.items())
        return f"chosen on {tried[BASE]['blocks']:,} blocks: {said}; trained at {used}", same


def _either(rates: Iterable[float]) -> str:
    return "/".join(f"{rate:g}" for rate in sorted(rates))


def _listed(values: pd.Series, form: str) -> str:
    return ", ".join(format(value, form) for value in values)
