"""Sampled decoding: the law of the answers is the target's, whatever drafts; rows keep their own chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chance import chi_square
from tiny import VOCAB, prompts, tiny_draft, tiny_target
from torch import Tensor

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.engine import Engines, Proposal
from dspine_probe.decoding.generate import generate, generate_batch
from dspine_probe.decoding.reference import REFERENCE, ReferenceDraft, ReferenceEngines
from dspine_probe.decoding.verify import target_probs
from dspine_probe.drafts import Draft
from dspine_probe.sampling import Sampling
from dspine_probe.target import Target

RUNS, PROMPT = 2000, [5, 40, 11]
# Warm enough that random drafts are believed now and then.
SAMPLINGS = [Sampling(3.0), Sampling(4.0, top_p=0.9), Sampling(3.0, draft_temperature=0.0)]
DRAFTS = {
    "plain": lambda target: None,
    "dflash": tiny_draft,
    "dspine": lambda target: tiny_draft(target, DSPINE),
    "trimmed": lambda target: tiny_draft(target, DSPINE, trimmed=24),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(stop_ids=())


def next_law(target: Target, sequences: Tensor, sampling: Sampling) -> Tensor:
    final = target.hidden_states(sequences, ()).final[:, -1]
    return target_probs(target.logits(final), sampling).double()


def laws(target: Target, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The joint law of the first two tokens, and the law of the third."""
    prompt, every = torch.tensor(PROMPT), torch.arange(VOCAB)
    first = next_law(target, prompt[None], sampling)[0]
    one = torch.cat([prompt.expand(VOCAB, -1), every[:, None]], dim=1)
    pairs = first[:, None] * next_law(target, one, sampling)
    two = torch.cat([one.repeat_interleave(VOCAB, dim=0), every.repeat(VOCAB)[:, None]], dim=1)
    return pairs, pairs.flatten() @ next_law(target, two, sampling)


def p_values(
    target: Target, draft: Draft | None, sampling: Sampling, engines: Engines = REFERENCE
) -> tuple[float, float]:
    """Of the first two tokens and of the third."""
    answers = generate_batch(
        target,
        draft,
        [PROMPT] * RUNS,
        max_new_tokens=3,
        sampling=sampling,
        generators=[seeded(run) for run in range(RUNS)],
        engines=engines,
    )
    if draft is not None:
        assert {done.accepted for one in answers for done in one.rounds} >= {0, 1, 2}
    tokens = torch.tensor([one.tokens for one in answers])
    pairs, third = laws(target, sampling)
    found = (tokens[:, 0] * VOCAB + tokens[:, 1]).bincount(minlength=VOCAB**2)
    return chi_square(found, pairs), chi_square(tokens[:, 2].bincount(minlength=VOCAB), third)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_answers_follow_the_targets_law(target: Target, name: str, sampling: Sampling):
    assert min(p_values(target, DRAFTS[name](target), sampling)) > 0.005


class Boastful(ReferenceEngines):
    """Proposes the likeliest tokens and claims to have drawn them."""

    def open_draft(self, draft: Draft, **options: Any) -> ReferenceDraft:
        engine = super().open_draft(draft, **options)
        honest = engine.propose

        def propose(tokens: Tensor, **asked: Any) -> Proposal:
            return Proposal(honest(tokens).tokens, honest(tokens, **asked).q)

        engine.propose = propose
        return engine


def test_the_test_of_the_law_can_fail(target: Target):
    for name in ("dflash", "dspine"):
        found = p_values(target, DRAFTS[name](target), SAMPLINGS[0], Boastful())
        assert min(found) < 1e-4


@pytest.mark.parametrize("name", DRAFTS)
def test_cold_sampling_is_greedy(target: Target, name: str):
    draft, listed = DRAFTS[name](target), prompts(6)
    cold = generate_batch(
        target,
        draft,
        listed,
        max_new_tokens=12,
        sampling=Sampling(1e-6),
        generators=[seeded(row) for row in range(6)],
    )
    greedy = generate_batch(target, draft, listed, max_new_tokens=12)
    assert [(one.tokens, one.rounds) for one in cold] == [(one.tokens, one.rounds) for one in greedy]


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_a_row_draws_the_same_whatever_its_neighbours(architecture: str):
    target, listed = tiny_target(stop_ids=(2, 9, 17)), prompts(5)
    draft, sampling = tiny_draft(target, architecture), Sampling(2.0, top_p=0.95)
    together = generate_batch(
        target,
        draft,
        listed,
        max_new_tokens=20,
        sampling=sampling,
        generators=[seeded(row) for row in range(5)],
    )
    for row, prompt in enumerate(listed):
        alone = generate(target, draft, prompt, max_new_tokens=20, sampling=sampling, generator=seeded(row))
        assert (alone.tokens, alone.rounds) == (together[row].tokens, together[row].rounds)
    assert len({len(one.tokens) for one in together}) > 1, "no row finished before another"
