"""What a decoder layer does between its matrix products, each in one launch.

`rotate_and_store`: per-head norms of queries and keys, rotary embedding, and the new keys and values put into the cache
at every row's own position. `silu_mul`: the gate of the MLP. Rows are the slots of all sequences, sequence by sequence;
slot s of sequence b stands at position starts[b] + s.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.kernels.launch import Launch, block, cdiv, jit, pow2, run, tl, usable


@dataclass(frozen=True)
class Heads:
    """How the rows of a fused q/k/v product are cut, and the norms of query and key heads (None: no norm)."""

    queries: int
    keys: int
    size: int
    eps: float
    q_norm: Float[Tensor, "d_head"] | None
    k_norm: Float[Tensor, "d_head"] | None


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, every sequence from position 0."""

    keys: Float[Tensor, "batch kv_head position d_head"]
    values: Float[Tensor, "batch kv_head position d_head"]


@dataclass(frozen=True)
class HalfRotary:
    """cos and sin of the rotary angles, first half of the head (the second half repeats it), fp32."""

    cos: Float[Tensor, "position half"]
    sin: Float[Tensor, "position half"]


def rotate_and_store(
    qkv: Float[Tensor, "row fused"], heads: Heads, rotary: HalfRotary, starts: Int[Tensor, "batch"], cache: LayerCache
) -> Float[Tensor, "row head d_head"]:
    """The rotated queries; keys and values go into `cache`, from a product without query heads (queries = 0) too.

    Every position starts[b] + slot must lie inside the cache and the rotary tables.
    """
    if usable(qkv, cache.keys, cache.values):
        return run(*plan_rotate(qkv, heads, rotary, starts, cache))
    batch, slots = len(starts), len(qkv) // len(starts)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    every = qkv.view(len(qkv), -1, heads.size).to(wide)
    q, k, v = every.split([heads.queries, heads.keys, heads.keys], dim=1)
    at = starts[:, None] + torch.arange(slots, device=starts.device)
    cos, sin = (table[at].flatten(0, 1)[:, None].to(wide) for table in (rotary.cos, rotary.sin))

    def turned(x: Tensor, gain: Tensor | None) -> Tensor:
        if gain is not None:
            x = F.rms_norm(x, (heads.size,), gain.to(wide), heads.eps)
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(qkv.dtype)

    owner = torch.arange(batch, device=starts.device)[:, None]
    cache.keys[owner, :, at] = turned(k, heads.k_norm).unflatten(0, (batch, slots))
    cache.values[owner, :, at] = v.to(qkv.dtype).unflatten(0, (batch, slots))
    return turned(q, heads.q_norm)


def silu_mul(gate_up: Float[Tensor, "row two_inner"]) -> Float[Tensor, "row inner"]:
    """silu(gate) ⊙ up of a fused product [gate; up]."""
    if usable(gate_up):
        return run(*plan_silu_mul(gate_up))
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def plan_rotate(
    qkv: Float[Tensor, "row fused"], heads: Heads, rotary: HalfRotary, starts: Int[Tensor, "batch"], cache: LayerCache
) -> tuple[list[Launch], Float[Tensor, "row head d_head"]]:
    """The launch and the queries' buffer."""
    rows = len(qkv)
    rotated = qkv.new_empty(rows, heads.queries, heads.size)
    norms = {"q_norm": heads.q_norm, "k_norm": heads.k_norm}
    inputs = {"qkv": qkv, **{name: qkv if gain is None else gain for name, gain in norms.items()}, **vars(rotary)}
    sizes = {"query_heads": heads.queries, "key_heads": heads.keys, "half": heads.size // 2, "eps": heads.eps}
    launch = Launch(
        _rotate_kernel,
        (rows, heads.queries + 2 * heads.keys),
        {**inputs, "starts": starts, "rotated": rotated, **vars(cache)}
        | {"slots": rows // len(starts), "capacity": cache.keys.shape[2], **sizes},
        {"HALF": pow2(heads.size // 2), "NORMED": heads.k_norm is not None},
        warps=1,
    )
    return [launch], rotated


def plan_silu_mul(gate_up: Float[Tensor, "row two_inner"]) -> tuple[list[Launch], Float[Tensor, "row inner"]]:
    """The launch and the buffer it fills."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    size = block(inner, 1024)
    out = gate_up.new_empty(rows, inner)
    arguments = {"gate_up": gate_up, "out": out, "inner": inner}
    return [Launch(_silu_mul_kernel, (cdiv(inner, size), rows), arguments, {"COLUMNS": size})], out


@jit
def _rotate_kernel(
    qkv, q_norm, k_norm, cos, sin, starts, rotated, keys, values, slots, capacity, query_heads, key_heads,
    half, eps,
    HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    sequence = row // slots
    position = tl.load(starts + sequence).to(tl.int64) + row % slots
    lane = tl.arange(0, HALF)
    here = lane < half
    source = qkv + (row.to(tl.int64) * (query_heads + 2 * key_heads) + head) * (2 * half) + lane
    low = tl.load(source, here, 0.0).to(tl.float32)
    high = tl.load(source + half, here, 0.0).to(tl.float32)
    is_query, is_value = head < query_heads, head >= query_heads + key_heads
    if not is_value:
        if NORMED:
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * half) + eps)
            gain = q_norm if is_query else k_norm
            low *= scale * tl.load(gain + lane, here, 0.0).to(tl.float32)
            high *= scale * tl.load(gain + half + lane, here, 0.0).to(tl.float32)
        c = tl.load(cos + position * half + lane, here, 0.0)
        s = tl.load(sin + position * half + lane, here, 0.0)
        low, high = low * c - high * s, high * c + low * s
    if is_query:
        target = rotated + (row.to(tl.int64) * query_heads + head) * (2 * half)
    else:
        own = (head - query_heads) % key_heads
        place = ((sequence * key_heads + own).to(tl.int64) * capacity + position) * (2 * half)
        target = values + place if is_value else keys + place
    tl.store(target + lane, low.to(target.dtype.element_ty), here)
    tl.store(target + half + lane, high.to(target.dtype.element_ty), here)


@jit
def _silu_mul_kernel(gate_up, out, inner, COLUMNS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, here, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, here, 0.0).to(tl.float32)
    tl.store(out + row * inner + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), here)
