"""Steps of fixed shape and the GPU engines, on the CPU: torch instead of kernels, and in place of graphs a stand-in.

Like a graph it fixes addresses: every replay writes into the tensors that the capture returned.
"""

import gc

import pytest
import torch
from tiny import prompts, tiny_draft, tiny_target
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.fast_gpu import FastGpu
from dspine_probe.decoding.generate import generate, generate_batch
from dspine_probe.decoding.graphs import Capturing, FixedStep, capturing, frozen, refuse_hooked
from dspine_probe.errors import UsageError
from dspine_probe.hooks import HookedDraft
from dspine_probe.sampling import Sampling

NEW = 16


def overwriting(run):
    """A capture whose outputs stay where they are."""
    outputs = run()

    def replay() -> None:
        for kept, fresh in zip(outputs, run(), strict=True):
            if 0 not in kept.stride():  # an expanded constant
                kept.copy_(fresh)

    return replay, outputs


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
    follower = FixedStep(lambda: (torch.ones(1),), Capturing(overwriting), source=step)
    for _ in range(2):
        assert step(x=torch.zeros(1))[0].tolist() == [1]
        follower()
    assert step.reason == "the capture failed: operation not permitted when stream is capturing"
    assert follower.reason is not None and "the step before it is not captured" in follower.reason


def test_a_lack_of_memory_is_not_taken_for_a_failed_capture():
    def exhausted(run):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        FixedStep(lambda x: (x,), Capturing(exhausted))(x=torch.zeros(1))


# ---- engines


@pytest.mark.parametrize("capture", [None, Capturing(overwriting)], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_fp32_everything_is_as_in_the_reference(kind: str, capture: Capturing | None):
    target, engines = tiny_target(kind, stop_ids=(2, 9, 17)), FastGpu(capture)
    drafts = [(DFLASH, None), (DFLASH, 40), (DSPINE, None), (DSPINE, 40)]
    listed = prompts(5)
    for draft in [None, *(tiny_draft(target, name, trimmed=size) for name, size in drafts)]:
        expected = generate_batch(target, draft, listed, max_new_tokens=NEW)
        together = generate_batch(target, draft, listed, max_new_tokens=NEW, engines=engines)
        alone = [generate(target, draft, p, max_new_tokens=NEW, engines=engines) for p in listed[:2]]
        assert [(f.tokens, f.rounds) for f in together] == [(r.tokens, r.rounds) for r in expected]
        assert [f.rounds for f in alone] == [r.rounds for r in expected[:2]]


@pytest.mark.parametrize("capture", [None, Capturing(overwriting)], ids=["eager", "captured"])
@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_sampled_answers_draw_as_the_reference_does(architecture: str, capture: Capturing | None):
    target = tiny_target(stop_ids=(9,))
    draft, listed = tiny_draft(target, architecture, trimmed=40), prompts(5)
    found = [
        generate_batch(
            target,
            draft,
            listed,
            max_new_tokens=NEW,
            sampling=Sampling(temperature=0.8),
            generators=[torch.Generator().manual_seed(seed) for seed in range(len(listed))],
            **chosen,
        )
        for chosen in ({}, {"engines": FastGpu(capture)})
    ]
    assert [f.rounds for f in found[0]] == [f.rounds for f in found[1]]


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
    read.rows.open(2), write.rows.open(2)
    anchors, ends, noise = torch.tensor([3, 4]), torch.tensor([7, 9]), torch.rand(2, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):  # raises where a value would have to be known
        taps = read._verify(torch.zeros(2, 5, dtype=torch.long), ends)[2]
        write._context(taps, ends)
        write._block(anchors, ends)
        write._greedy_head()
        write._sampled_head(noise, 0.7)


def test_a_cache_that_is_too_small_and_a_block_too_wide_are_refused():
    target = tiny_target()
    engines, draft = FastGpu(), tiny_draft(target)
    small = engines.open_target(target, taps=(), rows=1, capacity=8, width=1)
    small.start([[3, 4, 5]])
    with pytest.raises(UsageError, match="3 tokens and 6 more do not fit a cache of 8 positions"):
        small.read(torch.zeros(1, 6, dtype=torch.long))
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


def test_a_target_with_biases_or_another_activation_is_refused():
    target = tiny_target()
    target.config.hidden_act = "gelu"
    with pytest.raises(UsageError, match="activation 'gelu'"):
        FastGpu().open_target(target, taps=(), rows=1, capacity=8, width=1)
    target.config.hidden_act = "silu"
    target.model.model.layers[0].mlp.up_proj.bias = torch.nn.Parameter(torch.zeros(48))
    with pytest.raises(UsageError, match="has biases"):
        FastGpu().open_target(target, taps=(), rows=1, capacity=8, width=1)


def test_models_are_let_go_with_the_caller():
    target = tiny_target()
    engines = FastGpu()
    generate(target, tiny_draft(target), [3, 4], max_new_tokens=4, engines=engines)
    del target
    gc.collect()
    assert len(engines._targets) == 0 and len(engines._drafts) == 0
