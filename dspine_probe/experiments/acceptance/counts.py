"""Rounds counted by prompt, and the statistics they give, with bootstrap intervals.

AL, the acceptance length, is pooled: tokens committed over rounds. The token of the prefill is not counted, a round
that reaches the end of an answer counts the tokens up to it (no bonus behind a stop). Slot k's conditional acceptance
is the share of kept tokens where it was tested: reached, and not beyond the answer's end. Survival is the
running product c₁·…·c_k, and without answers' ends AL = 1 + Σ_k survival_k exactly. "mean" is the unweighted mean of
the sets. Entry points: `count_rounds`, `AcceptanceCounts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.decoding.offline import Rounds
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.intervals import RESAMPLES, Estimate, estimate, ratio_samples, set_weights
from dspine_probe.experiments.common.schema import MEAN

AL, PER_REQUEST, STOPS, CONDITIONAL, SURVIVAL = ("al", "al_per_request", "stop_share", "conditional", "survival")
METRICS = (AL, PER_REQUEST, STOPS, CONDITIONAL, SURVIVAL)
"""Pooled AL, its mean over requests, rounds that reach a stop token; and, by slot, conditional acceptance, survival."""


@dataclass(frozen=True)
class RequestCounts:
    """What one draft did on one prompt.

    rounds, committed: rounds, and tokens they added.
    stopped: whether a round reached a stop token.
    reached, passed: per slot 1…T, in how many rounds it was tested, and in how many its token was kept.
    """

    draft: str
    set: str
    id: str
    rounds: int
    committed: int
    stopped: bool
    reached: tuple[int, ...]
    passed: tuple[int, ...]


def count_rounds(draft: str, set: str, id: str, rounds: Rounds, *, stopped: bool, slots: int) -> RequestCounts:
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
class AcceptanceCounts:
    """Counts of every draft on every prompt; every draft must have seen the same prompts.

    seed, resamples: of the bootstrap. Prompts are drawn within each set, and alike for all drafts.

    Raises:
        UsageError: there is no request, or drafts were measured on different prompts.
    """

    requests: tuple[RequestCounts, ...]
    seed: int = 0
    resamples: int = RESAMPLES

    def __post_init__(self) -> None:
        if not self.requests:
            raise UsageError("there is no request to report on; give at least one prompt and one draft")
        if len({tuple((r.set, r.id) for r in self.of(draft)) for draft in self.drafts}) > 1:
            raise UsageError("the drafts were measured on different prompts; evaluate them together")

    @property
    def drafts(self) -> tuple[str, ...]:
        """Names of the drafts, in the order measured."""
        return tuple(dict.fromkeys(request.draft for request in self.requests))

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the prompt sets, in the order measured."""
        return tuple(dict.fromkeys(request.set for request in self.requests))

    def of(self, draft: str, set: str = MEAN) -> list[RequestCounts]:
        """The requests of a draft, on one set or all."""
        return [one for one in self.requests if one.draft == draft and set in (one.set, MEAN)]

    def acceptance_length(self, draft: str, set: str = MEAN) -> Estimate:
        """Pooled AL of a draft on one set, or its mean over the sets."""
        return self.estimate(AL, draft, set)

    def paired_ratio(self, draft: str, base: str, set: str = MEAN) -> Estimate:
        """AL of `draft` over AL of `base` on the same prompts, drawn alike; for the mean, the ratio of the means."""
        ratio = self._samples(AL, draft, set) / self._samples(AL, base, set)
        return estimate(ratio[0], ratio[1:])

    def doubling(self, blocks: Mapping[str, int]) -> Estimate:
        """Tokens per round gained with every doubling of the blocks a draft was trained on, by least squares.

        blocks: by draft; two different numbers or more.
        """
        times = torch.tensor([float(count) for count in blocks.values()], dtype=torch.float64).log2()
        lengths = torch.stack([self._samples(AL, draft, MEAN) for draft in blocks], dim=1)
        spread = times - times.mean()
        slope = (lengths - lengths.mean(dim=1, keepdim=True)) @ spread / spread.square().sum()
        return estimate(slope[0], slope[1:])

    def estimate(self, metric: str, draft: str, set: str = MEAN) -> Estimate:
        """One of `METRICS` on one set, or its mean over the sets.

        Raises:
            UsageError: there is no such draft or set.
        """
        samples = self._samples(metric, draft, set)
        return estimate(samples[0], samples[1:])

    @cached_property
    def _weights(self) -> Float[Tensor, "one_and_resample request"]:
        sets = [one.set for one in self.of(self.drafts[0])]
        return set_weights(sets, seed=self.seed, resamples=self.resamples)

    def _samples(self, metric: str, draft: str, set: str) -> Float[Tensor, "one_and_resample *slot"]:
        """The metric on a set (or its mean over sets), as measured (row 0) and in every resample."""
        if draft not in self.drafts or set not in (*self.sets, MEAN):
            raise UsageError(
                f"there is no draft {draft!r} with set {set!r} here; drafts are {', '.join(self.drafts)} and sets "
                f"{', '.join(self.sets)} or {MEAN}"
            )
        if set == MEAN:
            found = torch.stack([self._samples(metric, draft, name) for name in self.sets])
            return torch.cat([found[:, 0].nanmean(0)[None], found[:, 1:].nanmean(0)])
        members = torch.tensor([one.set == set for one in self.of(draft)])
        values = ratio_samples(*_sums(metric, self.of(draft, set)), self._weights[:, members])
        if metric == SURVIVAL:
            # A slot that no round reached has no rate of its own; nothing survives to it.
            return values.nan_to_num(0.0).cumprod(dim=-1)
        return values


def _sums(metric: str, requests: Sequence[RequestCounts]) -> tuple[Tensor, Tensor]:
    """Per request, the two sums whose ratio is the metric."""
    rounds = torch.tensor([float(one.rounds) for one in requests])
    committed = torch.tensor([float(one.committed) for one in requests])
    if metric == AL:
        return committed, rounds
    if metric == PER_REQUEST:
        return (committed / rounds).nan_to_num(0.0), (rounds > 0).float()
    if metric == STOPS:
        return torch.tensor([float(one.stopped) for one in requests]), rounds
    return torch.tensor([one.passed for one in requests]), torch.tensor([one.reached for one in requests])
