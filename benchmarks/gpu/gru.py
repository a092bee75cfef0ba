"""Domino's GRU head, greedy (arXiv 2605.29707): logits_t = U_t + W_o silu(W_p [h_t; s]), slot after slot.

The state s has consumed the anchor and every earlier proposal; the first proposal uses U alone. A slot is three
launches: state, projection, vocabulary. What depends on no earlier slot is made before: W_p's part of h_t in one
product for all slots, and the GRU's input product as a table over the vocabulary, as in `LayerInjection`.
Entry point: `gru_tokens`.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.serial_slot import Best, plan_slot, previous_token
from dspine_probe.decoding.kernels.launch import Launch, block, cdiv, dot, jit, pow2, tl, usable, widened


@dataclass(frozen=True)
class GRUHead:
    """Domino's head, in the layouts it is used in.

    inputs: W_ih E[v] for every token, gates in the order r, z, n. recurrent: W_hh. of_hidden, of_state: the two parts
    of W_p. out: W_o. No biases.
    """

    inputs: Float[Tensor, "vocab three_state"]
    recurrent: Float[Tensor, "three_state state"]
    of_hidden: Float[Tensor, "rank d_model"]
    of_state: Float[Tensor, "rank state"]
    out: Float[Tensor, "vocab rank"]


def gru_tokens(
    unary: Float[Tensor, "batch slot vocab"],
    hidden: Float[Tensor, "batch slot d_model"],
    anchors: Int[Tensor, "batch"],
    head: GRUHead,
) -> Int[Tensor, "batch slot"]:
    """The greedy rollout of a GRU head; `hidden` are the final-normed states."""
    if not usable(unary, hidden, anchors):
        return gru_reference(unary, hidden, anchors, head)
    launches, best = plan_gru(unary, F.linear(hidden, head.of_hidden), anchors, head)
    for launch in launches:
        launch.run()
    return best.chosen()


def gru_reference(
    unary: Float[Tensor, "batch slot vocab"],
    hidden: Float[Tensor, "batch slot d_model"],
    anchors: Int[Tensor, "batch"],
    head: GRUHead,
) -> Int[Tensor, "batch slot"]:
    """`gru_tokens` in torch."""
    state = hidden.new_zeros(len(anchors), head.recurrent.shape[1])
    token, path = anchors, []
    for slot, scores in enumerate(unary.unbind(1)):
        state = gru_step(state, token, head)
        if slot:
            inner = F.linear(hidden[:, slot], head.of_hidden) + F.linear(state, head.of_state)
            scores = scores + F.linear(F.silu(inner), head.out)
        token = scores.argmax(dim=-1)
        path.append(token)
    return torch.stack(path, dim=1)


def gru_step(
    state: Float[Tensor, "batch state"], token: Int[Tensor, "batch"], head: GRUHead
) -> Float[Tensor, "batch state"]:
    """The state after one more token (torch.nn.GRU without biases)."""
    given = F.embedding(token, head.inputs).chunk(3, dim=-1)
    kept = F.linear(state, head.recurrent).chunk(3, dim=-1)
    reset, update = (torch.sigmoid(given[gate] + kept[gate]) for gate in (0, 1))
    return (1 - update) * torch.tanh(given[2] + reset * kept[2]) + update * state


def plan_gru(
    unary: Float[Tensor, "batch slot vocab"],
    of_hidden: Float[Tensor, "batch slot rank"],
    anchors: Int[Tensor, "batch"],
    head: GRUHead,
) -> tuple[list[Launch], Best]:
    """Three launches a slot (two for the first) and the buffers they fill."""
    (batch, slots, _), (_, width) = unary.shape, head.recurrent.shape
    best = Best.empty(unary)
    states = of_hidden.new_zeros(slots + 1, batch, width)
    vectors = torch.empty_like(of_hidden[:, 0])
    launches = []
    for slot in range(slots):
        launches.append(_state(states, slot, best, anchors, head))
        if slot:
            launches.append(_projection(states, slot, of_hidden, vectors, head))
        launches.append(plan_slot(unary, slot, best, head.out, vectors=vectors, biased=slot > 0))
    return launches, best


def _state(states: Tensor, slot: int, best: Best, anchors: Tensor, head: GRUHead) -> Launch:
    _, batch, width = states.shape
    tile = block(batch, 32)
    return Launch(
        _state_kernel,
        (cdiv(width, 16), cdiv(batch, tile)),
        {
            "inputs": head.inputs,
            "recurrent": head.recurrent,
            "before": states[slot],
            "after": states[slot + 1],
            **best.before(slot, anchors),
            "batch": batch,
            "width": width,
        },
        {
            "ROWS": tile,
            "COLUMNS": 16,
            "DEPTH": block(width, 128),
            "PARTS": pow2(best.scores.shape[-1]),
            "FIRST": slot == 0,
            "WIDEN": widened(states.dtype),
        },
    )


def _projection(states: Tensor, slot: int, of_hidden: Tensor, vectors: Tensor, head: GRUHead) -> Launch:
    (_, batch, width), (_, slots, rank) = states.shape, of_hidden.shape
    tile = block(batch, 32)
    return Launch(
        _projection_kernel,
        (cdiv(rank, 16), cdiv(batch, tile)),
        {
            "states": states[slot + 1],
            "of_state": head.of_state,
            "of_hidden": of_hidden[:, slot],
            "vectors": vectors,
            "batch": batch,
            "slots": slots,
            "width": width,
            "rank": rank,
        },
        {"ROWS": tile, "COLUMNS": 16, "DEPTH": block(width, 128), "WIDEN": widened(states.dtype)},
    )


@jit
def _state_kernel(
    inputs, recurrent, before, after, anchors, scores, tokens, parts, batch, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = row < batch
    inside = here[:, None] & (column < width)
    token = previous_token(anchors, scores, tokens, row, here, parts, PARTS, FIRST)
    of_reset = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_update = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_new = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        s = tl.load(before + row[:, None] * width + depth, here[:, None] & (depth < width), 0.0)
        known = (column < width) & (depth[:, None] < width)
        w = recurrent + column * width + depth[:, None]
        of_reset = dot(s, tl.load(w, known, 0.0), of_reset, WIDEN)
        of_update = dot(s, tl.load(w + width * width, known, 0.0), of_update, WIDEN)
        of_new = dot(s, tl.load(w + 2 * width * width, known, 0.0), of_new, WIDEN)
    given = inputs + token[:, None] * (3 * width) + column
    reset = tl.sigmoid(tl.load(given, inside, 0.0).to(tl.float32) + of_reset)
    update = tl.sigmoid(tl.load(given + width, inside, 0.0).to(tl.float32) + of_update)
    new = tl.load(given + 2 * width, inside, 0.0).to(tl.float32) + reset * of_new
    new = 2 * tl.sigmoid(2 * new) - 1  # tanh
    old = tl.load(before + row[:, None] * width + column, inside, 0.0).to(tl.float32)
    state = (1 - update) * new + update * old
    tl.store(after + row[:, None] * width + column, state.to(after.dtype.element_ty), inside)


@jit
def _projection_kernel(
    states, of_state, of_hidden, vectors, batch, slots, width, rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = row < batch
    inside = here[:, None] & (column < rank)
    source = of_hidden + row[:, None] * slots * rank + column
    inner = tl.load(source, inside, 0.0).to(tl.float32)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        s = tl.load(states + row[:, None] * width + depth, here[:, None] & (depth < width), 0.0)
        known = (column < rank) & (depth[:, None] < width)
        w = tl.load(of_state + column * width + depth[:, None], known, 0.0)
        inner = dot(s, w, inner, WIDEN)
    out = inner * tl.sigmoid(inner)
    tl.store(vectors + row[:, None] * rank + column, out.to(vectors.dtype.element_ty), inside)
