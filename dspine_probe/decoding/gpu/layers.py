"""Decoder layers with fused weights over a cache that is allocated once; target and drafts share them.

A layer is four matrix products, two of which add the residual stream as they finish, and the kernels between them.
Where rows of different sequences stand is read from a tensor on the device, so one captured step serves every round.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cache import require_room
from dspine_probe.decoding.graphs import Capturing, FixedStep, Outputs
from dspine_probe.decoding.kernels.block_attention import block_attention
from dspine_probe.decoding.kernels.layer_ops import HalfRotary, Heads, LayerCache, rotate_and_store, silu_mul
from dspine_probe.decoding.weights import LayerWeights, StackSizes
from dspine_probe.drafts.layers import Rotary


@dataclass(frozen=True)
class FusedLayer:
    """One layer, q/k/v and gate/up each in one matrix."""

    qkv: Float[Tensor, "fused d_model"]
    out: Float[Tensor, "d_model heads_d_head"]
    gate_up: Float[Tensor, "two_inner d_model"]
    down: Float[Tensor, "d_model inner"]
    norm_in: Float[Tensor, "d_model"]
    norm_mlp: Float[Tensor, "d_model"]
    heads: Heads

    @classmethod
    def fuse(cls, layer: LayerWeights, sizes: StackSizes) -> FusedLayer:
        """Fused copies of a layer's weights."""
        return cls(
            torch.cat([layer.q, layer.k, layer.v]),
            layer.out,
            torch.cat([layer.gate, layer.up]),
            layer.down,
            layer.norm_in,
            layer.norm_mlp,
            Heads(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.eps, layer.norm_q, layer.norm_k),
        )


class FusedStack:
    """Fused layers with keys and values of `rows` sequences of at most `capacity` positions, and the steps over them.

    How many positions of every sequence count is known to the host (`lengths`) and to the steps (`ends`).
    """

    def __init__(
        self,
        layers: Sequence[FusedLayer],
        sizes: StackSizes,
        rotary: Rotary,
        *,
        rows: int,
        capacity: int,
        how: Capturing,
    ) -> None:
        self.layers, self.sizes, self.most, self.capacity, self.how = layers, sizes, rows, capacity, how
        like, half = layers[0].qkv, sizes.head_dim // 2
        self.rotary = HalfRotary(*(t[:, :half].to(like.device).contiguous() for t in rotary))
        shape = (len(layers), rows, sizes.kv_heads, capacity, sizes.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.ends = torch.zeros(rows, dtype=torch.long, device=like.device)
        self.lengths: list[int] = []
        self.steps: dict[Hashable, FixedStep] = {}

    # ---- layers

    def cache(self, number: int, rows: int) -> LayerCache:
        """One layer's keys and values of the first `rows` sequences."""
        return LayerCache(self.keys[number, :rows], self.values[number, :rows])

    def layer(
        self, number: int, x: Float[Tensor, "row d_model"], starts: Int[Tensor, "batch"]
    ) -> Float[Tensor, "row d_model"]:
        """One layer on the slots of every sequence, which stand from `starts` on and are stored there."""
        layer, cache = self.layers[number], self.cache(number, len(starts))
        qkv = F.linear(self.norm(x, layer.norm_in), layer.qkv)
        queries = rotate_and_store(qkv, layer.heads, self.rotary, starts, cache)
        mixed = block_attention(queries, cache, starts, causal=self.sizes.causal)
        x = torch.addmm(x, mixed, layer.out.T)
        gate_up = F.linear(self.norm(x, layer.norm_mlp), layer.gate_up)
        return torch.addmm(x, silu_mul(gate_up), layer.down.T)

    def norm(self, x: Float[Tensor, "*rows d_model"], gain: Float[Tensor, "d_model"]) -> Float[Tensor, "*rows d_model"]:
        """The RMS norm of all these models."""
        return F.rms_norm(x, gain.shape, gain, self.sizes.eps)

    # ---- rows

    def commit(self, counts: Sequence[int]) -> None:
        """Count the next `counts[r]` positions of row r."""
        self.set_lengths([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, moved down in the caches."""
        for new, old in enumerate(rows):
            if new != old:
                for cache in (self.keys, self.values):
                    cache[:, new, :, : self.lengths[old]] = cache[:, old, :, : self.lengths[old]]
        self.set_lengths([self.lengths[row] for row in rows])

    def set_lengths(self, lengths: list[int]) -> None:
        """Go on with as many rows as there are lengths."""
        self.lengths = lengths
        # Unused rows of a bucket write at position 0 of rows that nobody reads.
        ends = torch.tensor(lengths + [0] * (self.most - len(lengths)), dtype=torch.long, device="cpu")
        self.ends.copy_(ends, non_blocking=True)

    # ---- steps

    @property
    def bucket(self) -> int:
        """Rows of the step that serves these: the next power of two, so that few steps serve every batch."""
        return min(self.most, 1 << max(len(self.lengths) - 1, 0).bit_length())

    def step(self, kind: Hashable, function: Callable[..., Outputs], source: FixedStep | None = None) -> FixedStep:
        """The step of this kind for as many rows as there are."""
        key = kind, self.bucket
        if key not in self.steps:
            self.steps[key] = FixedStep(function, self.how, source=source)
        return self.steps[key]

    def inputs(self, width: int, **values: Tensor) -> dict[str, Tensor]:
        """What a step over the next `width` positions reads: values of the rows and of the unused rows of the bucket.

        Raises:
            UsageError: a row has no room for them.
        """
        require_room(max(self.lengths), width, self.capacity)
        return {name: self.padded(value) for name, value in values.items()} | {"starts": self.ends[: self.bucket]}

    def padded(self, values: Tensor) -> Tensor:
        """Values of the rows, with zeros for the unused rows of the bucket."""
        missing = self.bucket - len(values)
        return F.pad(values, (0, 0) * (values.ndim - 1) + (0, missing)) if missing else values
