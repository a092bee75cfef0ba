"""Fast CPU decoding: tokens that depend on neither draft nor batch, caches, products, and what is refused."""

import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from tiny import VOCAB, prompts, tiny_draft, tiny_target
from torch.nn import functional as F

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.cpu import build, stack
from dspine_probe.decoding.cpu.build import NotBuilt
from dspine_probe.decoding.cpu.kernels import Kernels
from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.generate import generate, generate_batch
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

NEW = 16
DRAFTS = [(DFLASH, None), (DFLASH, 40), (DSPINE, None), (DSPINE, 40)]


def kernels_or_skip(dtype: torch.dtype = torch.float32) -> Kernels:
    """Kernels, unless there is no compiler; one that fails on our sources is a failure."""
    try:
        return Kernels(dtype)
    except NotBuilt as fault:
        if "no C compiler" not in str(fault):
            raise
        pytest.skip(str(fault))


@pytest.fixture
def exact() -> FastCpu:
    kernels_or_skip()
    return FastCpu(torch.float32)


def opened(engines: FastCpu, target: Target, *, rows: int = 1, capacity: int = 40):
    return engines.open_target(target, taps=(0, 2), rows=rows, capacity=capacity, width=9)


# ---- tokens


def test_bfloat16_answers_do_not_depend_on_the_draft_or_the_batch():
    kernels_or_skip()
    for kind in ("llama", "qwen3"):
        target, engines = tiny_target(kind, stop_ids=(2, 9)), FastCpu()
        listed = prompts(8)
        plain = [generate(target, None, p, max_new_tokens=NEW, engines=engines).tokens for p in listed]
        for name, size in DRAFTS:
            draft = tiny_draft(target, name, trimmed=size)
            found = generate_batch(target, draft, listed, max_new_tokens=NEW, engines=engines)
            assert [f.tokens for f in found] == plain


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_changes_nothing(exact: FastCpu, default: torch.dtype):
    target = tiny_target(stop_ids=())
    drafts = [tiny_draft(target, name) for name in (DFLASH, DSPINE)]
    before = [generate_batch(target, d, prompts(4), max_new_tokens=NEW, engines=exact) for d in drafts]
    torch.set_default_dtype(default)
    try:
        fresh = FastCpu(torch.float32)
        for draft, expected in zip(drafts, before, strict=True):
            for engines in (exact, fresh):
                found = generate_batch(target, draft, prompts(4), max_new_tokens=NEW, engines=engines)
                assert [f.rounds for f in found] == [e.rounds for e in expected]
    finally:
        torch.set_default_dtype(torch.float32)


# ---- caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_read_to_the_same_bits_alone_in_a_block_and_beside_others(dtype: torch.dtype):
    kernels_or_skip()
    target, engines = tiny_target("qwen3"), FastCpu(dtype)
    tokens = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    together = opened(engines, target, rows=3)
    together.prefill([[5, 6, 7], [8], [9, 10]])
    block, taps = together.forward(tokens), together.taps
    alone = opened(engines, target)
    alone.prefill([[8]])
    for at in range(9):
        assert torch.equal(alone.forward(tokens[1:2, at : at + 1])[0, 0], block[1, at])
        assert torch.equal(alone.taps[0, 0], taps[1, at])
        alone.commit([1])


def test_what_was_rolled_back_leaves_no_trace(exact: FastCpu):
    target = tiny_target()
    wanted, rolled = opened(exact, target), opened(exact, target)
    wanted.prefill([[4, 5, 6, 7, 8]])
    rolled.prefill([[4, 5, 6]])
    rolled.forward(torch.tensor([[7, 60, 61, 62, 59]]))
    rolled.commit([1])
    rolled.forward(torch.tensor([[50, 51]]))
    rolled.commit([0])
    rolled.greedy(torch.tensor([[8, 33]]))
    rolled.commit([1])
    after = torch.tensor([[11, 12]])
    torch.testing.assert_close(rolled.forward(after), wanted.forward(after), atol=1e-4, rtol=1e-4)


