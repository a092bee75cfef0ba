"""The last write repeated for every candidate predecessor, and the scores of all adjacent pairs, in one launch.

For slot t with state h before the last injection and a known predecessor a (drafts: `DSpine.refine`):

    x(a) = h + rms(h) · W (σ(G_r f + G_p √r e_a + b) ⊙ M √r e_a)        ρ(a) = γ ⊙ x(a) / rms(x(a))
    S[a, b] = ρ(a) · w_b                                                for every candidate b of slot t

G_r f comes from the last layer's `LayerReads`, the code terms from its tables, and 1 / rms(x(a)) is one number a row.
So a program can take a slice of d_model on its own and leave its part of Σ γ x w and of Σ x² behind; the walk adds the
parts up. Nothing of size candidates × d_model is ever stored. Entry points: `pair_parts`, `PairParts.scores`.

A cell is one draft slot of one block. Where the draft's vocabulary is trimmed, `index` names the rows of its head.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.kernels.injection import LayerInjection, LayerReads, feature_scale, shared_arguments
from dspine_probe.decoding.kernels.launch import Launch, block, cdiv, dot, jit, pow2, run, tl, usable, widened

SLICE = 512  # of d_model, for one program


@dataclass(frozen=True)
class Refiner:
    """What the last write and the scores need: the last injection, the final norm γ with its ε, and the head."""

    weights: LayerInjection
    norm: Float[Tensor, "d_model"]
    eps: float
    head: Float[Tensor, "draft_vocab d_model"]


@dataclass(frozen=True)
class Pairs:
    """The candidates of every draft slot: token ids, their rows in the head, and the block's anchor token."""

    candidates: Int[Tensor, "block draft_slot k"]
    index: Int[Tensor, "block draft_slot k"]
    anchors: Int[Tensor, "block"]


@dataclass(frozen=True)
class PairParts:
    """Parts of Σ γ x(a) w_b and of Σ x(a)², one per slice of d_model, to be summed over the first axis."""

    products: Float[Tensor, "part block draft_slot k k"]
    squares: Float[Tensor, "part block draft_slot k"]
    d_model: int
    eps: float

    def scores(self) -> Float[Tensor, "block draft_slot k k"]:
        """S[t, a, b]."""
        mean = self.squares.sum(0) / self.d_model
        return self.products.sum(0) * (mean + self.eps).rsqrt()[..., None]


def pair_parts(
    pre_write: Float[Tensor, "row d_model"], readings: LayerReads, pairs: Pairs, refiner: Refiner
) -> PairParts:
    """All pair scores of all blocks; in torch as a single part.

    `pre_write` and `readings` cover every slot, the anchors' included.
    """
    weights = refiner.weights
    if usable(pre_write, pairs.candidates, pairs.index, pairs.anchors):
        return run(*plan_pairs(pre_write, readings, pairs, refiner))
    blocks, _, k = pairs.candidates.shape
    anchors = pairs.anchors[:, None, None].expand(-1, 1, k)
    tokens = torch.cat([anchors, pairs.candidates[:, :-1]], dim=1)
    receiver = readings.scaled(weights.rank)[:, : len(weights.bias)].unflatten(0, (blocks, -1))[:, 1:, None]
    wide = receiver.dtype
    gate = torch.sigmoid(receiver + F.embedding(tokens, weights.gate_table) + weights.bias)
    written = F.linear(gate * F.embedding(tokens, weights.message_table), weights.write.to(wide))
    h = pre_write.to(wide).unflatten(0, (blocks, -1))[:, 1:, None]
    x = h + h.square().mean(-1, keepdim=True).sqrt() * written
    products = (x * refiner.norm) @ F.embedding(pairs.index, refiner.head).to(wide).transpose(-1, -2)
    return PairParts(products[None], x.square().sum(-1)[None], pre_write.shape[1], refiner.eps)


