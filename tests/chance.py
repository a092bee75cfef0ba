"""Pearson's chi-square test, for tests of what is drawn at random."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square(counts: Tensor, probs: Tensor, *, least: float = 5.0) -> float:
    """The p-value of `counts` having been drawn from `probs`; cells expected less than `least` times are merged.

    A count where nothing may fall gives 0.
    """
    counts, expected = counts.flatten().double(), probs.flatten().double() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return 0.0
    big = expected >= least
    counts = torch.cat([counts[big], counts[~big].sum()[None]])
    expected = torch.cat([expected[big], expected[~big].sum()[None]])
    filled = expected > 0
    statistic = ((counts - expected)[filled].square() / expected[filled]).sum()
    freedom = filled.sum() - 1
    assert freedom >= 2, "too few draws for a test"
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
