"""Attention of a block of new slots over the cache they were just written to, with the keys split over programs.

One query row per slot and head leaves a GPU idle if a program owns all keys of a head, so the keys are cut into splits:
the first launch leaves, per split, the running maximum, the sum of weights and the weighted values; the second joins
them (flash decoding). Query heads that share a key head are rows of one tile, which reads keys and values once.

Slot s of sequence b stands at position starts[b] + s and sees every position up to its own (causal) or up to the
block's last. Positions behind the block may hold anything. Entry point: `block_attention`.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.kernels.launch import Launch, block, cdiv, dot, jit, pow2, run, tl, usable, widened
from dspine_probe.decoding.kernels.layer_ops import LayerCache

KEYS = 64  # of a step
PROGRAMS = 264  # two for every multiprocessor of a large GPU
MOST_SPLITS = 32
PIECE = 64  # slots that a prompt is read by; any number works, and this one fills the tiles


def block_attention(
    queries: Float[Tensor, "row head d_head"], cache: LayerCache, starts: Int[Tensor, "batch"], *, causal: bool
) -> Float[Tensor, "row heads_d_head"]:
    """softmax(q kᵀ / √d_head) v for every slot of every sequence."""
    if usable(queries, cache.keys, cache.values):
        return run(*plan_attention(queries, cache, starts, causal=causal))
    batch, (rows, heads, size) = len(starts), queries.shape
    slots, group = rows // batch, heads // cache.keys.shape[1]
    last = torch.arange(slots, device=starts.device) if causal else torch.full_like(starts, slots - 1)[:1]
    limit = (starts[:, None] + last).expand(batch, slots)
    hidden = torch.arange(cache.keys.shape[2], device=starts.device) > limit[..., None]
    q = queries.view(batch, slots, -1, group, size).permute(0, 2, 3, 1, 4)  # batch kv_head group slot d_head
    scores = (q @ cache.keys[:, :, None].transpose(-1, -2)) * size**-0.5
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    mixed = scores.softmax(dim=-1) @ cache.values[:, :, None]
    return mixed.permute(0, 3, 1, 2, 4).reshape(rows, heads * size)


def plan_attention(
    queries: Float[Tensor, "row head d_head"], cache: LayerCache, starts: Int[Tensor, "batch"], *, causal: bool
) -> tuple[list[Launch], Float[Tensor, "row heads_d_head"]]:
    """The two launches and the buffer that the second fills."""
    batch, (rows, heads, size) = len(starts), queries.shape
    _, key_heads, capacity, _ = cache.keys.shape
    slots, group = rows // batch, heads // key_heads
    tile = block(slots * group, 64)
    tiles = cdiv(slots * group, tile)
    splits = max(1, min(MOST_SPLITS, PROGRAMS // (batch * key_heads * tiles), cdiv(capacity, 2 * KEYS)))
    mixed = queries.new_empty(splits, rows * heads, size, dtype=torch.float32)
    peaks, sums = (queries.new_empty(splits, rows * heads, dtype=torch.float32) for _ in range(2))
    out = queries.new_empty(rows, heads * size)
    sizes = {"slots": slots, "heads": heads, "key_heads": key_heads, "size": size}
    parts = {"mixed": mixed, "peaks": peaks, "sums": sums}
    spread = Launch(
        _split_kernel,
        (splits, key_heads * tiles, batch),
        {"queries": queries, "keys": cache.keys, "values": cache.values, "starts": starts, **parts}
        | {**sizes, "capacity": capacity, "splits": splits, "tiles": tiles, "scale": size**-0.5},
        {"ROWS": tile, "KEYS": KEYS, "SIZE": block(size, 1 << 16), "CAUSAL": causal, "WIDEN": widened(queries.dtype)},
        warps=8 if tile == 64 else 4,
        stages=2,
    )
    join = Launch(
        _join_kernel,
        (rows * heads,),
        {**parts, "out": out, "splits": splits, "size": size, "total": rows * heads},
        {"SPLITS": pow2(splits), "SIZE": pow2(size)},
        warps=1,
    )
    return [spread, join], out


@jit
def _split_kernel(
    queries, keys, values, starts, mixed, peaks, sums, slots, heads, key_heads, size, capacity, splits,
    tiles, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    split, sequence = tl.program_id(0), tl.program_id(2)
    key_head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    group = heads // key_heads
    lane = tile * ROWS + tl.arange(0, ROWS)
    slot, head = lane // group, key_head * group + lane % group
    here = slot < slots
    feature = tl.arange(0, SIZE)
    row = ((sequence * slots + slot) * heads + head).to(tl.int64)
    q = tl.load(queries + row[:, None] * size + feature, here[:, None] & (feature < size), 0.0)

    start = tl.load(starts + sequence).to(tl.int32)
    end = start + slots
    limit = start + slot if CAUSAL else start + slot * 0 + slots - 1
    share = tl.cdiv(tl.cdiv(end, splits), KEYS) * KEYS
    first = split * share
    after = tl.minimum(first + share, end)
    own = (sequence * key_heads + key_head).to(tl.int64) * capacity
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_of_values = tl.zeros([ROWS, SIZE], tl.float32)
    for at in range(first, after, KEYS):
        key = at + tl.arange(0, KEYS)
        exists = key < after
        place = (own + key) * size
        k = tl.load(keys + place + feature[:, None], exists & (feature[:, None] < size), 0.0)
        score = dot(q, k, tl.zeros([ROWS, KEYS], tl.float32), WIDEN) * scale
        score = tl.where(exists & (key <= limit[:, None]), score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        weight = tl.exp(score - base[:, None])
        fade = tl.exp(peak - base)
        v = tl.load(values + place[:, None] + feature, exists[:, None] & (feature < size), 0.0)
        sum_of_values = dot(weight.to(v.dtype), v, sum_of_values * fade[:, None], WIDEN)
        total = total * fade + tl.sum(weight, 1)
        peak = higher
    target = split * (tl.num_programs(2) * slots * heads).to(tl.int64) + row
    tl.store(peaks + target, peak, here)
    tl.store(sums + target, total, here)
    tl.store(mixed + target[:, None] * size + feature, sum_of_values, here[:, None] & (feature < size))


@jit
def _join_kernel(mixed, peaks, sums, out, splits, size, total, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split, feature = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    place = split * total + row
    peak = tl.load(peaks + place, split < splits, float("-inf"))
    weight = tl.exp(peak - tl.max(peak, 0))
    whole = tl.sum(weight * tl.load(sums + place, split < splits, 0.0), 0)
    inside = (split < splits)[:, None] & (feature < size)
    parts = tl.load(mixed + place[:, None] * size + feature, inside, 0.0)
    joined = tl.sum(parts * weight[:, None], 0) / whole
    tl.store(out + row * size + feature, joined.to(out.dtype.element_ty), feature < size)
