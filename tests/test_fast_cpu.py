"""Fast CPU decoding: the reference's tokens in fp32, its own plain tokens in bfloat16, in C and in torch alike."""

import subprocess
from functools import partial

import pytest
import torch
from tiny import VOCAB, prompts, tiny_draft, tiny_target
from torch import nn

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.cpu import build
from dspine_probe.decoding.cpu.build import NotBuilt
from dspine_probe.decoding.cpu.compute import MAX_ROWS, Compute
from dspine_probe.decoding.cpu.native import NativeCompute
from dspine_probe.decoding.cpu.torch_compute import TorchCompute
from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.generate import generate, generate_batch
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.errors import UsageError
from dspine_probe.sampling import Sampling

NEW = 16
DRAFTS = [(DFLASH, None), (DFLASH, 40), (DSPINE, None), (DSPINE, 40)]


def native_or_skip(dtype: torch.dtype = torch.float32) -> Compute:
    """Kernels, unless there is no compiler; one that fails on our sources is a failure."""
    try:
        return NativeCompute(dtype)
    except NotBuilt as fault:
        if "no C compiler" not in str(fault):
            raise
        pytest.skip(str(fault))


@pytest.fixture(params=["native", "torch"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param == "native":
        native_or_skip()
    return request.param == "native"


# ---- tokens


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_fp32_everything_is_as_in_the_reference(kind: str, native: bool):
    target, engines = tiny_target(kind, stop_ids=(2, 9, 17)), FastCpu(torch.float32, native=native)
    drafts = [None, *(tiny_draft(target, name, trimmed=size) for name, size in DRAFTS)]
    listed = prompts(8)
    for draft in drafts:
        expected = generate_batch(target, draft, listed, max_new_tokens=NEW)
        together = generate_batch(target, draft, listed, max_new_tokens=NEW, engines=engines)
        alone = [generate(target, draft, p, max_new_tokens=NEW, engines=engines) for p in listed]
        for reference, *found in zip(expected, together, alone, strict=True):
            assert all((f.tokens, f.rounds) == (reference.tokens, reference.rounds) for f in found)


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_sampled_answers_draw_as_the_reference_does(architecture: str, native: bool):
    target, engines = tiny_target(stop_ids=()), FastCpu(torch.float32, native=native)
    draft = tiny_draft(target, architecture, trimmed=40)
    for seed, prompt in enumerate(prompts(6)):
        found = [
            generate(
                target,
                draft,
                prompt,
                max_new_tokens=NEW,
                sampling=Sampling(temperature=0.8),
                generator=torch.Generator().manual_seed(seed),
                engines=chosen,
            )
            for chosen in (REFERENCE, engines)
        ]
        assert found[0].rounds == found[1].rounds and found[0].tokens == found[1].tokens


def test_bfloat16_answers_do_not_depend_on_the_draft_or_the_batch():
    native_or_skip()
    for kind in ("llama", "qwen3"):
        target, engines = tiny_target(kind, stop_ids=(2, 9)), FastCpu(torch.bfloat16, native=True)
        listed = prompts(8)
        plain = [generate(target, None, p, max_new_tokens=NEW, engines=engines).tokens for p in listed]
        for name, size in DRAFTS:
            draft = tiny_draft(target, name, trimmed=size)
            found = generate_batch(target, draft, listed, max_new_tokens=NEW, engines=engines)
            assert [f.tokens for f in found] == plain


# ---- caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_read_to_the_same_bits_alone_in_a_block_and_beside_others(dtype: torch.dtype):
    native_or_skip()
    target, engines = tiny_target("qwen3"), FastCpu(dtype, native=True)
    tokens = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    together = opened(engines, target, rows=3)
    together.start([[5, 6, 7], [8], [9, 10]])
    block, taps = together.read(tokens), together.taps
    alone = opened(engines, target)
    alone.start([[8]])
    for at in range(9):
        assert torch.equal(alone.read(tokens[1:2, at : at + 1])[0, 0], block[1, at])
        assert torch.equal(alone.taps[0, 0], taps[1, at])
        alone.keep([1])


def test_what_was_rolled_back_leaves_no_trace(native: bool):
    target, engines = tiny_target(), FastCpu(torch.float32, native=native)
    wanted, rolled = opened(engines, target), opened(engines, target)
    wanted.start([[4, 5, 6, 7, 8]])
    rolled.start([[4, 5, 6]])
    rolled.read(torch.tensor([[7, 60, 61, 62, 59]]))
    rolled.keep([1])
    rolled.read(torch.tensor([[50, 51]]))
    rolled.keep([0])
    rolled.greedy(torch.tensor([[8, 33]]))
    rolled.keep([1])
    after = torch.tensor([[11, 12]])
    torch.testing.assert_close(rolled.read(after), wanted.read(after), atol=1e-4, rtol=1e-4)


def test_a_prompt_longer_than_one_call_takes_is_read_whole(native: bool):
    target, engines = tiny_target(), FastCpu(torch.float32, native=native)
    prompt = torch.randint(3, VOCAB, (MAX_ROWS + 37,), generator=torch.Generator().manual_seed(2)).tolist()
    for draft in (None, tiny_draft(target, DSPINE)):
        expected, found = (
            generate(target, draft, prompt, max_new_tokens=NEW, engines=e) for e in (REFERENCE, engines)
        )
        assert (found.tokens, found.rounds) == (expected.tokens, expected.rounds)


def test_taps_are_those_of_the_target(native: bool):
    target, engines = tiny_target(), FastCpu(torch.float32, native=native)
    engine = opened(engines, target)
    engine.start([[3, 4, 5, 6]])
    expected = target.hidden_states(torch.tensor([[3, 4, 5, 6]]), (0, 2)).taps
    torch.testing.assert_close(engine.taps, expected, atol=1e-4, rtol=1e-4)


def opened(engines: FastCpu, target, *, rows: int = 1, capacity: int = 40):
    return engines.open_target(target, taps=(0, 2), rows=rows, capacity=capacity, width=9)


# ---- computes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_any_shape(dtype: torch.dtype):
    compute, generator = native_or_skip(dtype), torch.Generator().manual_seed(3)
    plain = TorchCompute(torch.float32)
    for outputs, inputs, rows in [(1, 2, 1), (31, 6, 3), (33, 64, 8), (100, 30, 9), (64, 46, 40)]:
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype).float()
        x = torch.randn(rows, inputs, generator=generator).to(dtype).float()
        gain = torch.rand(inputs, generator=generator)
        packed, expected = compute.matrix(weight), plain.matrix(weight)
        torch.testing.assert_close(
            compute.product(x, packed), plain.product(x, expected), atol=1e-4, rtol=1e-4
        )
        tolerance = 1e-4 if dtype == torch.float32 else 0.05 * inputs**0.5
        normed = compute.product(x, packed, gain=gain, eps=1e-5)
        wanted = plain.product(x, expected, gain=gain, eps=1e-5)
        torch.testing.assert_close(normed, wanted, atol=tolerance, rtol=1e-4)
        k = min(outputs, 5)
        found = compute.best(x, packed, k, gain=gain, eps=1e-5)
        torch.testing.assert_close(normed.gather(1, found), normed.topk(k).values, atol=0, rtol=0)


def test_the_lowest_of_equal_scores_comes_first(native: bool):
    compute = NativeCompute(torch.float32) if native else TorchCompute(torch.float32)
    weight = torch.zeros(100, 4)
    weight[[17, 40, 41, 99]] = 1.0
    x, gain = torch.ones(2, 4), torch.ones(4)
    assert compute.best(x, compute.matrix(weight), 1, gain=gain, eps=1e-5).tolist() == [[17], [17]]
    if native:
        many = compute.best(x, compute.matrix(weight), 6, gain=gain, eps=1e-5)
        assert many.tolist() == [[17, 40, 41, 99, 0, 1]] * 2


def test_all_threads_give_one_result():
    compute, before = native_or_skip(), torch.get_num_threads()
    generator = torch.Generator().manual_seed(5)
    matrix = compute.matrix(torch.randn(999, 32, generator=generator))
    x, gain = torch.randn(5, 32, generator=generator), torch.ones(32)
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            target = tiny_target()
            answer = generate(
                target, tiny_draft(target, DSPINE), [3, 4, 5], max_new_tokens=8, engines=FastCpu(native=True)
            )
            best = compute.best(x, matrix, 7, gain=gain, eps=1e-5).tolist()
            found.append((best, compute.product(x, matrix).tolist(), answer.tokens))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


# ---- choosing, refusing


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build.shutil, "which", lambda _name: None)
    engines, target = FastCpu(), tiny_target()
    assert "no C compiler" in engines.about["why not C"] and engines.about["compute"] == "torch"
    assert generate(target, None, [3, 4], max_new_tokens=4, engines=engines).tokens
    with pytest.raises(UsageError, match="no C compiler"):
        FastCpu(native=True)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "cc 0" && exit\necho "cannot make that" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path))
    assert "cannot make that" in FastCpu().about["why not C"]
    assert not list((tmp_path / "kernels").glob("*.so"))


