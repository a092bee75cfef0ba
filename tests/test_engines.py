"""The registry of engines, and what fast engines share: prepared weights, refusals, and requests they never see."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import VOCAB, prompts, tiny_draft, tiny_target
from torch import nn

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.engines import ENGINES, engine
from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.fast_gpu import FastGpu
from dspine_probe.decoding.generate import generate, generate_batch
from dspine_probe.decoding.offline import simulate_rounds
from dspine_probe.decoding.reference import REFERENCE, ReferenceEngines
from dspine_probe.drafts.registry import KINDS, Kind
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

NEW = 8


@pytest.fixture(params=["cpu", "gpu"])
def fast(request: pytest.FixtureRequest) -> Engines:
    if request.param == "gpu":
        return FastGpu()
    engines = FastCpu(torch.float32)
    if engines.kernels is None:
        pytest.skip("no C compiler")
    return engines


def rounds(target: Target, draft: nn.Module | None, engines: Engines) -> list:
    listed = prompts(3)
    found = generate_batch(target, draft, listed, max_new_tokens=NEW, engines=engines)
    return [(one.tokens, one.rounds) for one in found]


# ---- registry


def test_engines_are_started_by_name_and_chosen_by_device():
    assert isinstance(engine("reference"), ReferenceEngines) and isinstance(engine("gpu"), FastGpu)
    assert isinstance(engine("auto"), FastCpu) and isinstance(engine("auto", "cuda"), FastGpu)
    assert isinstance(engine("auto", "meta"), ReferenceEngines)
    with pytest.raises(UsageError, match="engine 'fast' is unknown; use one of auto, reference, cpu, gpu"):
        engine("fast")


def test_every_engine_says_what_computes():
    assert all(engine(name).about["compute"] for name in ENGINES)
    assert engine("cpu", dtype=torch.float32).about.get("dtype") in ("torch.float32", None)
    assert "CUDA graphs need a CUDA device" in FastGpu().about["why not graphs"]


# ---- prepared weights


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_a_hook_set_after_packing_is_refused_at_the_next_start(fast: Engines, architecture: str):
    target = tiny_target(stop_ids=())
    draft = tiny_draft(target, architecture)
    before = rounds(target, draft, fast)
    gc.collect()
    for part in (target.model.base_model.layers[1], draft.blocks[0].mlp):
        for register in (part.register_forward_hook, part.register_forward_pre_hook):
            handle = register(lambda *_: None)
            with pytest.raises(UsageError, match="a hook is set on .*fast engine would run past it"):
                rounds(target, draft, fast)
            handle.remove()
    assert rounds(target, draft, fast) == before


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_weights_changed_after_packing_are_packed_again(fast: Engines, architecture: str):
    target = tiny_target(stop_ids=())
    draft, other = (tiny_draft(target, architecture, seed=seed) for seed in (1, 2))
    first = rounds(target, draft, fast)
    draft.load_state_dict(other.state_dict())
    second = rounds(target, draft, fast)
    assert second == rounds(target, other, REFERENCE) != first
    with torch.no_grad():
        for layer in target.model.base_model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
        draft.fc.weight = nn.Parameter(2 * draft.fc.weight)
    assert rounds(target, draft, fast) == rounds(target, draft, REFERENCE) != second


def test_weights_are_prepared_once_and_go_with_their_model(fast: Engines):
    target = tiny_target()
    draft = tiny_draft(target)
    made: list[str] = []
    for name, prepared in (("target", fast._targets), ("draft", fast._drafts)):
        make = prepared.make
        prepared.make = lambda model, make=make, name=name: (made.append(name), make(model))[1]
    rounds(target, draft, fast), rounds(target, draft, fast)
    assert made == ["target", "draft"]
    del target, draft
    gc.collect()
    assert len(fast._targets) == len(fast._drafts) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: setattr(t.config, "layer_types", ["sliding_attention"]), "sliding-window attention"),
        (lambda t: setattr(t.config, "hidden_act", "gelu"), "the activation 'gelu'"),
        (lambda t: setattr(t.model.config, "model_type", "gemma"), "the type 'gemma'"),
        (lambda t: setattr(t.config, "rope_parameters", {"rope_type": "dynamic"}), "a rope that depends"),
        (lambda t: setattr(t.config, "partial_rotary_factor", 0.5), "rotary embedding of 0.5 of each head"),
        (lambda t: setattr(t.model.model.layers[0].mlp.up_proj, "bias", nn.Parameter(torch.zeros(48))), "biases"),
    ],
)
def test_targets_of_another_build_are_refused(fast: Engines, change: Callable[[Target], None], named: str):
    target = tiny_target()
    change(target)
    with pytest.raises(UsageError, match=f"target 'tiny-llama' has .*{named}.* use the reference engine"):
        fast.open_target(target, taps=(), rows=1, capacity=8, width=1)


def test_kinds_of_drafts_that_fast_engines_do_not_know_are_refused(fast: Engines):
    draft = tiny_draft(tiny_target())
    draft.kind = Kind("toy", DFLASH, type(draft), KINDS["dflash"].objective)
    with pytest.raises(UsageError, match="do not compute drafts of the kind 'toy'"):
        fast.open_draft(draft, rows=1, capacity=8, width=5)


# ---- requests


@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
def test_prompts_may_be_tensors_and_arrays(dtype: torch.dtype):
    target = tiny_target(stop_ids=())
    draft = tiny_draft(target)
    expected = generate(target, draft, [5, 6, 7], max_new_tokens=NEW)
    given = torch.tensor([5, 6, 7], dtype=dtype)
    for prompt in (given, given.numpy(), (5, 6, 7), [*given]):
        found = generate(target, draft, prompt, max_new_tokens=NEW)
        assert (found.prompt_ids, found.rounds) == (expected.prompt_ids, expected.rounds)
        assert all(type(one) is int for one in found.prompt_ids)
    both = generate_batch(target, draft, given.expand(2, -1), max_new_tokens=NEW)
    assert [one.rounds for one in both] == [expected.rounds] * 2


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("5 6 7", "the prompt is text"),
        (b"567", "the prompt is text"),
        ([[5, 6, 7]], "the prompt is no flat sequence of whole numbers"),
        (torch.ones(2, 2, dtype=torch.long), "the prompt is no flat sequence"),
        (torch.ones(3), "the prompt is no flat sequence"),
        (np.array([0.5]), "the prompt is no flat sequence"),
        (["5"], "the prompt is no flat sequence"),
        (7, "the prompt is no flat sequence"),
        ([5, -1, 7], f"holds the token id -1, but the vocabulary has the ids 0…{VOCAB - 1}"),
        (torch.tensor([5, VOCAB]), f"holds the token id {VOCAB}"),
        (torch.tensor([], dtype=torch.long), "the prompt is empty"),
    ],
)
def test_prompts_that_are_no_token_ids_are_refused_in_a_sentence(prompt: object, named: str):
    target = tiny_target()
    for draft in (None, tiny_draft(target)):
        with pytest.raises(UsageError, match=named):
            generate(target, draft, prompt, max_new_tokens=NEW)


def test_a_batch_that_is_no_list_of_prompts_is_refused():
    target = tiny_target()
    for given, named in (("text", "prompts are text"), ([5, 6], "prompt 0 is no flat"), ([[5], [99]], "prompt 1")):
        with pytest.raises(UsageError, match=named):
            generate_batch(target, None, given, max_new_tokens=NEW)


def test_answers_to_simulate_hold_token_ids_with_a_state_each():
    target = tiny_target()
    draft = tiny_draft(target)

    def answer(ids: list[int], states: int | None = None) -> SimpleNamespace:
        taps = torch.zeros(len(ids) if states is None else states, 2 * target.hidden_size)
        return SimpleNamespace(tokens=torch.tensor(ids), prompt_length=1, taps=taps)

    good = answer([5, 6, 7])
    assert len(simulate_rounds(draft, [good])) == 1
    for answers, override, named in (
        ([good, answer([5, -1])], None, "answer 1 holds the token id -1"),
        ([good], [torch.tensor([5, VOCAB, 7])], f"the override of answer 0 holds the token id {VOCAB}"),
        ([good], [torch.tensor([5, 6])], "answer 0 has 3 tokens, states at 3 positions and 2 tokens"),
        ([answer([5, 6, 7], 2)], None, "answer 0 has 3 tokens, states at 2 positions"),
    ):
        with pytest.raises(UsageError, match=named):
            simulate_rounds(draft, answers, anchor_override=override)
    with pytest.raises(UsageError, match="wider than the 5"):
        simulate_rounds(draft, [good], width=6)


def test_states_seen_inside_generate_can_be_trained_on():
    target, seen = tiny_target(stop_ids=()), []
    handle = target.model.base_model.layers[1].register_forward_hook(lambda *a: seen.append(a[-1]))
    generate(target, None, [3, 4], max_new_tokens=3)
    handle.remove()
    probe = nn.Linear(target.hidden_size, 2)
    probe(seen[0]).sum().backward()
    assert probe.weight.grad is not None


FORKED = """
import multiprocessing, sys, torch
from tiny import tiny_target
from dspine_probe.decoding.generate import generate
from dspine_probe.errors import UsageError
torch.set_num_threads(2)
target = tiny_target()
generate(target, None, [3, 4], max_new_tokens=2)

def child(threads):
    torch.set_num_threads(threads)
    try:
        generate(target, None, [3, 4], max_new_tokens=2)
    except UsageError as error:
        sys.exit(9 if "get_context('spawn')" in str(error) else 8)

for threads in (2, 1):
    one = multiprocessing.get_context("fork").Process(target=child, args=(threads,))
    one.start()
    one.join(60)
    print(one.exitcode)
    one.kill()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")
def test_a_child_forked_after_threads_is_refused_instead_of_hanging():
    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, env=_path())
    assert ran.stdout.split() == ["9", "0"], ran.stderr[-500:]


def _path() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
