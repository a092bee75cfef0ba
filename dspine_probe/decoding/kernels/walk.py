"""The walk over the transition cache, slot by slot, in one launch for all blocks.

The scores of the next slot are fetched while the choice in this one is made, whatever that choice will be, so the chain
of dependent steps holds no memory access. Greedy: the best candidate after the one chosen before it, ties to the lower
index. Sampled: a candidate drawn from the softmax of that row, by the same rule as `sampling.pick`, and the
distribution it was drawn from. Entry points: `walk` on `PairParts`, which `unit_parts` makes of a finished table.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.kernels.last_write import PairParts
from dspine_probe.decoding.kernels.launch import Launch, cdiv, jit, pow2, run, tl, usable
from dspine_probe.drafts.proposal import Candidates, Proposal
from dspine_probe.drafts.transition import TransitionCache


def walk(
    parts: PairParts,
    candidates: Int[Tensor, "block draft_slot k"],
    *,
    temperature: float = 1.0,
    noise: Float[Tensor, "block draft_slot"] | None = None,
) -> Proposal:
    """Walk the table whose parts `pair_parts` left behind.

    Args:
        parts: sums to be added and normalised here.
        candidates: token ids.
        temperature: above 0; of the distributions that tokens are drawn from.
        noise: uniform numbers in [0, 1), one per slot; None takes the best candidates.
    """
    if usable(parts.products, candidates):
        return run(*plan_walk(parts, candidates, temperature, noise))
    table = TransitionCache(candidates, parts.scores())
    if noise is None:
        return Proposal(table.walk_greedy())
    tokens, probs = table.walk_sampled(temperature, noise)
    return Proposal(tokens, Candidates(candidates, probs))


def unit_parts(scores: Float[Tensor, "block draft_slot k k"]) -> PairParts:
    """Any table S[t, a, b] as parts, to be walked; all rows of slot 1 follow the anchor and must be equal."""
    return PairParts(scores[None], scores.new_ones(1, *scores.shape[:-1]), 1, 0.0)  # the norm divides by one


def plan_walk(
    parts: PairParts,
    candidates: Int[Tensor, "block draft_slot k"],
    temperature: float,
    noise: Float[Tensor, "block draft_slot"] | None,
    *,
    together: int = 1,
) -> tuple[list[Launch], Proposal]:
    """The launch and the buffers it fills; a program walks `together` blocks side by side."""
    (blocks, slots, k), products = candidates.shape, parts.products
    tokens = torch.empty_like(candidates[..., 0])
    probs = products if noise is None else products.new_empty(candidates.shape)  # not written when greedy
    inputs = {**vars(parts), "candidates": candidates, "noise": products if noise is None else noise}
    sizes = {"blocks": blocks, "slots": slots, "k": k, "temperature": float(temperature)}
    launch = Launch(
        _walk_kernel,
        (cdiv(blocks, together),),
        {**inputs, "tokens": tokens, "probs": probs, **sizes},
        {"BLOCKS": together, "K": pow2(k), "PARTS": len(products), "SAMPLED": noise is not None},
        warps=1 if together == 1 else 4,
    )
    return [launch], Proposal(tokens, None if noise is None else Candidates(candidates, probs))


@jit
def _table(
    products, squares, block, slot, here, blocks, slots, k, d_model, eps,
    K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """S[a, b] of one slot of the program's blocks."""
    a, b = tl.arange(0, K)[None, :, None], tl.arange(0, K)[None, None, :]
    cell = (block * slots + slot)[:, None, None]
    inside = here[:, None, None] & (a < k) & (b < k)
    product = tl.zeros([block.shape[0], K, K], tl.float32)
    square = tl.zeros([block.shape[0], K, 1], tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * blocks * slots + cell) * k + a
        product += tl.load(products + at * k + b, inside, 0.0)
        square += tl.load(squares + at, here[:, None, None] & (a < k), 1.0)
    return product * tl.rsqrt(square / d_model + eps)


@jit
def _walk_kernel(
    products, squares, candidates, noise, tokens, probs, blocks, slots, k, d_model, eps, temperature,
    BLOCKS: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    here = block < blocks
    lane = tl.arange(0, K)[None, :]
    real = lane < k
    choice = tl.zeros([BLOCKS], tl.int32)
    table = _table(products, squares, block, 0, here, blocks, slots, k, d_model, eps, K, PARTS)
    for slot in range(slots):
        later = tl.minimum(slot + 1, slots - 1)
        next_table = _table(products, squares, block, later, here, blocks, slots, k, d_model, eps, K, PARTS)
        after = tl.arange(0, K)[None, :, None] == choice[:, None, None]
        row = tl.where(real, tl.sum(tl.where(after, table, 0.0), 1), float("-inf"))
        cell = block * slots + slot
        if SAMPLED:
            weight = tl.exp((row - tl.max(row, 1)[:, None]) / temperature)
            weight = weight / tl.sum(weight, 1)[:, None]
            tl.store(probs + cell[:, None] * k + lane, weight, here[:, None] & real)
            running = tl.cumsum(weight.to(tl.float64), 1)
            at = tl.load(noise + cell, here, 0.0).to(tl.float64) * tl.max(running, 1)
            # The first possible candidate whose running share passes `at`; rounding may leave only the last one.
            possible = tl.where(weight > 0, lane, 0)
            passed = tl.where((running > at[:, None]) & (weight > 0), lane, K)
            choice = tl.minimum(tl.min(passed, 1), tl.max(possible, 1))
        else:
            choice = tl.argmax(row, 1)
        tl.store(tokens + cell, tl.load(candidates + cell * k + choice, here, 0), here)
        table = next_table
