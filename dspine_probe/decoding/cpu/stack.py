"""Layers over their caches, and DSpine's own part, in C.

Calls let go of the interpreter, so one `LayerStack` must not be used by two Python threads at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cpu.kernels import FLOAT, LONG, Kernels
from dspine_probe.decoding.cpu.rows import Span
from dspine_probe.decoding.cpu.structs import GeometryC, InjectionC, LastWriteC, LayerC, PassC, at
from dspine_probe.decoding.weights import LayerWeights, SpineWeights, StackSizes
from dspine_probe.drafts.layers import Rotary
from dspine_probe.errors import UsageError


class PackedLayer:
    """One layer's weights, packed: q, k, v side by side, gate and up in turn, block by block."""

    def __init__(self, kernels: Kernels, layer: LayerWeights) -> None:
        self.inner = kernels.padded(len(layer.gate))
        spare = self.inner - len(layer.gate)
        gate, up = (F.pad(w, (0, 0, 0, spare)).unflatten(0, (-1, kernels.block)) for w in (layer.gate, layer.up))
        self.matrices = [
            kernels.matrix(torch.cat([layer.q, layer.k, layer.v])),
            kernels.matrix(layer.out),
            kernels.matrix(torch.stack([gate, up], dim=1).flatten(0, 2)),
            kernels.matrix(F.pad(layer.down, (0, spare))),
        ]
        gains = layer.norm_in, layer.norm_mlp, layer.norm_q, layer.norm_k
        self.gains = [None if gain is None else floats(gain) for gain in gains]

    def struct(self, sizes: StackSizes, keys: Tensor, values: Tensor) -> LayerC:
        """The layer with its caches."""
        widths = sizes.width, sizes.width, sizes.head_dim, sizes.head_dim
        gains = (
            None if gain is None else at(gain, FLOAT, width) for gain, width in zip(self.gains, widths, strict=True)
        )
        return LayerC(*(m.struct for m in self.matrices), *gains, keys.data_ptr(), values.data_ptr())


class LayerStack:
    """Packed layers with fresh caches of keys and values for `slots` sequences of up to `capacity` positions."""

    def __init__(
        self,
        kernels: Kernels,
        sizes: StackSizes,
        layers: Sequence[PackedLayer],
        rotary: Rotary,
        *,
        slots: int,
        capacity: int,
    ) -> None:
        capacity = kernels.padded(capacity)
        self.kernels, self.layers, self.width = kernels, layers, sizes.width
        self.rotary = [F.pad(table.to(FLOAT), (0, 0, 0, capacity - len(table))) for table in rotary]
        shape = (len(layers), slots, sizes.kv_heads, capacity)
        self.keys = torch.zeros(*shape, sizes.head_dim, dtype=kernels.dtype, device="cpu")
        widened = kernels.padded(sizes.head_dim)
        self.values = torch.zeros(*shape, widened, dtype=kernels.dtype, device="cpu")
        self.structs = [
            layer.struct(sizes, keys, values)
            for layer, keys, values in zip(layers, self.keys, self.values, strict=True)
        ]
        self.sizes = GeometryC(
            sizes.width,
            layers[0].inner,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            capacity,
            sizes.eps,
            *(at(table, FLOAT, capacity, sizes.head_dim) for table in self.rotary),
            sizes.causal,
            torch.get_num_threads(),
        )
        self.span, self.place = Span((), (), 0), PassC()

    def layer(self, number: int, x: Float[Tensor, "row d_model"], span: Span) -> None:
        """Run one layer in place; its keys and values are stored, and each row sees what lies before it."""
        self._call("layer", number, span, at(x, FLOAT, span.rows, self.width))

    def context(self, number: int, x: Float[Tensor, "row d_model"], gain: Float[Tensor, "d_model"], span: Span) -> None:
        """Store keys and values of normed rows, and nothing else."""
        self._call("context", number, span, at(x, FLOAT, span.rows, self.width), at(gain, FLOAT, self.width))

    def _call(self, name: str, number: int, span: Span, *tensors: int) -> None:
        if span is not self.span:  # all layers of a pass ask for the same
            numbers = c_int64 * len(span.slots)
            self.span = span
            self.place = PassC(len(span.slots), span.width, numbers(*span.slots), numbers(*span.starts))
        where = byref(self.sizes), byref(self.structs[number]), byref(self.place)
        self.kernels.call(name, *where, *tensors)


