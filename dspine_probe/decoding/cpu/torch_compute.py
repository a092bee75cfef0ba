"""The compute in torch: for machines without a C compiler, and what the kernels are checked against.

With bfloat16 weights, matrices are laid out once for oneDNN where the processor multiplies bfloat16 itself. Rows are
rounded differently in different numbers, so a block may be read a little differently from its tokens one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cpu.compute import Geometry, Layer, Rotary, Span, Spine
from dspine_probe.drafts.layers import rotate
from dspine_probe.drafts.transition import TransitionCache


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 products for this processor."""
    ops = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and bool(
        hasattr(ops, "_is_mkldnn_bf16_supported") and ops._is_mkldnn_bf16_supported()
    )


class Matrix:
    """A weight matrix in the layout that multiplies fastest."""

    def __init__(self, weight: Float[Tensor, "out in"], dtype: torch.dtype) -> None:
        self.weight = weight.detach().to(dtype).contiguous()
        self.prepacked = dtype == torch.bfloat16 and multiplies_bfloat16()
        if self.prepacked:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)

    def __call__(self, x: Float[Tensor, "*row in"]) -> Float[Tensor, "*row out"]:
        """x wᵀ in float32, from operands of the weight's dtype."""
        x = x.to(self.weight.dtype)
        if self.prepacked:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "").float()
        return F.linear(x, self.weight).float()


class TorchCompute:
    """`Compute` in torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @property
    def about(self) -> dict[str, Any]:
        """See `Compute.about`."""
        return {
            "compute": "torch",
            "dtype": str(self.dtype),
            "bfloat16 in hardware": multiplies_bfloat16(),
        }

    def matrix(self, weight: Float[Tensor, "out in"]) -> Matrix:
        """See `Compute.matrix`."""
        return Matrix(weight, self.dtype)

    def product(
        self, x: Float[Tensor, "row in"], matrix: Matrix, *, gain: Tensor | None = None, eps: float = 0.0
    ) -> Float[Tensor, "row out"]:
        """See `Compute.product`."""
        return matrix(x if gain is None else _norm(x, gain, eps))

    def best(
        self, x: Float[Tensor, "row in"], matrix: Matrix, k: int, *, gain: Tensor, eps: float
    ) -> Int[Tensor, "row k"]:
        """See `Compute.best`."""
        scores = matrix(_norm(x, gain, eps))
        return scores.max(dim=-1, keepdim=True).indices if k == 1 else scores.topk(k, dim=-1).indices

    def walk(
        self, scores: Float[Tensor, "block draft_slot k k"], candidates: Int[Tensor, "block draft_slot k"]
    ) -> Int[Tensor, "block draft_slot"]:
        """See `Compute.walk`."""
        return TransitionCache(candidates, scores).walk_greedy()

    def layers(self, layers: Sequence[Layer]) -> list[PackedLayer]:
        """See `Compute.layers`."""
        return [PackedLayer.pack(self, layer) for layer in layers]

    def stack(
        self,
        geometry: Geometry,
        layers: Sequence[PackedLayer],
        rotary: Rotary,
        *,
        slots: int,
        capacity: int,
    ) -> TorchStack:
        """See `Compute.stack`."""
        return TorchStack(self.dtype, geometry, layers, rotary, slots, capacity)

    def spine(self, spine: Spine) -> TorchSpine:
        """See `Compute.spine`."""
        return TorchSpine(self, spine)


@dataclass(frozen=True)
class PackedLayer:
    """One layer's matrices, q, k, v and gate, up fused, and its gains."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    gains: Layer

    @classmethod
    def pack(cls, compute: TorchCompute, layer: Layer) -> PackedLayer:
        """Lay the matrices out."""
        qkv, gate_up = torch.cat([layer.q, layer.k, layer.v]), torch.cat([layer.gate, layer.up])
        pack = compute.matrix
        return cls(pack(qkv), pack(layer.out), pack(gate_up), pack(layer.down), gains=layer)


