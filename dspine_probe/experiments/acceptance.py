"""Acceptance of drafts: how many tokens a round commits, by set, by slot, with bootstrap intervals.

AL, the acceptance length, is pooled: tokens committed over rounds. The token of the prefill is not counted, a round
that reaches the end of an answer counts the tokens up to it (no bonus behind a stop). Slot k's conditional acceptance
is the share of kept tokens where it was put to the test: reached, and not beyond the answer's end. Survival is the
running product c₁·…·c_k, and without answers' ends AL = 1 + Σ_k survival_k exactly. "mean" is the unweighted mean of
the sets. Entry points: `measure`, `AcceptanceResult`; `evaluation.evaluate` makes one from prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.offline import Rounds
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.results import load_result, save_result
from dspine_probe.experiments.stats import RESAMPLES, Estimate, draw_counts, estimate, ratio_samples

MEAN = "mean"
NAME = "acceptance"
METRICS = ("al", "al_per_request", "stop_share", "conditional", "survival")


@dataclass(frozen=True)
class RequestCounts:
    """What one draft did on one prompt.

    rounds, committed: rounds, and tokens they added.
    stopped: whether a round reached a stop token.
    reached, passed: per slot 1…T, in how many rounds it was put to the test, and in how many its token was kept.
    """

    draft: str
    set: str
    id: str
    rounds: int
    committed: int
    stopped: bool
    reached: tuple[int, ...]
    passed: tuple[int, ...]


def measure(draft: str, set: str, id: str, rounds: Rounds, *, stopped: bool, slots: int) -> RequestCounts:
    """Counts of one answer's rounds; `slots` is T, the number of drafted tokens a round."""
    each = list(zip(rounds.accepted, rounds.left, strict=True))
    return RequestCounts(
        draft=draft,
        set=set,
        id=id,
        rounds=len(each),
        committed=sum(rounds.committed),
        stopped=stopped and bool(each),
        reached=tuple(sum(kept >= k - 1 and left >= k for kept, left in each) for k in range(1, slots + 1)),
        passed=tuple(sum(kept >= k for kept, _ in each) for k in range(1, slots + 1)),
    )


