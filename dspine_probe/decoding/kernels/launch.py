"""How a Triton kernel is described before it runs: one `Launch` serves running, testing and compiling alike.

A `plan_*` function turns tensors into launches and the buffers they fill and touches no data, so that with tensors on
the meta device the very launches of a model's geometry can be compiled where there is no GPU (`benchmarks.gpu`). Where
Triton cannot run on given tensors (`usable`), an entry function computes the same with torch; in float64 that is the
reference of the kernels.

Under Triton's interpreter `tl.dot` reads bf16 operands as raw integers, so `dot` widens them there first.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton is made for Linux alone; everywhere else the entry functions use torch
    triton = tl = None

DTYPES = (torch.bfloat16, torch.float32)
Buffers = TypeVar("Buffers")


def jit(function: Any) -> Any:
    """`triton.jit`, or the function as it is where there is no Triton."""
    return function if triton is None else triton.jit(function)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 at import)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def usable(*tensors: Tensor) -> bool:
    """Whether Triton can compute on these: contiguous bf16, fp32 or ints, on a CUDA device or in the interpreter."""
    if triton is None or any(
        not t.is_contiguous() or (t.is_floating_point() and t.dtype not in DTYPES) for t in tensors
    ):
        return False
    return all(t.is_cuda for t in tensors) or (interpreting() and all(t.device.type == "cpu" for t in tensors))


@dataclass(frozen=True)
class Launch:
    """One kernel launch: programs per axis, run-time arguments, compile-time constants, warps and pipeline depth."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, int | bool]
    warps: int = 4
    stages: int = 3

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__).strip("_")

    def run(self) -> None:
        """Enqueue the kernel on the current stream."""
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages)


def run(launches: Sequence[Launch], buffers: Buffers) -> Buffers:
    """Enqueue a plan; the buffers it fills."""
    for launch in launches:
        launch.run()
    return buffers


def widened(dtype: torch.dtype) -> bool:
    """Whether operands of this type must be widened before a dot product."""
    return interpreting() and dtype == torch.bfloat16


def cdiv(count: int, size: int) -> int:
    """Blocks of `size` that cover `count`."""
    return -(-count // size)


def pow2(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def block(count: int, most: int, least: int = 16) -> int:
    """A power-of-two block for an axis of `count`, between `least` and `most`."""
    return max(least, min(most, pow2(count)))


@jit
def dot(a, b, accumulator, WIDEN: tl.constexpr):
    """accumulator + a @ b with fp32 sums; fp32 operands are multiplied in full, not as tf32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")