class TorchStack:
    """`Stack` in torch."""

    def __init__(
        self,
        dtype: torch.dtype,
        geometry: Geometry,
        layers: Sequence[PackedLayer],
        rotary: Rotary,
        slots: int,
        capacity: int,
    ) -> None:
        self.geometry, self.layers = geometry, layers
        self.cos, self.sin = rotary.cos.float()[:, None], rotary.sin.float()[:, None]
        shape = (len(layers), slots, capacity, geometry.kv_heads, geometry.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def layer(self, number: int, x: Float[Tensor, "row d_model"], span: Span) -> None:
        """See `Stack.layer`."""
        layer, eps = self.layers[number], self.geometry.eps
        q = self._attended(number, _norm(x, layer.gains.norm_in, eps), span)
        x += layer.out(self._mix(number, q, span))
        gate, up = layer.gate_up(_norm(x, layer.gains.norm_mlp, eps)).chunk(2, dim=-1)
        x += layer.down(F.silu(gate) * up)

    def context(
        self, number: int, x: Float[Tensor, "row d_model"], gain: Float[Tensor, "d_model"], span: Span
    ) -> None:
        """See `Stack.context`."""
        self._attended(number, _norm(x, gain, self.geometry.eps), span)

    def _attended(self, number: int, x: Tensor, span: Span) -> Float[Tensor, "row head d_head"]:
        """Queries of normed rows; their keys and values are stored."""
        g, layer = self.geometry, self.layers[number]
        heads = layer.qkv(x).view(len(x), -1, g.head_dim)
        q, k, v = heads.split([g.heads, g.kv_heads, g.kv_heads], dim=1)
        at = torch.cat([torch.arange(start, start + span.width) for start in span.starts])
        turn = self.cos[at], self.sin[at]
        k = rotate(_head_norm(k, layer.gains.norm_k, g.eps), turn)
        owner = torch.tensor(span.slots).repeat_interleave(span.width)
        self.keys[number, owner, at], self.values[number, owner, at] = (t.to(self.keys.dtype) for t in (k, v))
        return rotate(_head_norm(q, layer.gains.norm_q, g.eps), turn)

    def _mix(self, number: int, q: Tensor, span: Span) -> Float[Tensor, "row heads_d_head"]:
        """Attention of every sequence's rows over its own cache."""
        mixed = []
        for slot, start, rows in zip(span.slots, span.starts, q.split(span.width), strict=True):
            stop = start + span.width
            keys, values = (c[number, slot, :stop].transpose(0, 1) for c in (self.keys, self.values))
            mask = None
            if self.geometry.causal:
                mask = torch.ones(span.width, stop, dtype=torch.bool).tril(start)
            query = rows.transpose(0, 1).to(keys.dtype)
            found = F.scaled_dot_product_attention(
                query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
            )
            mixed.append(found[0].transpose(0, 1).flatten(1))
        return torch.cat(mixed)


class TorchSpine:
    """`SpineOps` in torch."""

    def __init__(self, compute: TorchCompute, spine: Spine) -> None:
        self.spine, self.dtype = spine, compute.dtype
        self.readouts = [compute.matrix(weight) for weight in spine.readouts]
        self.writes = [compute.matrix(weight) for weight in spine.writes]
        self.mix = compute.matrix(spine.mix)
        self.head, self.sent = spine.head.detach().to(self.dtype), spine.sent.detach().to(self.dtype)

    def inject(
        self, layer: int, x: Float[Tensor, "row d_model"], anchor_codes: Float[Tensor, "block rank"]
    ) -> Float[Tensor, "row mixed"]:
        """See `SpineOps.inject`."""
        read = self.readouts[layer](x)
        features = F.normalize(read, dim=-1) * read.shape[-1] ** 0.5
        features = features.view(len(anchor_codes), -1, read.shape[-1])
        features[:, 0] = anchor_codes
        mixed = self.mix(features.flatten(0, 1))
        blocks = mixed.view(len(anchor_codes), -1, mixed.shape[-1])
        receiver, sent = blocks[:, 1:].chunk(3, dim=-1)[0], blocks[:, :-1, blocks.shape[-1] // 3 :]
        states = x.view(*blocks.shape[:2], -1)
        write = self.writes[layer](self._gated(receiver, sent))
        states[:, 1:] += _rms(states[:, 1:]) * write
        return mixed

    def transitions(
        self,
        states: Float[Tensor, "row d_model"],
        mixed: Float[Tensor, "row mixed"],
        candidates: Int[Tensor, "block draft_slot k"],
    ) -> Float[Tensor, "block draft_slot k k"]:
        """See `SpineOps.transitions`."""
        blocks, drafted, k = candidates.shape
        rows = mixed.view(blocks, drafted + 1, -1)
        receiver, anchor = rows[:, 1:, None].chunk(3, dim=-1)[0], rows[:, :1, None, rows.shape[-1] // 3 :]
        sent = torch.cat([anchor.expand(-1, -1, k, -1), self.sent[candidates[:, :-1]].float()], dim=1)
        state = states.view(blocks, drafted + 1, 1, -1)[:, 1:]
        refined = state + _rms(state) * self.writes[-1](self._gated(receiver, sent))
        refined = _norm(refined, self.spine.norm, self.spine.eps).to(self.dtype)
        return (refined @ self.head[candidates].transpose(-1, -2)).float()

    def _gated(self, receiver: Tensor, sent: Tensor) -> Tensor:
        """What goes through the gate: σ(receiver + predecessor + b) ⊙ message."""
        predecessor, message = sent.chunk(2, dim=-1)
        return torch.sigmoid(receiver + predecessor + self.spine.bias) * message


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, gain.shape, gain.float(), eps)


def _head_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    return x if gain is None else _norm(x, gain, eps)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(dim=-1, keepdim=True).sqrt()
