"""Draws follow their distribution, and the walk's distributions are those it drew from."""

import math

import pytest
import torch
from chance import chi_square

from dspine_probe.drafts.transition import TransitionCache
from dspine_probe.errors import UsageError
from dspine_probe.sampling import GREEDY, Sampling, nucleus, pick, tempered


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_picks_follow_the_weights_and_never_fall_on_zero():
    weights = torch.tensor([0.0, 0.4, 0.0, 1.2, 0.0, 0.3, 0.1, 0.0])
    drawn = pick(weights.expand(50_000, -1), torch.rand(50_000, generator=seeded()))
    counts = drawn.bincount(minlength=8)
    assert chi_square(counts, weights / weights.sum()) > 0.01
    assert chi_square(counts, torch.tensor([0.0, 0.45, 0.0, 1.15, 0.0, 0.3, 0.1, 0.0]) / 2) < 1e-6
    ends = pick(weights.expand(2, -1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert ends.tolist() == [1, 6]


def test_temperature_reaches_from_uniform_to_the_likeliest():
    scores = torch.tensor([[3.0, 1.0, 2.5, -torch.inf]])
    torch.testing.assert_close(tempered(scores, 0.5), (scores / 0.5).softmax(dim=-1))
    torch.testing.assert_close(tempered(scores, 1e-30), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(tempered(scores, 1e30), torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]))


def test_the_nucleus_is_the_fewest_tokens_that_hold_the_mass():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert nucleus(probs, 1.0) is probs
    torch.testing.assert_close(nucleus(probs, 0.39), torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    torch.testing.assert_close(nucleus(probs, 0.41), torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7]]))
    torch.testing.assert_close(nucleus(probs, 0.95), probs)
    tied = nucleus(torch.tensor([0.25, 0.25, 0.25, 0.25]), 0.5)
    torch.testing.assert_close(tied, torch.tensor([0.5, 0.5, 0.0, 0.0]))


def test_a_sampled_walk_draws_each_slot_given_the_one_before():
    slots, k, blocks = 3, 4, 40_000
    table = torch.randn(slots, k, k, generator=seeded(1))
    table[0] = table[0, 0]  # slot 1 follows the anchor alone
    candidates = torch.randperm(50, generator=seeded(2))[: slots * k].view(slots, k)
    cache = TransitionCache(candidates.expand(blocks, -1, -1), table.expand(blocks, -1, -1, -1))
    tokens, probs = cache.walk_sampled(0.8, torch.rand(blocks, slots, generator=seeded(3)))
    path = (tokens[..., None] == candidates).long().argmax(dim=-1)
    steps = (table / 0.8).softmax(dim=-1)
    before = torch.cat([torch.zeros(blocks, 1, dtype=torch.long), path[:, :-1]], dim=1)
    torch.testing.assert_close(probs, steps[torch.arange(slots), before])
    law = steps[0, 0, :, None, None] * steps[1, :, :, None] * steps[2, None]
    counts = (path @ torch.tensor([k * k, k, 1])).bincount(minlength=k**3)
    assert chi_square(counts, law) > 0.01
    marginal = steps[0, 0, :, None, None] * steps[1].mean(dim=0)[None, :, None] * steps[2, None]
    assert chi_square(counts, marginal) < 1e-6, "the test cannot tell whether slot 2 follows slot 1"
    coldest, _ = cache.walk_sampled(1e-6, torch.rand(blocks, slots, generator=seeded(3)))
    assert torch.equal(coldest, cache.walk_greedy())


def test_sampling_that_cannot_be_met():
    cases = [
        (dict(temperature=-0.5), "temperature is -0.5"),
        (dict(temperature=math.nan), "temperature is nan"),
        (dict(temperature=math.inf), "temperature is inf"),
        (dict(temperature=1.0, top_p=0.0), "top_p is 0.0"),
        (dict(temperature=1.0, top_p=1.01), "top_p is 1.01"),
        (dict(temperature=1.0, draft_temperature=-1.0), "draft_temperature is -1.0"),
        (dict(draft_temperature=1.0), "the answer is greedy"),
    ]
    for given, message in cases:
        with pytest.raises(UsageError, match=message):
            Sampling(**given)
    assert GREEDY.greedy and Sampling(0.7).drafting == 0.7 and Sampling(0.7, draft_temperature=0.0).drafting == 0.0
