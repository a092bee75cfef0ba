"""Verdicts on a claim in three parts: effect, specificity and size, by the rules of `docs/protocols.md`.

`over_seeds` joins training seeds and prompts in one interval, `holm` widens the intervals of a family, `judge` and
`compare` turn an interval into a word. All take and give `Measurement`s, whose printed interval is the one that is
judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

from scipy import stats

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.intervals import LEVEL

Judgement = Literal["shown", "negligible", "reversed", "undecided"]
Size = Literal["as published", "smaller", "larger", "undecided", "no published number"]
SEEDS_REQUIRED = 3


@dataclass(frozen=True)
class Measurement:
    """A value with its standard error and degrees of freedom; seeds: how many trainings it is a mean of."""

    value: float
    error: float
    freedom: float = math.inf
    seeds: int = 1

    @classmethod
    def from_interval(cls, value: float, low: float, high: float, *, seeds: int = 1) -> Measurement:
        """From a 95 % interval that is close to normal, as a bootstrap over prompts gives it."""
        return cls(value, (high - low) / (2 * float(stats.norm.ppf((1 + LEVEL) / 2))), seeds=seeds)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Both ends of the t-interval."""
        half = float(stats.t.ppf((1 + level) / 2, self.freedom)) * self.error
        return self.value - half, self.value + half

    @property
    def p(self) -> float:
        """Two-sided p-value of no effect."""
        if self.error == 0:
            return float(self.value == 0)
        return float(2 * stats.t.sf(abs(self.value) / self.error, self.freedom))

    def __neg__(self) -> Measurement:
        return Measurement(-self.value, self.error, self.freedom, self.seeds)


def over_seeds(each: Sequence[Measurement]) -> Measurement:
    """The mean over training seeds that were measured on the same prompts.

    The variance is that over seeds, divided by their number, plus that over prompts. Seeds share their prompts, so the
    errors from the choice of prompts count as fully correlated. Degrees of freedom are Satterthwaite's. A single seed
    keeps its interval over prompts.

    Raises:
        UsageError: no measurement was given, or one is itself a mean over seeds.
    """
    if not each or any(one.seeds != 1 for one in each):
        raise UsageError(
            f"over_seeds was given {len(each)} measurements; give one for each training seed, at least one."
        )
    if len(each) == 1:
        return each[0]
    values = [one.value for one in each]
    of_seeds, of_prompts = variance(values) / len(each), fmean(one.error for one in each) ** 2
    total = of_seeds + of_prompts
    freedom = (len(each) - 1) * (total / of_seeds) ** 2 if of_seeds else math.inf
    return Measurement(fmean(values), math.sqrt(total), freedom, len(each))


def holm(family: Sequence[Measurement], level: float = LEVEL) -> list[float]:
    """The level at which each of a family's intervals is read, so that all together err at most at 1 − `level`.

    The smallest p-value of m meets 1 − (1 − level)/m, the next 1 − (1 − level)/(m − 1), and so on; after the first that
    is not significant, the rest keep its level.
    """
    levels = [level] * len(family)
    left, stuck = len(family), None
    for index in sorted(range(len(family)), key=lambda i: family[i].p):
        levels[index] = stuck or 1 - (1 - level) / left
        if family[index].p > 1 - levels[index]:
            stuck = levels[index]
        left -= 1
    return levels


def judge(
    measured: Measurement, smallest: float, *, level: float = LEVEL, seeds_required: int = SEEDS_REQUIRED
) -> Judgement:
    """Whether a positive effect of interest is there; turn the sign (`-measured`) for a claimed decrease.

    smallest: the smallest effect of interest, positive.
    """
    if not smallest > 0:
        raise UsageError(f"the smallest effect of interest is {smallest}; give a positive number.")
    low, high = measured.interval(level)
    if measured.seeds < seeds_required or math.isnan(low) or math.isnan(high):
        return "undecided"
    if -smallest < low and high < smallest or (low > 0 and measured.value < smallest):
        return "negligible"
    return "shown" if low > 0 else "reversed" if high < 0 else "undecided"


def compare(measured: Measurement, published: float | None, *, level: float = LEVEL) -> Size:
    """How the interval lies to the paper's number."""
    if published is None:
        return "no published number"
    low, high = measured.interval(level)
    if math.isnan(low) or math.isnan(high) or low <= 0 <= high and low <= published <= high:
        return "undecided"
    if low <= published <= high:
        return "as published"
    return "smaller" if (published - measured.value) * math.copysign(1, published) > 0 else "larger"
