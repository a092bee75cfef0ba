"""The library of C kernels: packed matrices in memory of their own, and the products outside the layers.

States are float32 rows; weights, caches and operands are of the kernels' `dtype`; sums are float32. Every tensor is
checked where it is handed to C.
"""

from __future__ import annotations

import math
import mmap
from ctypes import byref
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cpu import build
from dspine_probe.decoding.cpu.structs import ARGUMENTS, MatrixC, at
from dspine_probe.errors import ProbeError

FLOAT, LONG = torch.float32, torch.long
HUGE = 2 << 20  # bytes of a huge page
CHUNK = 16 * HUGE
LINE = 64


class PackedMatrix:
    """A weight matrix in blocks of outputs, cell by cell along the summed axis (`product.h`)."""

    def __init__(self, cells: Tensor, inputs: int, outputs: int) -> None:
        self.cells, self.inputs, self.outputs = cells, inputs, outputs
        self.struct = MatrixC(cells.data_ptr(), inputs, outputs)


class Kernels:
    """The library for one dtype, and the products outside the layers.

    Raises:
        NotBuilt: there are no kernels on this machine.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.library = build.load(half=dtype == torch.bfloat16)
        for name, arguments in ARGUMENTS.items():
            getattr(self.library, name).argtypes = arguments
        self.block = int(self.library.block_size())
        self.pair = 2 if dtype == torch.bfloat16 else 1
        self.memory = Memory()
        self._try()

    @property
    def about(self) -> dict[str, Any]:
        """What computes, for the record of a measurement."""
        unit = "AMX" if self.library.allowed() == 2 else "vectors"
        return {"compute": "C kernels", "dtype": str(self.dtype), "block": self.block, "unit": unit}

    def matrix(self, weight: Float[Tensor, "out in"]) -> PackedMatrix:
        """A packed copy of a matrix."""
        outputs, inputs = weight.shape
        padded = F.pad(weight.detach().to(self.dtype), (0, 0, 0, -outputs % self.block))
        cells = padded.view(-1, self.block, inputs // self.pair, self.pair).transpose(1, 2)
        return PackedMatrix(self.memory.copy(cells), inputs, outputs)

    def product(
        self,
        x: Float[Tensor, "row in"],
        matrix: PackedMatrix,
        *,
        gain: Float[Tensor, "in"] | None = None,
        eps: float = 0.0,
    ) -> Float[Tensor, "row out"]:
        """x wᵀ, of RMS-normed rows where there is a gain."""
        rows, y = len(x), torch.empty(len(x), matrix.outputs, dtype=FLOAT, device="cpu")
        given = at(x, FLOAT, rows, matrix.inputs), None if gain is None else at(gain, FLOAT, matrix.inputs)
        threads = torch.get_num_threads()
        self.call("product", byref(matrix.struct), rows, *given, eps, y.data_ptr(), threads)
        return y

    def best(
        self, x: Float[Tensor, "row in"], matrix: PackedMatrix, k: int, *, gain: Float[Tensor, "in"], eps: float
    ) -> Int[Tensor, "row k"]:
        """The k outputs with the largest scores of every normed row, best first; the lower id first among equals."""
        rows, ids = len(x), torch.empty(len(x), k, dtype=LONG, device="cpu")
        given = at(x, FLOAT, rows, matrix.inputs), at(gain, FLOAT, matrix.inputs)
        threads = torch.get_num_threads()
        self.call("best", byref(matrix.struct), rows, *given, eps, k, ids.data_ptr(), threads)
        return ids

    def walk(
        self, scores: Float[Tensor, "block draft_slot k k"], candidates: Int[Tensor, "block draft_slot k"]
    ) -> Int[Tensor, "block draft_slot"]:
        """The greedy walk over a transition cache."""
        sizes = candidates.shape
        tokens = torch.empty(sizes[:2], dtype=LONG, device="cpu")
        given = at(scores, FLOAT, *sizes, sizes[2]), at(candidates, LONG, *sizes)
        self.call("walk", *sizes, *given, tokens.data_ptr())
        return tokens

    def call(self, name: str, *arguments: Any) -> None:
        """Call a kernel.

        Raises:
            ProbeError: it had no memory to work in.
        """
        if not getattr(self.library, name)(*arguments):
            raise ProbeError(f"memory ran out in the kernel {name!r}; give fewer rows or a shorter context")

    def padded(self, size: int) -> int:
        """The next whole number of blocks."""
        return -(-size // self.block) * self.block

    def _try(self) -> None:
        """A small product of every row count, so that a compiler's mistake is met here."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(self.block + 14, 24, generator=generator, dtype=FLOAT, device="cpu")
        weight, x = drawn.to(self.dtype).float().split([self.block + 5, 9])
        matrix = self.matrix(weight)
        for rows in range(1, len(x) + 1):
            if not torch.allclose(self.product(x[:rows], matrix), x[:rows] @ weight.T, atol=1e-4):
                raise build.NotBuilt("the compiled kernels multiply wrongly on this machine")


class Memory:
    """Tensors packed end to end in large pieces of memory that live as long as any tensor in them, in huge pages.

    Weights are read from end to end for every token; with pages of 2 MiB instead of 4 KiB the processor looks up fewer
    addresses and fetches further ahead, which was worth about a tenth of the bandwidth where it was measured.
    """

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copy(self, source: Tensor) -> Tensor:
        """A contiguous copy of `source`, whose layout may be any."""
        size = math.prod(source.shape) * source.element_size()
        needed = -(-size // LINE) * LINE
        if needed > len(self.free):
            self.free = _huge_pages(max(needed, CHUNK))
        taken, self.free = self.free[:size], self.free[needed:]
        return taken.view(source.dtype).view(source.shape).copy_(source)


def _huge_pages(size: int) -> Tensor:
    """Bytes that start on a huge page; ordinary memory where none can be asked for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    region = mmap.mmap(-1, size + HUGE)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages
    whole = torch.frombuffer(region, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE
    return whole[skip : skip + size]
