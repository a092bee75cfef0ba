"""The compute in C: packs weights for the kernels, and calls them.

Calls let go of the interpreter, so one stack must not be used by two Python threads at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cpu import build
from dspine_probe.decoding.cpu.compute import Geometry, Layer, Rotary, Span, Spine
from dspine_probe.decoding.cpu.memory import Memory
from dspine_probe.decoding.cpu.structs import (
    ARGUMENTS,
    GeometryC,
    InjectionC,
    LastWriteC,
    LayerC,
    MatrixC,
    PassC,
    at,
)
from dspine_probe.errors import ProbeError


class Matrix:
    """A weight matrix in blocks of outputs, cell by cell along the summed axis (`product.h`)."""

    def __init__(self, cells: Tensor, inputs: int, outputs: int) -> None:
        self.cells = cells
        self.struct = MatrixC(cells.data_ptr(), inputs, outputs)


class NativeCompute:
    """`Compute` in C.

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
        """See `Compute.about`."""
        return {"compute": "C kernels", "dtype": str(self.dtype), "block": self.block}

    def matrix(self, weight: Float[Tensor, "out in"]) -> Matrix:
        """See `Compute.matrix`."""
        outputs, inputs = weight.shape
        padded = F.pad(weight.detach().to(self.dtype), (0, 0, 0, -outputs % self.block))
        cells = padded.view(-1, self.block, inputs // self.pair, self.pair).transpose(1, 2)
        return Matrix(self.memory.copy(cells), inputs, outputs)

    def product(
        self, x: Float[Tensor, "row in"], matrix: Matrix, *, gain: Tensor | None = None, eps: float = 0.0
    ) -> Float[Tensor, "row out"]:
        """See `Compute.product`."""
        y, threads = x.new_empty(len(x), matrix.struct.outputs), torch.get_num_threads()
        self.call("product", byref(matrix.struct), len(x), at(x), at(gain), eps, at(y), threads)
        return y

    def best(
        self, x: Float[Tensor, "row in"], matrix: Matrix, k: int, *, gain: Tensor, eps: float
    ) -> Int[Tensor, "row k"]:
        """See `Compute.best`."""
        ids, threads = torch.empty(len(x), k, dtype=torch.long), torch.get_num_threads()
        self.call("best", byref(matrix.struct), len(x), at(x), at(gain), eps, k, at(ids), threads)
        return ids

    def walk(
        self, scores: Float[Tensor, "block draft_slot k k"], candidates: Int[Tensor, "block draft_slot k"]
    ) -> Int[Tensor, "block draft_slot"]:
        """See `Compute.walk`."""
        tokens = candidates.new_empty(candidates.shape[:2])
        self.call("walk", *candidates.shape, at(scores), at(candidates), at(tokens))
        return tokens

    def layers(self, layers: Sequence[Layer]) -> list[PackedLayer]:
        """See `Compute.layers`."""
        return [PackedLayer(self, layer) for layer in layers]

    def stack(
        self,
        geometry: Geometry,
        layers: Sequence[PackedLayer],
        rotary: Rotary,
        *,
        slots: int,
        capacity: int,
    ) -> NativeStack:
        """See `Compute.stack`."""
        return NativeStack(self, geometry, layers, rotary, slots, capacity)

    def spine(self, spine: Spine) -> NativeSpine:
        """See `Compute.spine`."""
        return NativeSpine(self, spine)

    def _try(self) -> None:
        """A small product of every row count, so that a compiler's mistake is met here."""
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(self.block + 5, 24, generator=generator).to(self.dtype)
        matrix = self.matrix(weight)
        for rows in range(1, 10):
            x = torch.randn(rows, 24, generator=generator).to(self.dtype).float()
            if not torch.allclose(self.product(x, matrix), x @ weight.float().T, atol=1e-4):
                raise build.NotBuilt("the compiled kernels multiply wrongly on this machine")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a kernel.

        Raises:
            ProbeError: it had no memory to work in.
        """
        if not getattr(self.library, name)(*arguments):
            raise ProbeError(f"memory ran out in the kernel {name!r}; give fewer rows or a shorter context")


class PackedLayer:
    """One layer's weights, packed."""

    def __init__(self, compute: NativeCompute, layer: Layer) -> None:
        block, spare = compute.block, -len(layer.gate) % compute.block
        gate, up = (F.pad(w, (0, 0, 0, spare)).unflatten(0, (-1, block)) for w in (layer.gate, layer.up))
        self.inner = len(layer.gate) + spare
        self.qkv = compute.matrix(torch.cat([layer.q, layer.k, layer.v]))
        self.out = compute.matrix(layer.out)
        self.gate_up = compute.matrix(torch.stack([gate, up], dim=1).flatten(0, 2))
        self.down = compute.matrix(F.pad(layer.down, (0, spare)))
        self.gains = [
            None if gain is None else gain.detach().float().contiguous()
            for gain in (layer.norm_in, layer.norm_mlp, layer.norm_q, layer.norm_k)
        ]

    def struct(self, keys: Tensor, values: Tensor) -> LayerC:
        """The layer with its caches."""
        matrices = (m.struct for m in (self.qkv, self.out, self.gate_up, self.down))
        return LayerC(*matrices, *map(at, self.gains), at(keys), at(values))


class NativeStack:
    """`Stack` in C."""

    def __init__(
        self,
        compute: NativeCompute,
        geometry: Geometry,
        layers: Sequence[PackedLayer],
        rotary: Rotary,
        slots: int,
        capacity: int,
    ) -> None:
        g, block = geometry, compute.block
        capacity = -(-capacity // block) * block
        self.compute, self.layers = compute, layers
        self.rotary = [
            F.pad(table.float(), (0, 0, 0, capacity - len(table))) for table in (rotary.cos, rotary.sin)
        ]
        padded = -(-g.head_dim // block) * block
        shape = (len(layers), slots, g.kv_heads, capacity)
        self.keys = torch.zeros(*shape, g.head_dim, dtype=compute.dtype)
        self.values = torch.zeros(*shape, padded, dtype=compute.dtype)
        self.structs = [
            layer.struct(keys, values)
            for layer, keys, values in zip(layers, self.keys, self.values, strict=True)
        ]
        sizes = (g.width, layers[0].inner, g.heads, g.kv_heads, g.head_dim, capacity)
        threads = torch.get_num_threads()
        self.geometry = GeometryC(*sizes, g.eps, *map(at, self.rotary), g.causal, threads)
        self.span, self.place = Span((), (), 0), PassC()

    def layer(self, number: int, x: Float[Tensor, "row d_model"], span: Span) -> None:
        """See `Stack.layer`."""
        place = self._place(span)
        self.compute.call("layer", byref(self.geometry), byref(self.structs[number]), byref(place), at(x))

    def context(
        self, number: int, x: Float[Tensor, "row d_model"], gain: Float[Tensor, "d_model"], span: Span
    ) -> None:
        """See `Stack.context`."""
        where = byref(self.geometry), byref(self.structs[number]), byref(self._place(span))
        self.compute.call("context", *where, at(x), at(gain))

    def _place(self, span: Span) -> PassC:
        """The span as the kernels want it; all layers of a pass ask for the same."""
        if span is not self.span:
            count = len(span.slots)
            numbers = c_int64 * count
            self.span = span
            self.place = PassC(count, span.width, numbers(*span.slots), numbers(*span.starts))
        return self.place


class NativeSpine:
    """`SpineOps` in C."""

    def __init__(self, compute: NativeCompute, spine: Spine) -> None:
        self.compute = compute
        self.matrices = [
            (compute.matrix(readout), compute.matrix(write))
            for readout, write in zip(spine.readouts, spine.writes, strict=True)
        ]
        self.mix = compute.matrix(spine.mix)
        self.bias, self.norm = spine.bias.detach().float(), spine.norm.detach().float()
        self.head, self.sent = (compute.memory.copy(t.to(compute.dtype)) for t in (spine.head, spine.sent))
        message, rank = len(spine.bias), spine.mix.shape[1]
        sizes = len(spine.norm), rank, message
        self.structs = [
            InjectionC(*sizes, readout.struct, self.mix.struct, write.struct, at(self.bias), 1)
            for readout, write in self.matrices
        ]
        self.channels = -(-3 * message // compute.block) * compute.block
        last = ctypes.pointer(self.structs[-1])
        self.last = LastWriteC(last, at(self.norm), spine.eps, at(self.sent), at(self.head))

    def inject(
        self, layer: int, x: Float[Tensor, "row d_model"], anchor_codes: Float[Tensor, "block rank"]
    ) -> Float[Tensor, "row mixed"]:
        """See `SpineOps.inject`; `anchor_codes` of the compute's dtype."""
        self.structs[layer].threads = torch.get_num_threads()
        blocks, mixed = len(anchor_codes), x.new_empty(len(x), self.channels)
        sizes = blocks, len(x) // blocks
        self.compute.call("inject", byref(self.structs[layer]), *sizes, at(x), at(anchor_codes), at(mixed))
        return mixed

    def transitions(
        self,
        states: Float[Tensor, "row d_model"],
        mixed: Float[Tensor, "row mixed"],
        candidates: Int[Tensor, "block draft_slot k"],
    ) -> Float[Tensor, "block draft_slot k k"]:
        """See `SpineOps.transitions`."""
        blocks, drafted, k = candidates.shape
        scores = states.new_empty(blocks, drafted, k, k)
        tensors = (at(t) for t in (states, mixed, candidates, scores))
        self.compute.call("transitions", byref(self.last), blocks, drafted + 1, k, *tensors)
        return scores