def test_a_prompt_longer_than_one_call_takes_is_read_whole(exact: FastCpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack, "MAX_ROWS", 64)
    target = tiny_target()
    prompt = torch.randint(3, VOCAB, (64 + 37,), generator=torch.Generator().manual_seed(2)).tolist()
    for draft in (None, tiny_draft(target, DSPINE)):
        expected, found = (generate(target, draft, prompt, max_new_tokens=NEW, engines=e) for e in (REFERENCE, exact))
        assert (found.tokens, found.rounds) == (expected.tokens, expected.rounds)


def test_taps_are_those_of_the_target(exact: FastCpu):
    target = tiny_target()
    engine = opened(exact, target)
    engine.prefill([[3, 4, 5, 6]])
    expected = target.hidden_states(torch.tensor([[3, 4, 5, 6]]), (0, 2)).taps
    torch.testing.assert_close(engine.taps, expected, atol=1e-4, rtol=1e-4)


def test_only_context_rows_that_count_are_computed(exact: FastCpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack, "MAX_ROWS", 128)
    target = tiny_target()
    engine = exact.open_draft(tiny_draft(target, DSPINE), rows=3, capacity=200, width=5)
    seen: list[int] = []
    product = exact.kernels.product
    monkeypatch.setattr(exact.kernels, "product", lambda x, *a, **k: (seen.append(len(x)), product(x, *a, **k))[1])
    taps = torch.randn(3, 160, 2 * target.hidden_size)
    engine.extend(taps, [3, 160, 1])
    engine.extend(taps[:, :5], [1, 5, 2])
    assert seen == [128, 36, 8]


# ---- products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_any_shape(dtype: torch.dtype):
    kernels, generator = kernels_or_skip(dtype), torch.Generator().manual_seed(3)
    for outputs, inputs, rows in [(1, 2, 1), (31, 6, 3), (33, 64, 8), (100, 30, 9), (64, 46, 300)]:
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype).float()
        x = torch.randn(rows, inputs, generator=generator).to(dtype).float()
        gain = torch.rand(inputs, generator=generator)
        packed = kernels.matrix(weight)
        torch.testing.assert_close(kernels.product(x, packed), x @ weight.T, atol=1e-4, rtol=1e-4)
        tolerance = 1e-4 if dtype == torch.float32 else 0.05 * inputs**0.5
        normed = kernels.product(x, packed, gain=gain, eps=1e-5)
        wanted = F.rms_norm(x, gain.shape, gain, 1e-5) @ weight.T
        torch.testing.assert_close(normed, wanted, atol=tolerance, rtol=1e-4)
        k = min(outputs, 5)
        found = kernels.best(x, packed, k, gain=gain, eps=1e-5)
        torch.testing.assert_close(normed.gather(1, found), normed.topk(k).values, atol=0, rtol=0)


def test_the_lowest_of_equal_scores_comes_first():
    kernels = kernels_or_skip()
    weight = torch.zeros(100, 4)
    weight[[17, 40, 41, 99]] = 1.0
    x, gain = torch.ones(2, 4), torch.ones(4)
    assert kernels.best(x, kernels.matrix(weight), 1, gain=gain, eps=1e-5).tolist() == [[17], [17]]
    many = kernels.best(x, kernels.matrix(weight), 6, gain=gain, eps=1e-5)
    assert many.tolist() == [[17, 40, 41, 99, 0, 1]] * 2