def plan_pairs(
    pre_write: Float[Tensor, "row d_model"], readings: LayerReads, pairs: Pairs, refiner: Refiner
) -> tuple[list[Launch], PairParts]:
    """The launch and the buffers it fills."""
    (rows, d_model), (blocks, draft_slots, k) = pre_write.shape, pairs.candidates.shape
    cells, lanes = blocks * draft_slots, block(k, 1 << 16)
    # Few cells: one at a time and wide slices. Many: four at a time, which reads the write matrix a quarter as often;
    # the products between different cells of a group are formed and dropped.
    group = 1 if cells * lanes <= 256 else max(1, 64 // lanes)
    size = block(d_model, 128)
    slices = cdiv(d_model, SLICE)
    parts = PairParts(
        pre_write.new_empty(slices, *pairs.candidates.shape, k, dtype=torch.float32),
        pre_write.new_empty(slices, *pairs.candidates.shape, dtype=torch.float32),
        d_model,
        refiner.eps,
    )
    inputs = {"h": pre_write, **shared_arguments(readings, refiner.weights), "norm": refiner.norm, "head": refiner.head}
    outputs = {"products": parts.products, "squares": parts.squares}
    sizes = {"rows": rows, "cells": cells, "draft_slots": draft_slots, "k": k, "d_model": d_model}
    tiles = {"GROUP": group, "LANES": lanes, "COLUMNS": size, "TILES": cdiv(min(SLICE, d_model), size)}
    depths = {"DEPTH": block(len(refiner.weights.bias), 64 if group == 1 else 32)}
    launch = Launch(
        _pair_kernel,
        (slices, cdiv(cells, group)),
        inputs | vars(pairs) | outputs | sizes,
        {**tiles, **depths, "PARTS": pow2(len(readings.read_squares)), "WIDEN": widened(pre_write.dtype)},
        warps=8,
        stages=4 if group == 1 else 2,
    )
    return [launch], parts


@jit
def _pair_kernel(
    h, projected, read_squares, receiver_squares, write, bias, message_table, gate_table, norm, head,
    candidates, index, anchors, products, squares, rows, cells, draft_slots, k, d_model, root, message,
    parts,
    GROUP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
    DEPTH: tl.constexpr, PARTS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    lane = tl.arange(0, GROUP * LANES)  # a lane is one candidate of one cell of the group
    own, which = tl.program_id(1) * GROUP + lane // LANES, lane % LANES
    here = (own < cells) & (which < k)
    slot, owner = own % draft_slots, own // draft_slots
    row = owner * (draft_slots + 1) + slot + 1
    anchor = tl.load(anchors + owner, here, 0)
    earlier = tl.load(candidates + (own - 1) * k + which, here & (slot > 0), 0)
    token = tl.where(slot > 0, earlier, anchor)
    scale = feature_scale(read_squares, row, here, rows, root, parts, PARTS)
    rms = tl.sqrt(tl.load(receiver_squares + row, here, 0.0) / d_model)

    product = tl.zeros([GROUP * LANES, GROUP * LANES], tl.float32)
    total = tl.zeros([GROUP * LANES], tl.float32)
    chosen = tl.load(index + own * k + which, here, 0)
    for tile in range(TILES):
        column = (part * TILES + tile) * COLUMNS + tl.arange(0, COLUMNS)
        written = tl.zeros([GROUP * LANES, COLUMNS], tl.float32)
        for start in range(0, message, DEPTH):
            at = start + tl.arange(0, DEPTH)
            inside = here[:, None] & (at < message)
            gate = tl.load(projected + row[:, None] * (3 * message) + at, inside, 0.0) * scale[:, None]
            gate += tl.load(bias + at, at < message, 0.0).to(tl.float32)
            gate += tl.load(gate_table + token[:, None] * message + at, inside, 0.0).to(tl.float32)
            sent = tl.load(message_table + token[:, None] * message + at, inside, 0.0).to(tl.float32)
            w_inside = (column < d_model) & (at[:, None] < message)
            w = tl.load(write + column * message + at[:, None], w_inside, 0.0)
            written = dot((tl.sigmoid(gate) * sent).to(w.dtype), w, written, WIDEN)
        inside = here[:, None] & (column < d_model)
        x = tl.load(h + row[:, None] * d_model + column, inside, 0.0).to(tl.float32)
        x = x + rms[:, None] * written
        total += tl.sum(x * x, 1)
        gain = tl.load(norm + column, column < d_model, 0.0).to(tl.float32)
        successors = tl.load(head + chosen[:, None] * d_model + column, inside, 0.0)
        product = dot((x * gain).to(successors.dtype), tl.trans(successors), product, WIDEN)

    place = part * cells * k + own * k + which
    tl.store(squares + place, total, here)
    same = own[:, None] == own[None, :]
    tl.store(products + place[:, None] * k + which, product, same & here[:, None] & here[None, :])
