"""The outcome of the supervision experiment: one table (see `supervision_table`), and what it says.

An arm raises or lowers acceptance when the interval of its gain over prompts leaves zero out and all seeds agree in
sign; the published order (token cross-entropy < none < cosine) counts as decided from three common seeds on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from dspine_probe.experiments.acceptance import MEAN
from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.results import TableResult
from dspine_probe.experiments.supervision.arms import variant_arms
from dspine_probe.experiments.supervision.readings import FITTED, FIXED
from dspine_probe.experiments.supervision.table import ALL, BASE, OVER_SEEDS
from dspine_probe.training.intermediate import TOKEN_CE

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME = "supervision"
COMMAND = "dspine-probe probe supervision"
COSINE = "cosine"
_COMPARED = (TOKEN_CE, BASE, COSINE)
RAISES, LOWERS, UNDECIDED = "raises", "lowers", "cannot be told from"
_ENOUGH_SEEDS = 3


@dataclass(frozen=True, eq=False)
class SupervisionResult(TableResult):
    """Table, configuration and provenance; `arms` holds the settings of every run by arm and seed."""

    FILE: ClassVar[str] = NAME
    config: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Any]
    seconds: float

    def seeds(self, arm: str) -> list[str]:
        """Seeds of an arm that the arm without supervision has too."""
        return [seed for seed in self.arms[arm] if seed in self.arms[BASE]]

    def verdict(self, arm: str) -> str:
        """Whether an arm raises or lowers acceptance, or cannot be told from no supervision."""
        pooled = self._mean(arm, "al_gain")
        each = [self._mean(arm, "al_gain", seed)["value"] for seed in self.seeds(arm)]
        if pooled["low"] > 0 and min(each) > 0:
            return RAISES
        if pooled["high"] < 0 and max(each) < 0:
            return LOWERS
        return UNDECIDED

    def holds(self) -> bool | None:
        """Whether token cross-entropy < none < cosine; None where seeds, arms or intervals do not decide."""
        if any(arm not in self.arms or len(self.seeds(arm)) < _ENOUGH_SEEDS for arm in (TOKEN_CE, COSINE)):
            return None
        found = self.verdict(TOKEN_CE), self.verdict(COSINE)
        if found == (LOWERS, RAISES):
            return True
        return False if found[0] == RAISES or found[1] == LOWERS else None

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        arms = [arm for arm in self.arms if arm != BASE]
        said = [self._length_sentence(arm) for arm in self.arms]
        said += [self._gain_sentence(arm) for arm in arms]
        said.append(self._order_sentence())
        said += [self._settling_sentence(arm) for arm in arms]
        said += [sentence for arm in self.arms for sentence in self._stream_sentences(arm)]
        said += [self._gradient_sentence(arm) for arm in self.arms]
        return said

    def claims(self) -> list[Claim]:
        """The line of the claims ledger."""
        if not {TOKEN_CE, COSINE} <= set(self.arms):
            return []
        here = (
            "; ".join(
                f"{arm} {self._mean(arm, 'al')['value']:.3f}"
                + ("" if arm == BASE else f" ({_signed(self._mean(arm, 'al_gain'))})")
                for arm in _COMPARED
            )
            + f"; {self._setting()}"
        )
        return [Claim.on("P3", here=here, controls=self._controls(), holds=self.holds(), command=COMMAND)]

    @classmethod
    def _typed(cls, table: pd.DataFrame) -> pd.DataFrame:
        return table.astype({column: "Int64" for column in ("layer", "slot", "blocks")})

    def figure(self) -> Figure:
        """Acceptance of every arm with its seeds (`dspine_probe.plots.supervision` has the others)."""
        from dspine_probe.plots.supervision import arms  # plots build on experiments, not the other way round

        return arms(self).figure

    def settling(self, arm: str) -> tuple[float, float]:
        """Gain in held-out tokens per anchor while training, mean of the seeds: at half of the blocks, at the end."""
        rows = self.select(metric="validation")
        rows = rows[rows["seed"].isin(self.seeds(arm))]
        by_arm = {name: rows[rows["arm"] == name].groupby("blocks")["value"].mean() for name in (arm, BASE)}
        gain = (by_arm[arm] - by_arm[BASE]).dropna()
        half = gain[gain.index <= gain.index.max() / 2]
        return (float(half.iloc[-1]) if len(half) else float("nan")), float(gain.iloc[-1])

    def _mean(self, arm: str, metric: str, seed: str = ALL) -> pd.Series:
        """The row of the mean of the sets."""
        return self.select(arm=arm, metric=metric, seed=seed, set=MEAN).iloc[0]

    def _setting(self) -> str:
        training = next(iter(self.arms[BASE].values()))["training"]
        prompts = int(self._mean(BASE, "al")["prompts"])
        seeds = len(self.seeds(COSINE)) if COSINE in self.arms else len(self.arms[BASE])
        return (
            f"DFlash on {self.data['target']}, {training['blocks']:,} blocks a run, {seeds} "
            f"seed{'s' if seeds > 1 else ''}, n = {prompts} prompts"
        )

    def _length_sentence(self, arm: str) -> str:
        each = ", ".join(f"{self._mean(arm, 'al', seed)['value']:.3f}" for seed in self.arms[arm])
        return f"{arm}: {_interval(self._mean(arm, 'al'))} tokens a round, mean of the sets; by seed {each}."

    def _gain_sentence(self, arm: str) -> str:
        each = ", ".join(f"{self._mean(arm, 'al_gain', seed)['value']:+.3f}" for seed in self.seeds(arm))
        over = self._mean(arm, "al_gain", OVER_SEEDS)
        spread = (
            ""
            if pd.isna(over["low"])
            else f", t-interval over seeds {over['low']:+.3f} to {over['high']:+.3f}"
        )
        verdict = self.verdict(arm)
        return (
            f"{arm} − {BASE}: {_signed(self._mean(arm, 'al_gain'))} tokens a round over prompts; by seed "
            f"{each}{spread}. It {verdict} {'no supervision' if verdict == UNDECIDED else 'acceptance'}."
        )

    def _order_sentence(self) -> str:
        state = {True: "holds here", False: "does not hold here", None: "is not decided here"}[self.holds()]
        return f"The published order, {TOKEN_CE} < {BASE} < {COSINE}, {state} ({self._setting()})."

    def _settling_sentence(self, arm: str) -> str:
        half, end = self.settling(arm)
        return (
            f"{arm} − {BASE}, held-out tokens per anchor while training: {half:+.3f} at half of the blocks, "
            f"{end:+.3f} at the end."
        )

    def _stream_sentences(self, arm: str) -> Iterator[str]:
        ranks = self.select(arm=arm, metric="effective_rank", seed=ALL)
        yield (
            f"{arm}: effective rank of the stream after layers 1…{len(ranks)}: " + _listed(ranks, ".0f") + "."
        )
        cosines = (
            f"{reader} {_listed(self.select(arm=arm, metric=f'cosine, {reader}', seed=ALL), '.3f')}"
            for reader in (FIXED, FITTED)
        )
        yield f"{arm}: mean cosine with the label's code by layer: {'; '.join(cosines)}."

    def _gradient_sentence(self, arm: str) -> str:
        norm, clipped = (self.select(arm=arm, metric=metric)["value"] for metric in ("grad_norm", "clipped"))
        return f"{arm}: median gradient norm {norm.median():.2f}, clipped in {100 * clipped.mean():.0f} % of the steps."

    def _controls(self) -> Iterator[tuple[str, str, bool | None]]:
        for arm in (TOKEN_CE, COSINE):
            half, end = self.settling(arm)
            outcome = f"{arm}: {half:+.3f} tokens per anchor at half of the blocks, {end:+.3f} at the end"
            yield "order settled", outcome, None if half != half else (half > 0) == (end > 0)
        yield "learning rate chosen for each arm", *self._rates()
        for arm in dict.fromkeys((*self.arms, *variant_arms())):
            if arm not in _COMPARED:
                measured = arm in self.arms
                outcome = f"{_signed(self._mean(arm, 'al_gain'))}, one seed" if measured else "not measured"
                yield f"{arm} in its place", outcome, None
        ranks = {
            arm: _listed(self.select(arm=arm, metric="effective_rank", seed=ALL), ".0f")
            for arm in (TOKEN_CE, BASE)
        }
        yield "crowding out (effective rank by layer)", "; ".join(f"{a} {r}" for a, r in ranks.items()), None

    def _rates(self) -> tuple[str, bool]:
        """Rates chosen by short runs beside those trained with, and whether they are the same."""
        trained = {arm: {run["training"]["lr"] for run in self.arms[arm].values()} for arm in _COMPARED}
        used = ", ".join(f"{arm} {_either(rates)}" for arm, rates in trained.items())
        tried = self.config["rates"]
        if not set(tried) >= set(_COMPARED):
            return f"not chosen; trained at {used}", False
        chosen = {arm: tried[arm]["chosen"] for arm in _COMPARED}
        said = ", ".join(
            f"{arm} {chosen[arm]:g} of {_either(map(float, tried[arm]['tokens_per_anchor']))}"
            for arm in _COMPARED
        )
        blocks = tried[BASE]["blocks"]
        same = all(rates == {chosen[arm]} for arm, rates in trained.items())
        return f"chosen on {blocks:,} blocks: {said}; trained at {used}", same


def _interval(row: pd.Series) -> str:
    return f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _signed(row: pd.Series) -> str:
    return f"{row['value']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"


def _either(rates: Iterable[float]) -> str:
    return "/".join(f"{rate:g}" for rate in sorted(rates))


def _listed(rows: pd.DataFrame, form: str) -> str:
    return ", ".join(format(value, form) for value in rows.sort_values("layer")["value"])
