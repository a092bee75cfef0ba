"""Steps of fixed shape and the GPU engines, on the CPU: torch instead of kernels, and in place of graphs a stand-in.

Like a graph it fixes addresses: every replay writes into the tensors that the capture returned.
"""

import gc

import pytest
import torch
from stand_in_graphs import overwriting
from tiny import prompts, tiny_draft, tiny_target
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.fast_gpu import FastGpu
from dspine_probe.decoding.generate import generate_batch
from dspine_probe.decoding.graphs import Capturing, FixedStep, capturing, frozen
from dspine_probe.decoding.prepared import refuse_hooked
from dspine_probe.errors import UsageError
from dspine_probe.hooks import HookedDraft

NEW = 16


def failing(run):
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


# ---- steps


def test_without_a_device_a_step_runs_eagerly_and_says_why():
    how = capturing(torch.device("cpu"))
    step = FixedStep(lambda x: (x + 1,), how)
    assert step(x=torch.ones(2))[0].tolist() == [2, 2]
    assert step(x=torch.zeros(2))[0].tolist() == [1, 1]
    assert not step.captured
    assert step.reason == "CUDA graphs need a CUDA device, and the weights are on cpu"


def test_a_step_copies_values_into_buffers_of_its_own_and_overwrites_its_outputs():
    step = FixedStep(lambda x: (2 * x,), Capturing(overwriting))
    value = torch.ones(3)
    first = step(x=value)[0]
    assert step.captured and step.reason is None
    assert step.buffers["x"].data_ptr() != value.data_ptr()
    second = step(x=torch.full((3,), 4.0))[0]
    assert second.data_ptr() == first.data_ptr()
    assert first.tolist() == [8, 8, 8]
    assert value.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"x": torch.ones(3, 1)}, "x has shape"),
        ({"x": torch.ones(3).long()}, "x has dtype"),
        ({"x": torch.ones(3, device="meta")}, "x has device"),
        ({"y": torch.ones(3)}, r"takes \['x'\], but was given \['y'\]"),
        ({}, "was given"),
    ],
)
def test_values_of_another_kind_are_refused(changed: dict[str, Tensor], named: str):
    step = FixedStep(lambda x: (2 * x,), Capturing(overwriting))
    step(x=torch.ones(3))
    with pytest.raises(UsageError, match=named):
        step(**changed)


def test_a_capture_that_fails_leaves_an_eager_step_with_the_reason():
    step = FixedStep(lambda x: (x + 1,), Capturing(failing))
    follower = FixedStep(lambda x: (x + 1,), Capturing(overwriting), source=step)
    for _ in range(2):
        assert step(x=torch.zeros(1))[0].tolist() == [1]
        assert follower()[0].tolist() == [2]
    assert step.reason == "the capture failed: operation not permitted when stream is capturing"
    assert follower.reason is not None and "the step before it is not captured" in follower.reason


def test_a_lack_of_memory_is_not_taken_for_a_failed_capture():
    def exhausted(run):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        FixedStep(lambda x: (x,), Capturing(exhausted))(x=torch.zeros(1))


# ---- engines


def test_a_prompt_longer_than_a_piece_is_read_whole():
    target, draft = tiny_target(), tiny_draft(tiny_target(), DSPINE)
    long = (prompts(1)[0] * 100)[:150]
    listed = [long, long[:64], long[:65], long[:3]]
    expected = generate_batch(target, draft, listed, max_new_tokens=6)
    found = generate_batch(target, draft, listed, max_new_tokens=6, engines=FastGpu())
    assert [(f.tokens, f.rounds) for f in found] == [(r.tokens, r.rounds) for r in expected]


@torch.inference_mode()
def test_no_step_asks_the_device_for_a_number():
    target = tiny_target()
    draft, engines = tiny_draft(target, DSPINE), FastGpu()
    read = engines.open_target(target, taps=(0, 2), rows=2, capacity=40, width=5)
    write = engines.open_draft(draft, rows=2, capacity=40, width=5)
    read.set_lengths([0, 0])
    anchors, ends, noise = torch.tensor([3, 4]), torch.tensor([7, 9]), torch.rand(2, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):  # raises where a value would have to be known
        taps = read._verify(torch.zeros(2, 5, dtype=torch.long), ends)[2]
        write._context(taps, ends)
        trunk = write._block(anchors, ends)
        write._head(*trunk)
        write._head(*trunk, noise=noise, temperature=0.7)


def test_a_cache_that_is_too_small_and_a_block_too_wide_are_refused():
    target = tiny_target()
    engines, draft = FastGpu(), tiny_draft(target)
    small = engines.open_target(target, taps=(), rows=1, capacity=8, width=1)
    small.prefill([[3, 4, 5]])
    with pytest.raises(UsageError, match="3 tokens and 6 more do not fit a cache of 8 positions"):
        small.forward(torch.zeros(1, 6, dtype=torch.long))
    with pytest.raises(UsageError, match="6 slots is wider than the 5"):
        engines.open_draft(draft, rows=1, capacity=8, width=6)


# ---- hooks


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_a_draft_with_hooks_is_refused_and_without_them_taken(architecture: str):
    target = tiny_target()
    draft = tiny_draft(target, architecture)
    with HookedDraft(draft) as hooked:
        engines = FastGpu()
        engines.open_draft(draft, rows=1, capacity=8, width=5)
        gc.collect()
        with (
            hooked.hooks([("blocks.0.hook_resid_post", lambda x, hook: None)]),
            pytest.raises(UsageError, match="a hook is set on blocks.0.hook_resid_post"),
        ):
            engines.open_draft(draft, rows=1, capacity=8, width=5)


def test_while_an_engine_runs_past_a_drafts_modules_hooking_it_is_refused():
    target = tiny_target()
    draft, engines = tiny_draft(target, DSPINE), FastGpu()
    first = engines.open_draft(draft, rows=1, capacity=8, width=5)
    second = engines.open_draft(draft, rows=1, capacity=8, width=5)
    for engine in (first, second):
        with pytest.raises(UsageError, match="graph-captured"):
            HookedDraft(draft)
        assert engine is not None
    del first, engine
    gc.collect()
    with pytest.raises(UsageError, match="graph-captured"):
        HookedDraft(draft)
    del second
    gc.collect()
    with HookedDraft(draft):
        pass


def test_a_hooked_target_is_refused():
    target = tiny_target()
    handle = target.model.model.layers[1].register_forward_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="a hook is set on model.layers.1 of target 'tiny-llama'"):
        FastGpu().open_target(target, taps=(), rows=1, capacity=8, width=1)
    handle.remove()
    refuse_hooked(target.model, "it")


def test_freezing_leaves_a_module_as_it_was():
    class Owner:
        pass

    module, owner = torch.nn.Linear(2, 2), Owner()
    before = set(vars(module))
    frozen(module, owner)
    assert "forward" in vars(module) and module(torch.ones(2)).shape == (2,)
    del owner
    gc.collect()
    assert set(vars(module)) == before
