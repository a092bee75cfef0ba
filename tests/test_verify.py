"""Verification keeps what it must and no more, and leaves the target's distribution as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chance import chi_square
from torch import Tensor

from dspine_probe.decoding.verify import Verdict, target_probs, verify_greedy, verify_sampled
from dspine_probe.drafts.proposal import Candidates, Proposal
from dspine_probe.sampling import Sampling, pick

V, RUNS = 8, 60_000
Verifier = Callable[[Proposal, Tensor, Sampling, Tensor], Verdict]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_greedy_keeps_the_prefix_that_agrees():
    drafted = torch.tensor([[1, 2, 3], [9, 2, 3], [1, 9, 3], [1, 2, 9]])
    wanted = torch.tensor([[1, 2, 3, 4]] * 4)
    verdict = verify_greedy(drafted, wanted)
    assert verdict.accepted.tolist() == [3, 0, 1, 2] and verdict.bonus_token.tolist() == [4, 1, 2, 3]
    alone = verify_greedy(drafted[:, :0], wanted[:, :1])
    assert alone.accepted.tolist() == [0] * 4 and alone.bonus_token.tolist() == [1] * 4


class World:
    """A target whose scores follow the last token alone, and drafts of two slots that do too."""

    def __init__(self) -> None:
        self.p = 1.5 * torch.randn(V, V, generator=seeded(0))
        self.q = self.p + torch.randn(V, V, generator=seeded(1))

    def propose(self, kind: str) -> Proposal:
        """Blocks after token 0: drawn from all tokens, from the first five ids, or the likeliest."""
        size = 5 if kind == "narrow" else V
        chances = self.q[:, :size].softmax(dim=-1)
        before, tokens, given = torch.zeros(RUNS, dtype=torch.long), [], []
        noise = torch.rand(RUNS, 2, generator=seeded(2))
        for slot in range(2):
            given.append(chances[before])
            certain = kind == "certain"
            before = given[-1].argmax(dim=-1) if certain else pick(given[-1], noise[:, slot])
            tokens.append(before)
        q = Candidates(torch.arange(size).expand(RUNS, 2, -1), torch.stack(given, dim=1))
        return Proposal(torch.stack(tokens, dim=1), None if kind == "certain" else q)

    def p_values(self, verifier: Verifier, proposal: Proposal, sampling: Sampling) -> tuple[float, float]:
        """Of the first token, and of the second where it was drafted or drawn in the same round."""
        before = torch.cat([torch.zeros(RUNS, 1, dtype=torch.long), proposal.tokens], dim=1)
        noise = torch.rand(RUNS, 3, generator=seeded(3), dtype=torch.float64)
        verdict = verifier(proposal, self.p[before], sampling, noise)
        written = torch.cat([proposal.tokens, proposal.tokens[:, :1]], dim=1)
        written.scatter_(1, verdict.accepted[:, None], verdict.bonus_token[:, None])
        wanted = target_probs(self.p, sampling)
        first = chi_square(written[:, 0].bincount(minlength=V), wanted[0])
        both = written[verdict.accepted > 0]
        pairs = (both[:, 0] * V + both[:, 1]).bincount(minlength=V * V)
        share = both[:, 0].bincount(minlength=V).double() / len(both)
        return first, chi_square(pairs, share[:, None] * wanted)


SAMPLINGS = [Sampling(1.0), Sampling(0.6), Sampling(1.3, top_p=0.8)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("kind", ["wide", "narrow", "certain"])
def test_tokens_come_with_the_targets_probability(kind: str, sampling: Sampling):
    world = World()
    assert min(world.p_values(verify_sampled, world.propose(kind), sampling)) > 0.005


def redrawn(proposal: Proposal, scores: Tensor, sampling: Sampling, noise: Tensor) -> Verdict:
    """Puts a fresh draw from p behind what stands, in place of the uncovered part."""
    verdict = verify_sampled(proposal, scores, sampling, noise)
    p = target_probs(scores, sampling)
    return Verdict(verdict.accepted, pick(p[torch.arange(RUNS), verdict.accepted], noise[:, -1]))


def trusting(proposal: Proposal, scores: Tensor, sampling: Sampling, noise: Tensor) -> Verdict:
    """Verifies the likeliest tokens as if they had been drawn from the draft's distribution."""
    world = World()
    before = torch.cat([torch.zeros(RUNS, 1, dtype=torch.long), proposal.tokens[:, :1]], dim=1)
    q = Candidates(torch.arange(V).expand(RUNS, 2, -1), world.q.softmax(dim=-1)[before])
    return verify_sampled(Proposal(proposal.tokens, q), scores, sampling, noise)


@pytest.mark.parametrize("wrong, kind", [(redrawn, "wide"), (redrawn, "certain"), (trusting, "certain")])
def test_near_misses_are_found_out(wrong: Verifier, kind: str):
    world = World()
    assert min(world.p_values(wrong, world.propose(kind), Sampling(1.0))) < 1e-6


def test_what_the_target_would_draw_itself_always_stands():
    scores = torch.randn(500, 3, V, generator=seeded(4))
    probs = scores.softmax(dim=-1)
    tokens = pick(probs[:, :2], torch.rand(500, 2, generator=seeded(5)))
    same = Proposal(tokens, Candidates(torch.arange(V).expand(500, 2, -1), probs[:, :2]))
    noise = torch.rand(500, 3, generator=seeded(6), dtype=torch.float64)
    assert verify_sampled(same, scores, Sampling(1.0), noise).accepted.eq(2).all()


def test_a_token_that_the_target_never_writes_falls():
    scores = torch.tensor([[[0.0, -torch.inf], [0.0, 0.0]]])
    for noise in (torch.zeros(1, 2), torch.full((1, 2), 0.999)):
        verdict = verify_sampled(Proposal(torch.tensor([[1]])), scores, Sampling(1.0), noise)
        assert verdict.accepted.tolist() == [0] and verdict.bonus_token.tolist() == [0]


def test_cold_sampling_is_greedy():
    scores = torch.randn(200, 4, V, generator=seeded(7))
    drafted = scores[:, :3].argmax(dim=-1)
    drafted[::3, 1] = 0
    noise = torch.rand(200, 4, generator=seeded(8))
    cold = verify_sampled(Proposal(drafted), scores, Sampling(1e-6), noise)
    greedy = verify_greedy(drafted, scores.argmax(dim=-1))
    assert torch.equal(cold.accepted, greedy.accepted) and torch.equal(cold.bonus_token, greedy.bonus_token)