def test_all_threads_give_one_result():
    kernels, before = kernels_or_skip(), torch.get_num_threads()
    generator = torch.Generator().manual_seed(5)
    matrix = kernels.matrix(torch.randn(999, 32, generator=generator))
    x, gain = torch.randn(5, 32, generator=generator), torch.ones(32)
    target, found = tiny_target(), []
    draft = tiny_draft(target, DSPINE)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answer = generate(target, draft, [3, 4, 5], max_new_tokens=8, engines=FastCpu())
            best = kernels.best(x, matrix, 7, gain=gain, eps=1e-5).tolist()
            found.append((best, kernels.product(x, matrix).tolist(), answer.tokens))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_any_number_of_rows_fits_the_stack_of_a_thread():
    """In a process whose stack a block of sums for every row would not fit."""
    kernels_or_skip()
    script = """
import resource, sys, torch
from dspine_probe.decoding.cpu.kernels import Kernels
kernels = Kernels(torch.float32)
x, gain = torch.ones(200_000, 8), torch.ones(8)
matrix = kernels.matrix(torch.eye(8))
assert kernels.product(x, matrix).sum() == x.sum()
assert kernels.best(x, matrix, 1, gain=gain, eps=1e-5).sum() == 0
"""
    ran = subprocess.run(
        ["sh", "-c", 'ulimit -s 8192; exec "$0" -c "$1"', sys.executable, script], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-500:]


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3, 4, dtype=torch.float64),
        torch.ones(3, 5),
        torch.ones(4, 3).T,
        torch.ones(3, 4, device="meta"),
        torch.ones(12),
    ],
    ids=["dtype", "size", "strides", "device", "shape"],
)
def test_c_is_handed_nothing_that_it_would_misread(x: torch.Tensor):
    kernels = kernels_or_skip()
    matrix, gain = kernels.matrix(torch.ones(6, 4)), torch.ones(4)
    with pytest.raises(UsageError, match="a C kernel takes contiguous torch.float32 of"):
        kernels.product(x, matrix)
    with pytest.raises(UsageError, match="a C kernel takes contiguous torch.float32 of"):
        kernels.best(x, matrix, 1, gain=gain, eps=1e-5)


# ---- building


def test_without_a_compiler_the_reference_engine_decodes_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build.shutil, "which", lambda _name: None)
    with pytest.warns(UserWarning, match="no C kernels here .*no C compiler.* reference engine decodes"):
        engines = FastCpu()
    assert engines.about == {**REFERENCE.about, "why not C": engines.why_not_c}
    assert "no C compiler" in engines.about["why not C"]
    target = tiny_target()
    draft = tiny_draft(target, DSPINE)
    found, expected = (generate(target, draft, [3, 4], max_new_tokens=4, engines=e) for e in (engines, REFERENCE))
    assert found.rounds == expected.rounds


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "cc 0" && exit\necho "cannot make that" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="cannot make that"):
        assert "cannot make that" in FastCpu().about["why not C"]
    assert not list((tmp_path / "kernels").glob("*.so"))


def test_kernels_are_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path):
    kernels_or_skip()
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path))
    build.load(half=False)
    run, commands = subprocess.run, []
    monkeypatch.setattr(build.subprocess, "run", lambda *a, **k: (commands.append(a[0]), run(*a, **k))[1])
    build.load(half=False)
    assert [command[1:] for command in commands] == [["--version"]]


@pytest.mark.parametrize("in_pairs", [False, True])
def test_bfloat16_is_multiplied_alike_in_pairs_and_widened(monkeypatch: pytest.MonkeyPatch, tmp_path, in_pairs):
    kernels_or_skip()
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "load", partial(build.load, in_pairs=in_pairs))
    kernels, generator = Kernels(torch.bfloat16), torch.Generator().manual_seed(0)
    weight, x = torch.randn(70, 600, generator=generator), torch.randn(9, 600, generator=generator)
    weight, x = weight.bfloat16(), x.bfloat16().float()
    found = kernels.product(x, kernels.matrix(weight))
    torch.testing.assert_close(found, x @ weight.float().T, atol=1e-3, rtol=1e-4)


def test_a_damaged_library_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path):
    kernels_or_skip()
    monkeypatch.setenv("DSPINE_PROBE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda _compiler, _folder, path, _numbers: path.write_text("no library"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "could not be kept or loaded" in FastCpu().about["why not C"]


# ---- refusing


def test_what_is_not_computed_is_refused(exact: FastCpu):
    target = tiny_target()
    with pytest.raises(UsageError, match="bfloat16 or float32"):
        FastCpu(torch.float16)
    with pytest.raises(UsageError, match="do not fit a cache of 4"):
        opened(exact, target, capacity=4).prefill([[3, 4, 5, 6, 7]])
    with pytest.raises(UsageError, match="wider than the 5"):
        exact.open_draft(tiny_draft(target, DFLASH), rows=1, capacity=9, width=6)
    odd = tiny_draft(target, DFLASH, head_dim=15)
    with pytest.raises(UsageError, match="even sizes only, got head size 15"):
        exact.open_draft(odd, rows=1, capacity=9, width=5)
