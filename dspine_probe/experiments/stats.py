"""Bootstrap over groups: how far a measured ratio would move had other prompts been drawn.

Tokens of one prompt are not independent, so whole prompts are resampled, never tokens. Everything measured here is a
ratio of sums over prompts (accepted tokens per round, correct slots per slot), with any number of trailing axes (layer,
slot). Two quantities measured on the same prompts are compared under the same draws. Entry points: `ratio_estimate` for
one ratio; `draw_counts`, `ratio_samples` and `estimate` to combine several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.errors import UsageError

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A measured value and the ends of its percentile interval; NaN where the denominator is zero."""

    value: Float[Tensor, "*stat"]
    low: Float[Tensor, "*stat"]
    high: Float[Tensor, "*stat"]


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


def ratio_samples(
    numerator: Float[Tensor, "group *stat"],
    denominator: Float[Tensor, "group *stat"],
    counts: Float[Tensor, "resample group"],
) -> Float[Tensor, "resample *stat"]:
    """Σ numerator / Σ denominator over the groups of every resample; both broadcast against each other."""
    return _weighted(numerator, counts) / _weighted(denominator, counts)


def estimate(
    value: Float[Tensor, "*stat"], samples: Float[Tensor, "resample *stat"], level: float = LEVEL
) -> Estimate:
    """`value` with the percentile interval of its resampled values; undefined resamples are left out."""
    tail = (1 - level) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=samples.dtype)
    low, high = torch.nanquantile(samples, ends, dim=0)
    return Estimate(value, low, high)


def ratio_estimate(
    numerator: Float[Tensor, "group *stat"],
    denominator: Float[Tensor, "group *stat"],
    *,
    generator: torch.Generator,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Estimate:
    """The pooled ratio of all groups with its bootstrap interval.

    Args:
        numerator: one sum per group, for example accepted tokens of every prompt.
        denominator: what the sum is over, for example rounds of every prompt.
        generator: source of the draws; the same seed gives the same interval.
        resamples: number of bootstrap resamples.
        level: probability mass inside the interval.
    """
    once = torch.ones(1, len(numerator), dtype=torch.float64)
    counts = draw_counts(len(numerator), generator=generator, resamples=resamples)
    value = ratio_samples(numerator, denominator, once)[0]
    return estimate(value, ratio_samples(numerator, denominator, counts), level)


def _weighted(x: Tensor, counts: Float[Tensor, "resample group"]) -> Float[Tensor, "resample *stat"]:
    flat = x.double().cpu().reshape(len(x), -1)
    return (counts @ flat).reshape(len(counts), *x.shape[1:])
