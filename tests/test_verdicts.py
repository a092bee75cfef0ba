"""The grammar of verdicts: intervals over seeds and prompts, families, and the words that follow from them."""

import math

import pandas as pd
import pytest
import torch
from scipy import stats

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.verdicts import (
    Measurement,
    best,
    compare,
    holm,
    judge,
    over_seeds,
    together,
    worst,
)


def seeds(*values: float, error: float = 0.0) -> Measurement:
    return over_seeds([Measurement(value, error) for value in values])


def test_without_prompt_error_the_interval_is_the_t_interval_over_seeds():
    values = [0.2, 0.5, 0.3, 0.9]
    expected = stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=stats.sem(values))
    assert seeds(*values).interval() == pytest.approx(expected)


def test_equal_seeds_leave_the_error_over_prompts():
    low, high = seeds(0.4, 0.4, 0.4, error=0.1).interval()
    assert (low, high) == pytest.approx((0.4 - 0.196, 0.4 + 0.196), abs=1e-4)


def test_joint_intervals_cover_at_their_level():
    """Seeds and prompts both vary: 95 % intervals hold the truth in about 95 % of 2,000 simulated experiments."""
    generator = torch.Generator().manual_seed(0)
    trials, hits, prompts = 2000, 0, 40
    for _ in range(trials):
        of_seed = torch.randn(3, 1, generator=generator) * 0.5
        of_prompt = torch.randn(1, prompts, generator=generator) * 2
        own = torch.randn(3, prompts, generator=generator)
        scores = 1.0 + of_seed + of_prompt + own
        each = [Measurement(float(s.mean()), float(s.std() / math.sqrt(prompts))) for s in scores]
        low, high = over_seeds(each).interval()
        hits += low <= 1.0 <= high
    assert 0.93 <= hits / trials <= 0.995


def test_holm_widens_the_smallest_p_most_and_stops_at_the_first_that_fails():
    family = [Measurement(1.0, 0.25), Measurement(1.0, 0.49), Measurement(0.1, 1.0), Measurement(9.0, 1.0)]
    assert holm(family) == pytest.approx([1 - 0.05 / 3, 1 - 0.05 / 2, 1 - 0.05 / 2, 1 - 0.05 / 4])


@pytest.mark.parametrize(
    "values, word",
    [
        ((5.0, 5.2, 5.1), "shown"),
        ((0.5, 0.6, 0.4), "negligible"),
        ((-5.0, -5.2, -5.1), "reversed"),
        ((5.0, -1.0, 9.0), "undecided"),
        ((5.0, 5.2), "shown in 2 seeds"),
    ],
)
def test_words(values, word):
    assert judge(seeds(*values), 2.0) == word


def test_a_tiny_effect_that_excludes_zero_is_negligible_not_shown():
    assert judge(Measurement(1.0, 0.4, seeds=3), 2.0) == "negligible"
    assert judge(Measurement(2.5, 0.4, seeds=3), 2.0) == "shown"


@pytest.mark.parametrize(
    "value, error, published, word",
    [
        (14.0, 1.0, 14.8, "as published"),
        (-30.0, 2.0, -31.8, "as published"),
        (6.0, 1.0, 14.8, "smaller"),
        (-20.0, 2.0, -31.8, "smaller"),
        (-40.0, 2.0, -31.8, "larger"),
        (5.0, 8.0, 14.8, "undecided"),
        (5.0, 8.0, None, "no published number"),
    ],
)
def test_sizes(value, error, published, word):
    assert compare(Measurement(value, error, seeds=3), published) == word


def test_nothing_to_judge_is_refused():
    with pytest.raises(UsageError, match="at least one"):
        over_seeds([])
    with pytest.raises(UsageError, match="positive"):
        judge(seeds(1.0, 2.0, 3.0), 0.0)


def test_one_training_keeps_the_interval_that_it_was_measured_with():
    row = pd.Series({"mean": 1.06, "low": 1.05, "high": 1.08})
    gain = Measurement.of(row) - 1
    assert gain.interval() == pytest.approx((0.05, 0.08)) and (-gain).interval() == pytest.approx((-0.08, -0.05))
    assert (gain / 2).interval() == pytest.approx((0.025, 0.04))
    assert judge(gain, 0.02) == "shown in 1 seed" and judge(gain, 0.02, seeds_required=1) == "shown"


def test_words_are_joined():
    words = {"a": "shown in 1 seed", "b": "undecided"}
    assert best(words.values()) == "shown in 1 seed" and worst(words.values()) == "undecided"
    assert together(words) == "a shown in 1 seed, b undecided" and together({"a": "shown", "b": "shown"}) == "shown"