@dataclass(frozen=True)
class AcceptanceResult:
    """Counts of every draft on every prompt, and the statistics they give.

    requests: the counts; every draft must have seen the same prompts.
    config: how they were made (target, drafts, limits).
    seed, resamples: of the bootstrap. Prompts are drawn within each set, and alike for all drafts.
    """

    requests: tuple[RequestCounts, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    resamples: int = RESAMPLES

    def __post_init__(self) -> None:
        if not self.requests:
            raise UsageError("there is no request to report on; give at least one prompt and one draft")
        prompts = {draft: [(r.set, r.id) for r in self._of(draft)] for draft in self.drafts}
        if len({tuple(seen) for seen in prompts.values()}) > 1:
            raise UsageError("the drafts were measured on different prompts; evaluate them together")

    @property
    def drafts(self) -> tuple[str, ...]:
        """Names of the drafts, in the order measured."""
        return tuple(dict.fromkeys(request.draft for request in self.requests))

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the prompt sets, in the order measured."""
        return tuple(dict.fromkeys(request.set for request in self.requests))

    def acceptance_length(self, draft: str, set: str = MEAN) -> Estimate:
        """Pooled AL of a draft on one set, or its mean over the sets."""
        return estimate(*self._values("al", draft, set))

    def acceptance(self, draft: str, set: str = MEAN) -> Estimate:
        """Conditional acceptance of slots 1…T."""
        return estimate(*self._values("conditional", draft, set))

    def survival(self, draft: str, set: str = MEAN) -> Estimate:
        """Share of rounds that keep slot k and all before it, k = 1…T, with answers' ends taken out."""
        return estimate(*self._values("survival", draft, set))

    def paired_ratio(self, draft: str, base: str, set: str = MEAN) -> Estimate:
        """AL of `draft` over AL of `base` on the same prompts, drawn alike; for the mean, the ratio of the means."""
        value, samples = self._values("al", draft, set)
        base_value, base_samples = self._values("al", base, set)
        return estimate(value / base_value, samples / base_samples)

    def to_frame(self) -> pd.DataFrame:
        """Tidy table: draft, set, metric, slot (empty unless per slot), value, low, high, requests, rounds, tokens.

        Metrics: al (pooled), al_per_request (mean over requests), stop_share (rounds that reach a stop token, per
        round), conditional and survival (per slot).
        """
        rows = []
        for draft in self.drafts:
            for name in (*self.sets, MEAN):
                counts = self._counts(draft, name)
                for metric in METRICS:
                    found = estimate(*self._values(metric, draft, name))
                    rows += [
                        {"draft": draft, "set": name, "metric": metric} | row | counts for row in _rows(found)
                    ]
        return pd.DataFrame(rows).astype({"slot": "Int64"})

    def claims(self) -> list[Claim]:
        """The ledger's line on AL: every DSpine over the DFlash measured beside it, the i-th over the i-th."""
        kinds = {name: draft["architectures"][0] for name, draft in self.config.get("drafts", {}).items()}
        bases, spines = ([n for n in self.drafts if kinds.get(n) == kind] for kind in (DFLASH, DSPINE))
        return [self._claim(spine, base) for spine, base in zip(spines, bases, strict=False)]

    def _claim(self, spine: str, base: str) -> Claim:
        found, sets = self.paired_ratio(spine, base), [self.paired_ratio(spine, base, s) for s in self.sets]
        ahead = sum(bool(one.low > 1) for one in sets)
        firsts = [f"{100 * float(self.acceptance(name).value[0]):.1f}" for name in (spine, base)]
        lengths = [f"{float(self.acceptance_length(name).value):.2f}" for name in (spine, base)]
        ratio, low, high = (f"{float(getattr(found, part)):.2f}" for part in ("value", "low", "high"))
        return Claim.on(
            "AL",
            here=f"{spine} over {base}: {lengths[0]} / {lengths[1]} = {ratio} [{low}, {high}], mean of "
            f"{len(self.sets)} sets, n = {len(self._of(spine))} prompts, at most {self.config.get('max_new_tokens')} "
            f"new tokens, target {self.config.get('target')}",
            controls=[
                ("ahead in every set alone", f"{ahead} of {len(sets)} intervals above 1", ahead == len(sets)),
                ("slot 1 accepted", f"{firsts[0]} and {firsts[1]} %", None),
            ],
            holds=True if found.low > 1 else False if found.high < 1 else None,
            command=f"dspine-probe evaluate --draft {base} --draft {spine} --prompts FOLDER",
        )

    def save(self, folder: str | Path) -> None:
        """Write `acceptance.csv` (the table) and `acceptance.json` (counts, configuration, versions)."""
        record = {
            "requests": self.requests,
            "config": self.config,
            "seed": self.seed,
            "resamples": self.resamples,
        }
        save_result(folder, NAME, self.to_frame(), record)

    @classmethod
    def load(cls, folder: str | Path) -> AcceptanceResult:
        """Read back a saved result.

        Raises:
            UsageError: there is none in the folder.
            ProbeError: it cannot be read.
        """
        _, record = load_result(folder, NAME)
        try:
            requests = tuple(_request(raw) for raw in record["requests"])
            return cls(requests, record["config"], record["seed"], record["resamples"])
        except (KeyError, TypeError) as error:
            raise ProbeError(f"{NAME}.json in {folder} lacks {error}; evaluate again") from error

    @cached_property
    def _draws(self) -> dict[str, Float[Tensor, "resample request"]]:
        generator = torch.Generator().manual_seed(self.seed)
        first = self._of(self.drafts[0])
        sizes = {name: sum(request.set == name for request in first) for name in self.sets}
        return {
            n: draw_counts(size, generator=generator, resamples=self.resamples) for n, size in sizes.items()
        }

    def _values(self, metric: str, draft: str, set: str) -> tuple[Tensor, Float[Tensor, "resample *slot"]]:
        """The metric on a set (or its mean over sets), and its value in every resample."""
        if draft not in self.drafts or set not in (*self.sets, MEAN):
            raise UsageError(
                f"there is no draft {draft!r} with set {set!r} here; drafts are {', '.join(self.drafts)} and sets "
                f"{', '.join(self.sets)} or {MEAN}"
            )
        if set == MEAN:
            pairs = [self._values(metric, draft, name) for name in self.sets]
            return torch.stack([v for v, _ in pairs]).nanmean(0), torch.stack([s for _, s in pairs]).nanmean(
                0
            )
        numerator, denominator = _sums(metric, self._of(draft, set))
        weights = torch.cat([torch.ones(1, len(numerator), dtype=torch.float64), self._draws[set]])
        values = ratio_samples(numerator, denominator, weights)
        if metric == "survival":
            # A slot that no round reached has no rate of its own; nothing survives to it.
            values = values.nan_to_num(0.0).cumprod(dim=-1)
        return values[0], values[1:]

    def _of(self, draft: str, set: str = MEAN) -> list[RequestCounts]:
        return [one for one in self.requests if one.draft == draft and set in (one.set, MEAN)]

    def _counts(self, draft: str, set: str) -> dict[str, int]:
        requests = self._of(draft, set)
        return {
            "requests": len(requests),
            "rounds": sum(one.rounds for one in requests),
            "tokens": sum(one.committed for one in requests),
        }


def _request(raw: Mapping[str, Any]) -> RequestCounts:
    return RequestCounts(**{**raw, "reached": tuple(raw["reached"]), "passed": tuple(raw["passed"])})


def _sums(metric: str, requests: Sequence[RequestCounts]) -> tuple[Tensor, Tensor]:
    """Per request, the two sums whose ratio is the metric."""
    rounds = torch.tensor([float(one.rounds) for one in requests])
    committed = torch.tensor([float(one.committed) for one in requests])
    if metric == "al":
        return committed, rounds
    if metric == "al_per_request":
        return (committed / rounds).nan_to_num(0.0), (rounds > 0).float()
    if metric == "stop_share":
        return torch.tensor([float(one.stopped) for one in requests]), rounds
    return torch.tensor([one.passed for one in requests]), torch.tensor([one.reached for one in requests])


def _rows(found: Estimate) -> list[dict[str, float | None]]:
    """One row for a number, one per slot for a row of numbers."""
    slots: Sequence[int | None] = [None] if found.value.ndim == 0 else range(1, len(found.value) + 1)
    columns = zip(
        slots, *(part.reshape(-1).tolist() for part in (found.value, found.low, found.high)), strict=True
    )
    return [{"slot": slot, "value": value, "low": low, "high": high} for slot, value, low, high in columns]
