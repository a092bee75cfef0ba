"""How a Triton kernel is described before it runs: one `Launch` serves running, testing and compiling alike.

A `plan_*` function of a kernel module turns tensors into a `Launch` and touches no data, so that with tensors on the
meta device the very launches of a model's geometry can be compiled where there is no GPU (`benchmarks.gpu`). `usable`
says whether Triton can run on given tensors; where it cannot, the entry functions compute the same with torch.

Under Triton's interpreter `tl.dot` reads bf16 operands as raw integers, so `dot` widens them there first.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton is made for Linux alone; everywhere else the entry functions use torch
    triton = tl = None

DTYPES = (torch.bfloat16, torch.float32)


def jit(function: Any) -> Any:
    """`triton.jit`, or the function as it is where there is no Triton."""
    return function if triton is None else triton.jit(function)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 at import)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def usable(*tensors: Tensor) -> bool:
    """Whether Triton can compute on these: contiguous bf16, fp32 or ints, on a CUDA device or in the interpreter."""
    if triton is None or not all(_suits(tensor) for tensor in tensors):
        return False
    return all(t.is_cuda for t in tensors) or (interpreting() and all(t.device.type == "cpu" for t in tensors))


def _suits(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and (tensor.dtype in DTYPES or not tensor.is_floating_point())


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