class SpineKernels:
    """Injection and last write of a DSpine."""

    def __init__(self, kernels: Kernels, spine: SpineWeights) -> None:
        self.kernels = kernels
        self.width, self.rank, self.message = len(spine.norm), spine.mix.shape[1], len(spine.bias)
        self.matrices = [
            (kernels.matrix(readout), kernels.matrix(write))
            for readout, write in zip(spine.readouts, spine.writes, strict=True)
        ]
        self.mix = kernels.matrix(spine.mix)
        self.bias, self.norm = floats(spine.bias), floats(spine.norm)
        self.head, self.sent = (kernels.memory.copy(t.to(kernels.dtype)) for t in (spine.head, spine.sent))
        sizes = self.width, self.rank, self.message
        bias = at(self.bias, FLOAT, self.message)
        self.structs = [
            InjectionC(*sizes, readout.struct, self.mix.struct, write.struct, bias, 1)
            for readout, write in self.matrices
        ]
        self.channels = kernels.padded(3 * self.message)
        self.last = LastWriteC(
            ctypes.pointer(self.structs[-1]),
            at(self.norm, FLOAT, self.width),
            spine.eps,
            self.sent.data_ptr(),
            self.head.data_ptr(),
        )

    def inject(
        self, layer: int, x: Float[Tensor, "row d_model"], anchor_codes: Float[Tensor, "block rank"]
    ) -> Float[Tensor, "row mixed"]:
        """Inject in place; what each slot reads and sends, of use to `transitions` alone. Rows are whole blocks.

        `anchor_codes` are of the kernels' dtype.
        """
        self.structs[layer].threads = torch.get_num_threads()
        blocks, rows = len(anchor_codes), len(x)
        mixed = torch.empty(rows, self.channels, dtype=FLOAT, device="cpu")
        codes = at(anchor_codes, self.kernels.dtype, blocks, self.rank)
        given = at(x, FLOAT, rows, self.width), codes, mixed.data_ptr()
        self.kernels.call("inject", byref(self.structs[layer]), blocks, rows // blocks, *given)
        return mixed

    def transitions(
        self,
        states: Float[Tensor, "row d_model"],
        mixed: Float[Tensor, "row mixed"],
        candidates: Int[Tensor, "block draft_slot k"],
    ) -> Float[Tensor, "block draft_slot k k"]:
        """Refined scores of all pairs of adjacent candidates.

        Args:
            states: rows before the last injection, slot 0 included.
            mixed: what that injection returned.
            candidates: indices of the draft's vocabulary, in any order.
        """
        blocks, drafted, k = candidates.shape
        rows = blocks * (drafted + 1)
        scores = torch.empty(blocks, drafted, k, k, dtype=FLOAT, device="cpu")
        given = at(states, FLOAT, rows, self.width), at(mixed, FLOAT, rows, self.channels)
        others = at(candidates, LONG, blocks, drafted, k), scores.data_ptr()
        self.kernels.call("transitions", byref(self.last), blocks, drafted + 1, k, *given, *others)
        return scores


def floats(vector: Tensor) -> Float[Tensor, "size"]:
    """A gain or bias as the kernels read it."""
    return vector.detach().to(FLOAT).contiguous()


def check_even(**sizes: int) -> None:
    """Refuse odd sizes: numbers are multiplied in pairs.

    Raises:
        UsageError: naming them.
    """
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 2]
    if odd:
        raise UsageError(f"fast CPU decoding takes even sizes only, got {', '.join(odd)}; use the reference engine")