def test_kernels_are_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path):
    native_or_skip()
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path))
    build.load(half=False)
    run, commands = subprocess.run, []
    monkeypatch.setattr(build.subprocess, "run", lambda *a, **k: (commands.append(a[0]), run(*a, **k))[1])
    build.load(half=False)
    assert [command[1:] for command in commands] == [["--version"]]


@pytest.mark.parametrize("in_pairs", [False, True])
def test_bfloat16_is_multiplied_alike_in_pairs_and_widened(
    monkeypatch: pytest.MonkeyPatch, tmp_path, in_pairs
):
    native_or_skip()
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "load", partial(build.load, in_pairs=in_pairs))
    compute, generator = NativeCompute(torch.bfloat16), torch.Generator().manual_seed(0)
    weight, x = torch.randn(70, 600, generator=generator), torch.randn(9, 600, generator=generator)
    weight, x = weight.bfloat16(), x.bfloat16().float()
    found = compute.product(x, compute.matrix(weight))
    torch.testing.assert_close(found, x @ weight.float().T, atol=1e-3, rtol=1e-4)


def test_a_damaged_library_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path):
    native_or_skip()
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path))
    monkeypatch.setattr(
        build, "_compile", lambda _compiler, _folder, path, _numbers: path.write_text("no library")
    )
    assert "could not be kept or loaded" in FastCpu().about["why not C"]


