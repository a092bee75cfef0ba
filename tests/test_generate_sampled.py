"""Sampled decoding: answers follow the target's distribution, whatever drafts; rows draw from their own generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chance import chi_square
from tiny import SIZES, prompts, tiny_draft, tiny_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.generate import generate, generate_batch
from dspine_probe.decoding.reference import REFERENCE, ReferenceDraft, ReferenceEngines
from dspine_probe.decoding.verify import target_probs
from dspine_probe.drafts import Draft
from dspine_probe.drafts.proposal import Proposal
from dspine_probe.sampling import Sampling, generators
from dspine_probe.target import Target

RUNS, PROMPT, FEW = 1500, [5, 10, 11], 12
# Warm enough that random drafts are believed now and then.
SAMPLINGS = [Sampling(2.0), Sampling(3.0, top_p=0.9), Sampling(2.0, draft_temperature=0.0)]
DRAFTS = {"plain": None, "dflash": {}, "dspine": {}, "trimmed": {"trimmed": 7}}


@pytest.fixture(scope="module")
def target() -> Target:
    """Of few tokens, so that pairs of them can be counted."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": FEW}, tie_word_embeddings=True))
    return Target.from_model(model, stop_ids=())


def make(name: str, target: Target) -> Draft | None:
    options = DRAFTS[name]
    architecture = DFLASH if name == "dflash" else DSPINE
    return None if options is None else tiny_draft(target, architecture, mask_token_id=FEW - 1, **options)


def distributions(target: Target, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The joint distributions of the first two tokens and of the last two of three."""
    every = torch.arange(FEW)
    sequences, chances = torch.tensor([PROMPT]), []
    for _ in range(3):
        final = target.hidden_states(sequences, ()).final[:, -1]
        chances.append(target_probs(target.logits(final), sampling).double())
        ends = every.repeat(len(sequences))[:, None]
        sequences = torch.cat([sequences.repeat_interleave(FEW, dim=0), ends], dim=1)
    pairs = chances[0].T * chances[1]
    return pairs, (pairs[..., None] * chances[2].view(FEW, FEW, FEW)).sum(dim=0)


def p_values(target: Target, draft: Draft | None, sampling: Sampling, engines: Engines = REFERENCE) -> list[float]:
    """Of the first two tokens and of the last two of three."""
    answers = generate_batch(
        target,
        draft,
        [PROMPT] * RUNS,
        max_new_tokens=3,
        sampling=sampling,
        generators=generators(0, RUNS),
        engines=engines,
    )
    if draft is not None:
        assert {done.accepted for one in answers for done in one.rounds} >= {0, 1}
    tokens = torch.tensor([one.tokens for one in answers])
    pairs = (tokens[:, :-1] * FEW + tokens[:, 1:]).T
    return [
        chi_square(found.bincount(minlength=FEW**2), expected)
        for found, expected in zip(pairs, distributions(target, sampling), strict=True)
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_answers_follow_the_targets_distribution(target: Target, name: str, sampling: Sampling):
    assert min(p_values(target, make(name, target), sampling)) > 0.005


class Boastful(ReferenceEngines):
    """Proposes the likeliest tokens and claims to have drawn them."""

    def open_draft(self, draft: Draft, **options: Any) -> ReferenceDraft:
        engine = super().open_draft(draft, **options)
        honest = engine.propose

        def propose(tokens: Tensor, **asked: Any) -> Proposal:
            return Proposal(honest(tokens).tokens, honest(tokens, **asked).q)

        engine.propose = propose
        return engine


def test_the_test_of_the_distribution_can_fail(target: Target):
    for name in ("dflash", "dspine"):
        found = p_values(target, make(name, target), SAMPLINGS[0], Boastful())
        assert min(found) < 1e-4


@pytest.mark.parametrize("name", DRAFTS)
def test_cold_sampling_is_greedy(target: Target, name: str):
    draft, listed = make(name, target), [PROMPT[:size] for size in (1, 2, 3, 1)]
    cold = generate_batch(
        target, draft, listed, max_new_tokens=12, sampling=Sampling(1e-6), generators=generators(0, 4)
    )
    greedy = generate_batch(target, draft, listed, max_new_tokens=12)
    assert [(one.tokens, one.rounds) for one in cold] == [(one.tokens, one.rounds) for one in greedy]


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_a_row_draws_the_same_whatever_its_neighbours(architecture: str):
    target, listed = tiny_target(stop_ids=(2, 9, 17)), prompts(5)
    draft, sampling = tiny_draft(target, architecture), Sampling(2.0, top_p=0.95)
    together = generate_batch(target, draft, listed, max_new_tokens=20, sampling=sampling, generators=generators(0, 5))
    for row, prompt in enumerate(listed):
        alone = generate(target, draft, prompt, max_new_tokens=20, sampling=sampling, generator=generators(0, 5)[row])
        assert (alone.tokens, alone.rounds) == (together[row].tokens, together[row].rounds)
    assert len({len(one.tokens) for one in together}) > 1, "no row finished before another"
