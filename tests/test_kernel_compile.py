from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import compile_check
from benchmarks.gpu.compile_check import GEOMETRIES, compile_all, compile_launch
from benchmarks.gpu.problem import ODD, QWEN3_8B, Problem
from dspine_probe.decoding.kernels.launch import Launch, jit, tl
from dspine_probe.errors import ProbeError


@pytest.mark.parametrize(("arch", "geometries"), [(90, tuple(GEOMETRIES)), (80, ("Qwen3-8B",))])
def test_every_launch_of_the_decoding_path_compiles_without_spills(arch, geometries):
    made = compile_all([arch], geometries)
    assert {c.kernel for c in made if c.geometry == "Qwen3-8B"} == {
        launch.name for launch in Problem.make(QWEN3_8B, torch.bfloat16, "meta").launches()
    }
    assert [(c.kernel, c.geometry, c.faults) for c in made if c.faults] == []
    assert all(0 < c.registers <= 255 for c in made)


@jit
def _greedy_registers(x, out, SIZE: tl.constexpr):
    """Holds on to more numbers than the registers of a warp have room for."""
    at = tl.arange(0, SIZE)
    held = tl.load(x + at)
    tl.store(out + at, held / tl.sum(held, 0))


@jit
def _ill_typed(x, out, SIZE: tl.constexpr):
    """The interpreter runs this; the compiler must refuse a loop variable that changes its type."""
    count = 0
    for at in range(SIZE):
        count = count + tl.load(x + at)
    tl.store(out, count)


def test_a_bad_kernel_fails_the_gate():
    x = torch.empty(16_384, device="meta")
    bad = compile_launch(Launch(_greedy_registers, (1,), {"x": x, "out": x}, {"SIZE": 16_384}, warps=1), 90)
    assert bad.stack > 0
    assert any("spilled" in fault for fault in bad.faults)


def test_a_kernel_that_does_not_compile_is_named():
    x = torch.empty(64, device="meta")
    with pytest.raises(ProbeError, match="ill_typed does not compile for sm_90"):
        compile_launch(Launch(_ill_typed, (1,), {"x": x, "out": x}, {"SIZE": 64}), 90)


def test_too_much_shared_memory_and_too_many_registers_are_faults():
    fine = compile_check.Compiled("k", 80, "", registers=128, stack=0, shared=1024, threads=128)
    assert fine.faults == []
    assert "registers" in replace(fine, registers=255, threads=512).faults[0]
    assert "shared" in replace(fine, shared=170_000).faults[0]
    assert replace(fine, arch=90, shared=170_000).faults == []


def test_types_and_alignment_are_those_of_the_tensors():
    launch = Problem.make(ODD, torch.bfloat16, "meta").launches()[0]
    signature, constants, aligned = compile_check._specialised(launch)
    assert signature["h"] == "*bf16" and signature["projected"] == "*fp32" and signature["rows"] == "i32"
    assert constants["WIDEN"] is False
    names = launch.kernel.arg_names
    assert (names.index("h"),) in aligned and (names.index("rows"),) not in aligned