def test_what_is_not_computed_is_refused():
    target, engines = tiny_target(), FastCpu(torch.float32, native=False)
    with pytest.raises(UsageError, match="bfloat16 or float32"):
        FastCpu(torch.float16)
    handle = target.model.base_model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="a hook is set on .*layers.1"):
        generate(target, None, [3], max_new_tokens=2, engines=engines)
    handle.remove()
    draft = tiny_draft(target, DSPINE)
    draft.blocks[0].inject.hook_gate.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="a hook is set on blocks.0.inject.hook_gate"):
        generate(target, draft, [3], max_new_tokens=2, engines=engines)
    biased = tiny_target()
    biased.model.base_model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.zeros(48))
    with pytest.raises(UsageError, match="has biases"):
        generate(biased, None, [3], max_new_tokens=2, engines=engines)
    with pytest.raises(UsageError, match="do not fit a cache of 4"):
        opened(engines, target, capacity=4).start([[3, 4, 5, 6, 7]])
    with pytest.raises(UsageError, match="wider than the 5"):
        engines.open_draft(tiny_draft(target, DFLASH), rows=1, capacity=9, width=6)


def test_weights_are_packed_once_and_go_with_their_model():
    target, engines = tiny_target(), FastCpu(torch.float32, native=False)
    first, second = opened(engines, target), opened(engines, target)
    assert first.packed is second.packed
    del first, second, target
    assert not len(engines._targets)
