"""From sums and scores to estimates: means over slots and sets, paired differences, bootstrap intervals.

Tokens of one prompt are not independent, so whole prompts are resampled, never tokens. Everything measured is a ratio
of sums over prompts (accepted tokens per round, correct slots per slot), with any number of trailing axes. Quantities
measured on the same prompts are compared under the same draws, so their differences are paired.

Two levels: `draw_counts`, `ratio_samples` and `estimate` for ratios and what is made of them; and, for
scores [block, draft_slot] in the order of an arena (NaN where nothing was measured), `Draws.of` with `macro`,
`difference`, `per_slot` and `per_set`. A slot's mean in a set pools that set's blocks; slots are then averaged
unweighted, and sets after them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.arena import Arena

RESAMPLES = 2000
LEVEL = 0.95
Scores = Float[Tensor, "block draft_slot"]


@dataclass(frozen=True)
class Estimate:
    """A measured value and the ends of its percentile interval; NaN where the denominator is zero."""

    value: Float[Tensor, "*stat"]
    low: Float[Tensor, "*stat"]
    high: Float[Tensor, "*stat"]

    @classmethod
    def without_interval(cls, value: float) -> Estimate:
        """A single number that has no interval."""
        none = torch.tensor(math.nan)
        return cls(torch.tensor(value, dtype=torch.float64), none, none)

    def at(self, *index: int) -> Estimate:
        """The estimate at one place of the axes, such as one slot."""
        return Estimate(self.value[index], self.low[index], self.high[index])


def draw_counts(
    groups: int, *, generator: torch.Generator, resamples: int = RESAMPLES
) -> Float[Tensor, "resample group"]:
    """How often each group occurs in every resample of `groups` groups with replacement."""
    if groups < 1 or resamples < 1:
        raise UsageError(
            f"the bootstrap was given {groups} groups and {resamples} resamples; it needs 1 or more of both"
        )
    drawn = torch.randint(groups, (resamples, groups), generator=generator, device=generator.device)
    counts = torch.zeros(resamples, groups, dtype=torch.float64, device=generator.device)
    return counts.scatter_add_(1, drawn, torch.ones_like(counts)).cpu()


def set_weights(
    sets: Sequence[str], *, seed: int, resamples: int = RESAMPLES
) -> Float[Tensor, "one_and_resample prompt"]:
    """How often each resample draws every prompt, drawn within its set; the first row, all ones, is the measured value.

    A set with one prompt has nothing to draw from. Its resamples would all be the same and the interval without width,
    so all resamples are NaN then: there is no interval.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(1 + resamples, len(sets), dtype=torch.float64)
    weights[0] = 1
    for name in dict.fromkeys(sets):
        members = torch.tensor([i for i, of in enumerate(sets) if of == name])
        weights[1:, members] = draw_counts(len(members), generator=generator, resamples=resamples)
    if 1 in Counter(sets).values():
        weights[1:] = math.nan
    return weights


def ratio_samples(
    numerator: Float[Tensor, "group *stat"],
    denominator: Float[Tensor, "group *stat"],
    counts: Float[Tensor, "resample group"],
) -> Float[Tensor, "resample *stat"]:
    """Σ numerator / Σ denominator over the groups of every resample; both broadcast against each other."""
    return _weighted(numerator, counts) / _weighted(denominator, counts)


def estimate(value: Float[Tensor, "*stat"], samples: Float[Tensor, "resample *stat"]) -> Estimate:
    """`value` with the 95 % percentile interval of its resampled values; undefined resamples are left out."""
    tail = (1 - LEVEL) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=samples.dtype)
    low, high = torch.nanquantile(samples, ends, dim=0)
    return Estimate(value, low, high)


@dataclass(frozen=True)
class Draws:
    """Which prompt and set every block belongs to, and how often each resample draws every prompt.

    weights: first row all ones, for the measured value; then one row a resample.
    """

    prompt: Int[Tensor, "block"]
    set_index: Int[Tensor, "block"]
    set_names: tuple[str, ...]
    weights: Float[Tensor, "one_and_resample prompt"]

    @classmethod
    def of(cls, arena: Arena, *, seed: int = 0, resamples: int = RESAMPLES) -> Draws:
        """Draws for an arena; the same seed gives the same ones."""
        weights = set_weights(arena.sets, seed=seed, resamples=resamples)
        return cls(arena.prompt, arena.set_index, arena.set_names, weights)

    def means(self, scores: Scores) -> Float[Tensor, "one_and_resample set draft_slot"]:
        """Mean by set and slot, as measured (row 0) and in every resample; NaN where nothing was measured."""
        if len(scores) != len(self.prompt):
            raise UsageError(
                f"scores have {len(scores)} blocks and the arena {len(self.prompt)}; give each block a row."
            )
        measured = ~scores.isnan()
        sums = self._by_prompt(scores.nan_to_num(0.0))
        counts = self._by_prompt(measured)
        found = []
        for index in range(len(self.set_names)):
            members = self.prompt[self.set_index == index].unique()
            found.append(ratio_samples(sums[members], counts[members], self.weights[:, members]))
        return torch.stack(found, dim=1)

    def _by_prompt(self, values: Tensor) -> Float[Tensor, "prompt draft_slot"]:
        sums = torch.zeros(self.weights.shape[1], values.shape[1], dtype=torch.float64)
        return sums.index_add_(0, self.prompt, values.double().cpu())


def macro(scores: Scores, draws: Draws, slots: Sequence[int] | None = None) -> Estimate:
    """Mean over slots (1…T, or those named), then over sets."""
    return _reduced(scores, draws, slots, lambda means: means.nanmean(-1).nanmean(-1))


def difference(a: Scores, b: Scores, draws: Draws, slots: Sequence[int] | None = None) -> Estimate:
    """`macro` of a − b, over what was measured in both."""
    return macro(a - b, draws, slots)


def per_slot(scores: Scores, draws: Draws) -> Estimate:
    """Mean over sets of every slot 1…T."""
    return _reduced(scores, draws, None, lambda means: means.nanmean(1))


def per_set(scores: Scores, draws: Draws, slots: Sequence[int] | None = None) -> Estimate:
    """Mean over slots of every set, in the order of `draws.set_names`."""
    return _reduced(scores, draws, slots, lambda means: means.nanmean(-1))


def _reduced(scores: Scores, draws: Draws, slots: Sequence[int] | None, reduce: Callable[[Tensor], Tensor]) -> Estimate:
    if slots is not None:
        bad = [slot for slot in slots if not 1 <= slot <= scores.shape[1]]
        if bad or not slots:
            raise UsageError(f"slots {list(slots)} were asked for; name some of 1…{scores.shape[1]}.")
        scores = scores[:, torch.tensor(slots) - 1]
    values = reduce(draws.means(scores))
    return estimate(values[0], values[1:])


def _weighted(x: Tensor, counts: Float[Tensor, "resample group"]) -> Float[Tensor, "resample *stat"]:
    flat = x.double().cpu().reshape(len(x), -1)
    return (counts @ flat).reshape(len(counts), *x.shape[1:])
