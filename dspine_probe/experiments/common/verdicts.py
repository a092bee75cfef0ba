"""Verdicts on a claim in three parts: effect, specificity and size, by the rules of `docs/protocols.md`.

`over_seeds` joins training seeds and prompts in one interval, `holm` widens the intervals of a family, `judge` and
`compare` turn an interval into a word, `best`, `worst` and `together` join words. All start from `Measurement`s, whose
printed interval is the one that is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import Any, NamedTuple

import torch
from scipy import stats

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.intervals import LEVEL, Estimate
from dspine_probe.experiments.common.wording import counted, ends

SHOWN, UNDECIDED, NEGLIGIBLE, REVERSED = "shown", "undecided", "negligible", "reversed"
AS_PUBLISHED, SMALLER, LARGER, NO_NUMBER = "as published", "smaller", "larger", "no published number"
NOT_MEASURED = "not measured"
SEEDS_REQUIRED = 3
_BEST_FIRST = (SHOWN, UNDECIDED, NEGLIGIBLE, REVERSED)


@dataclass(frozen=True)
class Measurement:
    """A value with its standard error and degrees of freedom.

    seeds: how many trainings it is a mean of. skew: how far a bootstrap interval leans, from −1 (all of it below the
    value) to 1.
    """

    value: float
    error: float
    freedom: float = math.inf
    seeds: int = 1
    skew: float = 0.0

    @classmethod
    def of(cls, measured: Any) -> Measurement:
        """From a row or an `Estimate` of one training, with its 95 % interval over prompts."""
        value, low, high = ends(measured)
        skew = (high + low - 2 * value) / (high - low) if high > low else 0.0
        return cls(value, (high - low) / (2 * float(stats.norm.ppf((1 + LEVEL) / 2))), skew=skew)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Both ends; at 95 %, of one training, those that it was made from."""
        half = float(stats.t.ppf((1 + level) / 2, self.freedom)) * self.error
        return self.value - half * (1 - self.skew), self.value + half * (1 + self.skew)

    @property
    def p(self) -> float:
        """Two-sided p-value of no effect."""
        if self.error == 0:
            return float(self.value == 0)
        return float(2 * stats.t.sf(abs(self.value) / self.error, self.freedom))

    @property
    def estimate(self) -> Estimate:
        """The value with its 95 % interval, to be written."""
        low, high = self.interval()
        return Estimate(*(torch.tensor(end, dtype=torch.float64) for end in (self.value, low, high)))

    def __neg__(self) -> Measurement:
        return replace(self, value=-self.value, skew=-self.skew)

    def __sub__(self, number: float) -> Measurement:
        return replace(self, value=self.value - number)

    def __truediv__(self, number: float) -> Measurement:
        """Over a positive number."""
        return replace(self, value=self.value / number, error=self.error / number)


class ClaimVerdict(NamedTuple):
    """Three answers in words: is the effect there, is it the claimed cause, is it as large as published?"""

    effect: str
    specificity: str = NOT_MEASURED
    size: str = NO_NUMBER

    def __str__(self) -> str:
        return f"effect {self.effect}; specificity {self.specificity}; size {self.size}"


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


def judge(measured: Measurement, smallest: float, *, level: float = LEVEL, seeds_required: int = SEEDS_REQUIRED) -> str:
    """Whether a positive effect of interest is there; turn the sign (`-measured`) for a claimed decrease.

    smallest: the smallest effect of interest, positive. With fewer seeds than required the word is followed by their
    number, as in "shown in 1 seed", and decides nothing.
    """
    if not smallest > 0:
        raise UsageError(f"the smallest effect of interest is {smallest}; give a positive number.")
    low, high = measured.interval(level)
    if math.isnan(low) or math.isnan(high) or low <= 0 <= high and not -smallest < low <= high < smallest:
        return UNDECIDED
    small = -smallest < low and high < smallest or (low > 0 and measured.value < smallest)
    word = NEGLIGIBLE if small else SHOWN if low > 0 else REVERSED
    return word if measured.seeds >= seeds_required else f"{word} in {counted(measured.seeds, 'seed')}"


def compare(measured: Measurement, published: float | None, *, level: float = LEVEL) -> str:
    """How the interval lies to the paper's number."""
    if published is None:
        return NO_NUMBER
    low, high = measured.interval(level)
    if math.isnan(low) or math.isnan(high) or low <= 0 <= high and low <= published <= high:
        return UNDECIDED
    if low <= published <= high:
        return AS_PUBLISHED
    return SMALLER if (published - measured.value) * math.copysign(1, published) > 0 else LARGER


def best(words: Iterable[str]) -> str:
    """The word nearest to "shown", where one of several measurements is enough."""
    return min(words, key=_rank)


def worst(words: Iterable[str]) -> str:
    """The word farthest from "shown", where all of several measurements are needed."""
    return max(words, key=_rank)


def together(words: Mapping[str, str]) -> str:
    """The word that all share, or each with its name."""
    return words[next(iter(words))] if len({*words.values()}) == 1 else ", ".join(f"{n} {w}" for n, w in words.items())


def _rank(word: str) -> int:
    return _BEST_FIRST.index(word.split(" in ")[0])
