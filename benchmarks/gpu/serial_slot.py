"""One slot of a serial head: the best token over the whole vocabulary, given one vector per sequence.

Programs share the vocabulary out, and each leaves the best score and token of its part. The next launch begins by
taking the best of those parts, in every program by itself, so choosing costs no launch of its own. Used by `markov` and
`gru`. Ties go to the lower token id.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.kernels.launch import Launch, block, cdiv, dot, jit, pow2, tl, widened

PROGRAMS = 264  # that share the vocabulary: two for every multiprocessor of a large GPU


@dataclass(frozen=True)
class Best:
    """The best score and its token in every program's part of the vocabulary, for every slot."""

    scores: Float[Tensor, "slot batch part"]
    tokens: Int[Tensor, "slot batch part"]

    def chosen(self) -> Int[Tensor, "batch slot"]:
        """The best token of every slot."""
        part = self.scores.argmax(dim=-1, keepdim=True)
        return self.tokens.gather(-1, part).squeeze(-1).T.long()

    @classmethod
    def empty(cls, unary: Float[Tensor, "batch slot vocab"]) -> Best:
        """Buffers for every slot of these scores."""
        batch, slots, vocab = unary.shape
        scores = unary.new_empty(slots, batch, cdiv(vocab, _span(vocab)), dtype=torch.float32)
        return cls(scores, torch.empty_like(scores, dtype=torch.int32))

    def before(self, slot: int, anchors: Int[Tensor, "batch"]) -> dict[str, Any]:
        """Where a kernel finds the tokens before `slot`: the anchors, or the best of the slot before."""
        earlier = max(slot - 1, 0)
        found = {"anchors": anchors, "scores": self.scores[earlier], "tokens": self.tokens[earlier]}
        return {**found, "parts": self.scores.shape[-1]}


def _span(vocab: int) -> int:
    """Tokens of one program."""
    return cdiv(cdiv(vocab, PROGRAMS), 64) * 64


def plan_slot(
    unary: Tensor,
    slot: int,
    best: Best,
    rows: Tensor,
    *,
    vectors: Tensor,
    anchors: Tensor | None = None,
    biased: bool = True,
) -> Launch:
    """Best of U_t + rows · vector; with `anchors` the vector is that of the previous token, else the sequence's own."""
    batch, slots, vocab = unary.shape
    tile = block(batch, 64)
    previous = best.before(slot, unary if anchors is None else anchors)
    return Launch(
        _slot_kernel,
        (best.scores.shape[-1], cdiv(batch, tile)),
        {
            "unary": unary[:, slot],
            "rows": rows,
            "vectors": vectors,
            **previous,
            "best": best.scores[slot],
            "where": best.tokens[slot],
            "batch": batch,
            "slots": slots,
            "vocab": vocab,
            "rank": rows.shape[1],
            "span": _span(vocab),
        },
        {
            "ROWS": tile,
            "COLUMNS": 64,
            "DEPTH": block(rows.shape[1], 1 << 16 if tile == 16 else 64),
            "PARTS": pow2(best.scores.shape[-1]),
            "FIRST": slot == 0,
            "LOOKUP": anchors is not None,
            "BIASED": biased,
            "WIDEN": widened(rows.dtype),
        },
    )


@jit
def previous_token(anchors, scores, tokens, row, here, parts, PARTS: tl.constexpr, FIRST: tl.constexpr):
    """The token before this slot, of every row."""
    if FIRST:
        token = tl.load(anchors + row, here, 0)
    else:
        part = tl.arange(0, PARTS)
        inside = here[:, None] & (part < parts)
        place = row[:, None] * parts + part
        best = tl.argmax(tl.load(scores + place, inside, float("-inf")), 1)
        token = tl.load(tokens + row * parts + best, here, 0).to(tl.int64)
    return token


@jit
def _slot_kernel(
    unary, rows, vectors, anchors, scores, tokens, best, where, parts, batch, slots, vocab, rank, span,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, LOOKUP: tl.constexpr, BIASED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = row < batch
    vector = row.to(tl.int64)
    if LOOKUP:
        vector = previous_token(anchors, scores, tokens, row, here, parts, PARTS, FIRST)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    place = tl.zeros([ROWS], tl.int32)
    first = tl.program_id(0) * span
    for at in range(first, first + span, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        inside = here[:, None] & (column < vocab)
        source = row.to(tl.int64)[:, None] * slots * vocab + column
        score = tl.load(unary + source, inside, float("-inf")).to(tl.float32)
        if BIASED:
            for start in range(0, rank, DEPTH):
                depth = start + tl.arange(0, DEPTH)
                x = tl.load(vectors + vector[:, None] * rank + depth, here[:, None] & (depth < rank), 0.0)
                known = (column < vocab) & (depth[:, None] < rank)
                w = tl.load(rows + column.to(tl.int64) * rank + depth[:, None], known, 0.0)
                score = dot(x, w, score, WIDEN)
        value, index = tl.max(score, 1, return_indices=True)
        better = value > peak
        peak = tl.where(better, value, peak)
        place = tl.where(better, at + index, place)
    out = row * parts + tl.program_id(0)
    tl.store(best + out, peak, here)
    tl.store(where + out, place, here)
