"""Where answers part is found, measured by the judge, and called a near-tie only if it is one."""

import pytest
import torch
from tiny import prompts, tiny_draft, tiny_target

from benchmarks.divergence import NEAR, Divergence, divergence_at, first_divergences
from dspine_probe.config import DSPINE
from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.generate import generate
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.prompts import load_prompts
from dspine_probe.target import Target


def test_the_first_difference_is_found():
    assert divergence_at([4, 5, 6], [4, 5, 6]) is None
    assert divergence_at([4, 5, 6], [4, 7, 6]) == 1
    assert divergence_at([9], [8, 7]) == 0


def test_equal_answers_do_not_part():
    target, listed = tiny_target(), prompts(4)
    answers = [generate(target, None, p, max_new_tokens=6).tokens for p in listed]
    assert first_divergences(target, listed, answers, answers, judge=REFERENCE) == []


def test_a_wrong_token_is_measured_where_it_stands():
    target, prompt = tiny_target(stop_ids=()), [3, 4, 5]
    right = generate(target, None, prompt, max_new_tokens=6).tokens
    wrong = (*right[:4], (right[4] + 1) % 64, right[5])
    (found,) = first_divergences(target, [prompt], [right], [wrong], judge=REFERENCE)
    states = target.hidden_states(torch.tensor([[*prompt, *right[:4]]]), ()).final
    scores = target.logits(states)[0, -1]
    assert (found.prompt, found.at, found.expected, found.found) == (0, 4, right[4], wrong[4])
    assert found.margin == pytest.approx(float(scores[right[4]] - scores[wrong[4]]), abs=1e-4)
    assert found.margin > 0 and found.near_tie == (found.steps <= NEAR)


def test_steps_are_those_of_bfloat16():
    ulp = float(torch.tensor(17.0, dtype=torch.bfloat16).nextafter(torch.tensor(18.0, dtype=torch.bfloat16))) - 17
    near = Divergence(prompt=0, at=0, expected=1, found=2, margin=-2 * ulp, step=0.125)
    assert ulp == near.step and near.steps == 2 and near.near_tie
    assert not Divergence(prompt=0, at=0, expected=1, found=2, margin=3 * ulp, step=ulp).near_tie


@pytest.mark.embedded
def test_in_bfloat16_answers_part_at_near_ties_alone():
    target = Target.load(dtype=torch.bfloat16)
    draft = tiny_draft(target, DSPINE)
    listed = [target.encode_chat(prompt.text) for prompt in load_prompts("lab")[::24]]
    exact, rounded = FastCpu(torch.float32), FastCpu(torch.bfloat16)
    expected = [generate(target, None, p, max_new_tokens=16, engines=exact).tokens for p in listed]
    found = [generate(target, draft, p, max_new_tokens=16, engines=rounded).tokens for p in listed]
    parted = first_divergences(target, listed, expected, found, judge=exact)
    assert len(parted) < len(listed) and all(one.near_tie for one in parted)
