import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted_kernels import DRAWS, PROBLEMS, K
from toy import toy_draft

from benchmarks.gpu.checks import BOUNDS, COMPARISONS, check_kernels
from benchmarks.gpu.gru import GRUHead, gru_step
from benchmarks.gpu.problem import ODD, Problem
from dspine_probe.decoding.kernels import injection
from dspine_probe.decoding.kernels.candidates import top_candidates
from dspine_probe.decoding.kernels.injection import fold
from dspine_probe.decoding.kernels.last_write import Pairs, Refiner, pair_parts
from dspine_probe.decoding.kernels.launch import block, pow2, usable
from dspine_probe.decoding.kernels.walk import walk
from dspine_probe.drafts import DSpine
from dspine_probe.drafts.block import BlockStates

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted() -> dict:
    """What the kernels gave in Triton's interpreter."""
    script = Path(__file__).with_name("interpreted_kernels.py")
    path = os.pathsep.join([str(script.parents[1]), str(script.parent)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_kernel_computes_what_its_reference_does_in_float64(interpreted, problem):
    checks = interpreted["errors"][problem]
    assert [check["kernel"] for check in checks] == list(PROBLEMS[problem][2])
    assert all(check["by"] == "triton" for check in checks)
    assert [check for check in checks if not check["passed"]] == []


def test_a_sampled_walk_follows_the_distribution_of_its_table(interpreted):
    drawn = interpreted["distribution"]
    expected, found = (torch.tensor(drawn[name], dtype=torch.float64) for name in ("expected", "found"))
    assert found.sum() == DRAWS
    assert (found / DRAWS - expected).abs().sum() / 2 < 0.01
    chi_square = ((found - DRAWS * expected) ** 2 / (DRAWS * expected)).sum()
    assert chi_square < 54.05  # 99.9 % quantile at 26 degrees of freedom
    assert len(expected) == K**3


@pytest.mark.parametrize("case", ["walk", "candidates", "markov", "minus infinity"])
def test_ties_go_to_the_lower_index(interpreted, case):
    given, expected = interpreted["ties"][case]
    assert given == expected


@pytest.mark.parametrize("case", ["never one of weight 0", "lowest and highest", "usable"])
def test_the_ends_of_the_unit_interval_and_unfit_tensors(interpreted, case):
    assert interpreted["extremes"][case]


# ---- torch alone: the references are the drafts' own arithmetic


def folded(draft: DSpine, layer: int) -> Refiner:
    norm = draft.ln_final
    return Refiner(fold(draft.injection, draft.codes)[layer], norm.weight.detach(), norm.eps, draft.head)


def test_a_folded_injection_is_the_drafts_own():
    draft = toy_draft("dspine")
    h, anchors = torch.randn(3, 4, 16), torch.tensor([3, 0, 31])
    for layer in range(len(draft.blocks)):
        out, _ = injection.inject(h.flatten(0, 1), anchors, folded(draft, layer).weights)
        expected = draft.inject(layer, h, draft.message_codes(anchors, h.dtype)[:, None])
        torch.testing.assert_close(out.view_as(h), expected)
        assert torch.equal(out.view_as(h)[:, 0], h[:, 0])
        assert (out.view_as(h)[:, 1:] - h[:, 1:]).norm(dim=-1).min() > 0.01


@pytest.mark.parametrize("trimmed", [None, 20])
@torch.no_grad()
def test_pair_scores_and_walks_are_those_of_the_transition_cache(trimmed):
    vocabulary = None if trimmed is None else torch.randperm(32)[:trimmed].sort().values
    draft = toy_draft("dspine", vocabulary=vocabulary)
    h, anchors = torch.randn(3, 4, 16), torch.tensor([3, 0, 31])
    last = len(draft.blocks) - 1
    refiner = folded(draft, last)
    hidden = draft.ln_final(draft.inject(last, h, draft.message_codes(anchors, h.dtype)[:, None]))
    cache = draft.transition_cache(BlockStates((), h, hidden), anchors)
    index = top_candidates(draft.logits(hidden[:, 1:]), draft.spine.top_k)
    assert torch.equal(draft.to_tokens(index), cache.candidates)
    flat = h.flatten(0, 1)
    pairs = Pairs(cache.candidates, index, anchors)
    parts = pair_parts(flat, injection.read(flat, refiner.weights), pairs, refiner)
    torch.testing.assert_close(parts.scores(), cache.scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(walk(parts, cache.candidates).tokens, cache.walk_greedy())
    noise = torch.rand(3, 3)
    sampled = walk(parts, cache.candidates, temperature=0.7, noise=noise)
    tokens, probs = cache.walk_sampled(0.7, noise)
    assert torch.equal(sampled.tokens, tokens)
    torch.testing.assert_close(sampled.q.probs, probs, rtol=1e-3, atol=1e-4)


def test_the_gru_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    gru = torch.nn.GRU(7, 9, bias=False)
    embedding = torch.randn(11, 7, generator=generator)
    token, state = torch.tensor([2, 10, 4]), torch.randn(3, 9, generator=generator)
    unused = torch.empty(0)
    head = GRUHead(embedding @ gru.weight_ih_l0.T, gru.weight_hh_l0, unused, unused, unused)
    expected = gru(embedding[token][None], state[None])[0][0]
    torch.testing.assert_close(gru_step(state, token, head), expected)


def test_without_a_gpu_and_the_interpreter_torch_computes():
    problem = Problem.make(ODD, torch.float32, "cpu", torch.Generator().manual_seed(0))
    assert not usable(problem.h)
    checks = check_kernels(problem)
    assert all(check.by == "torch" for check in checks)
    assert all(check.passed for check in checks)


def test_a_check_notices_a_wrong_kernel(monkeypatch):
    problem = Problem.make(ODD, torch.float32, "cpu", torch.Generator().manual_seed(0))
    weights = problem.refiner.weights
    wrong, honest = replace(weights, read=weights.read.bfloat16().float()), injection.read

    def careless(h, weights):
        return honest(h, wrong if h.dtype == torch.float32 else weights)

    monkeypatch.setattr(injection, "read", careless)
    assert COMPARISONS["injection"](problem) > 10 * BOUNDS[torch.float32]


def test_block_sizes():
    assert [pow2(n) for n in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
    assert [block(n, 64) for n in (3, 16, 20, 576)] == [16, 16, 32, 64]
