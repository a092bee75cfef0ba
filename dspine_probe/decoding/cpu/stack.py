"""Decoder layers in C over their caches: which cache slot every row uses, and how a pass is cut into pieces.

Calls let go of the interpreter, so one `LayerStack` must not be used by two Python threads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cache import require_room
from dspine_probe.decoding.cpu.kernels import FLOAT, Kernels
from dspine_probe.decoding.cpu.structs import GeometryC, LayerC, PassC, at
from dspine_probe.decoding.weights import LayerWeights, StackSizes
from dspine_probe.drafts.layers import Rotary
from dspine_probe.errors import UsageError

MAX_ROWS = 256
"""Most token rows of one call of a kernel; longer prompts are read in pieces."""


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
    """Packed layers with caches of keys and values for up to `rows` rows of up to `capacity` positions.

    Forgetting a position is not counting it; dropping a row is not naming its slot any more.
    """

    def __init__(
        self,
        kernels: Kernels,
        sizes: StackSizes,
        layers: Sequence[PackedLayer],
        rotary: Rotary,
        *,
        rows: int,
        capacity: int,
    ) -> None:
        self.kernels, self.sizes, self.layers, self.most, self.capacity = kernels, sizes, layers, rows, capacity
        self.slots: list[int] = []
        self.lengths: list[int] = []
        padded = kernels.padded(capacity)
        self.rotary = [F.pad(table.to(FLOAT), (0, 0, 0, padded - len(table))) for table in rotary]
        shape = (len(layers), rows, sizes.kv_heads, padded)
        self.keys = torch.zeros(*shape, sizes.head_dim, dtype=kernels.dtype, device="cpu")
        widened = kernels.padded(sizes.head_dim)
        self.values = torch.zeros(*shape, widened, dtype=kernels.dtype, device="cpu")
        self.structs = [
            layer.struct(sizes, keys, values)
            for layer, keys, values in zip(layers, self.keys, self.values, strict=True)
        ]
        self.geometry = GeometryC(
            sizes.width,
            layers[0].inner,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            padded,
            sizes.eps,
            *(at(table, FLOAT, padded, sizes.head_dim) for table in self.rotary),
            sizes.causal,
            torch.get_num_threads(),
        )

    def layer(
        self, number: int, x: Float[Tensor, "row d_model"], place: PassC, gain: Float[Tensor, "d_model"] | None = None
    ) -> None:
        """Run one layer in place; its keys and values are stored, and each row sees what lies before it.

        With a `gain` keys and values are stored of rows normed by it, and nothing else is done.
        """
        width = self.sizes.width
        rows, gained = at(x, FLOAT, place.sequences * place.width, width), gain is not None and at(gain, FLOAT, width)
        given = byref(self.geometry), byref(self.structs[number]), byref(place)
        self.kernels.call("layer", *given, rows, gained or None)

    def add(self, count: int) -> range:
        """The numbers of `count` new, empty rows behind those in flight."""
        taken, first = set(self.slots), len(self.slots)
        self.slots += [slot for slot in range(self.most) if slot not in taken][:count]
        self.lengths += [0] * count
        return range(first, first + count)

    def pieces(self, width: int, rows: range | None = None) -> Iterator[tuple[tuple[slice, slice], PassC]]:
        """Cut the next `width` tokens of some rows (by default all) into pieces, each after what it has to see.

        A piece is a part of [row width] that the kernels take at once, whole rows or part of one, and where it belongs.

        Raises:
            UsageError: a row has no room for them.
        """
        rows = range(len(self.slots)) if rows is None else rows
        require_room(max(self.lengths[row] for row in rows), width, self.capacity)
        together = max(1, MAX_ROWS // width)
        for first in range(rows.start, rows.stop, together):
            part = slice(first, min(first + together, rows.stop))
            for start in range(0, width, MAX_ROWS):
                stop = min(start + MAX_ROWS, width)
                starts = [length + start for length in self.lengths[part]]
                here = slice(part.start - rows.start, part.stop - rows.start), slice(start, stop)
                yield here, PassC.of(self.slots[part], starts, stop - start)

    def tokens(self, counts: Sequence[int]) -> Iterator[tuple[slice, PassC]]:
        """The next `counts[r]` tokens of every row end to end, cut into pieces; no token sees another of them.

        Raises:
            UsageError: a row has no room for them.
        """
        for length, count in zip(self.lengths, counts, strict=True):
            require_room(length, count, self.capacity)
        slots = [slot for slot, count in zip(self.slots, counts, strict=True) for _ in range(count)]
        starts = [length + at for length, count in zip(self.lengths, counts, strict=True) for at in range(count)]
        for first in range(0, len(slots), MAX_ROWS):
            part = slice(first, min(first + MAX_ROWS, len(slots)))
            yield part, PassC.of(slots[part], starts[part], 1)

    def commit(self, counts: Sequence[int]) -> None:
        """Count the next `counts[r]` positions of row r."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.slots = [self.slots[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]


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
