"""The K best entries of rows as long as a vocabulary, in two launches.

The first takes the best K of every span of a row by K rounds of maximum-and-remove in registers; the second does the
same over what the spans left. Equal entries come in the order of their index. Entry point: `top_candidates`.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.kernels.launch import Launch, block, cdiv, jit, pow2, run, tl, usable

SPAN = 2048
MOST_K = 64  # rounds are serial; beyond this a sort is the better way


def top_candidates(scores: Float[Tensor, "*batch vocab"], k: int) -> Int[Tensor, "*batch k"]:
    """Indices of the k largest scores of every row, best first; in torch the order of equals is torch's."""
    if not usable(scores) or k > MOST_K:
        return scores.topk(k, dim=-1).indices
    return run(*plan_top(scores.flatten(0, -2), k)).view(*scores.shape[:-1], k)


def plan_top(scores: Float[Tensor, "row vocab"], k: int) -> tuple[list[Launch], Int[Tensor, "row k"]]:
    """The two launches and the buffer the second fills."""
    rows, vocab = scores.shape
    span = block(vocab, SPAN)
    spans = cdiv(vocab, span)
    best = scores.new_empty(rows, spans * k, dtype=torch.float32)
    where = scores.new_empty(rows, spans * k, dtype=torch.int64)
    found = torch.empty_like(best[:, :k])
    index = scores.new_empty(rows, k, dtype=torch.int64)
    first = {"scores": scores, "names": where, "best": best, "index": where}  # an entry's name is its place
    second = {"scores": best, "names": where, "best": found, "index": index}
    spread = Launch(
        _top_kernel,
        (spans, rows),
        {**first, "length": vocab, "width": spans * k, "k": k},
        {"SPAN": span, "NAMED": False},
    )
    gather = Launch(
        _top_kernel,
        (1, rows),
        {**second, "length": spans * k, "width": k, "k": k},
        {"SPAN": pow2(spans * k), "NAMED": True},
        warps=8,
    )
    return [spread, gather], index


@jit
def _top_kernel(scores, names, best, index, length, width, k, SPAN: tl.constexpr, NAMED: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    left = tl.load(scores + row * length + at, at < length, float("-inf")).to(tl.float32)
    name = tl.load(names + row * length + at, at < length, -1) if NAMED else at.to(tl.int64)
    alive = (at < length) & (name >= 0)
    out = row * width + tl.program_id(0) * k
    for rank in range(k):
        value = tl.max(tl.where(alive, left, float("-inf")), 0)
        place = tl.min(tl.where(alive & (left == value), at, 2147483647), 0)
        tl.store(best + out + rank, value)
        tl.store(index + out + rank, tl.max(tl.where(at == place, name, -1), 0))  # -1: nothing was left
        alive = alive & (at != place)
