"""Every kernel against its torch code in float64, on the same rounded inputs.

A kernel that computes numbers is judged by ‖out − reference‖ / ‖reference‖. One that chooses tokens is judged by
regret: the exact score of the best token less that of the chosen one, given the kernel's own earlier choices, over the
spread of the scores, so that a near-tie costs nothing and a wrong token costs much. Entry point: `check_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.gru import gru_step, gru_tokens
from benchmarks.gpu.markov import markov_tokens
from benchmarks.gpu.problem import Problem
from dspine_probe.decoding.kernels.block_attention import block_attention
from dspine_probe.decoding.kernels.candidates import top_candidates
from dspine_probe.decoding.kernels.injection import inject, read
from dspine_probe.decoding.kernels.last_write import pair_parts
from dspine_probe.decoding.kernels.launch import usable
from dspine_probe.decoding.kernels.layer_ops import Heads, LayerCache, rotate_and_store, silu_mul
from dspine_probe.decoding.kernels.walk import walk
from dspine_probe.drafts.transition import TransitionCache

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Check:
    """One comparison; `by` says what computed it."""

    kernel: str
    dtype: str
    error: float
    bound: float
    by: str

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the bound."""
        return self.error <= self.bound


def check_kernels(problem: Problem, kernels: Iterable[str] | None = None) -> list[Check]:
    """Run the entry functions (all, or those named in `COMPARISONS`) on the problem and compare."""
    dtype = problem.h.dtype
    by = "triton" if usable(problem.h) else "torch"
    return [
        Check(name, str(dtype).removeprefix("torch."), float(COMPARISONS[name](problem)), BOUNDS[dtype], by)
        for name in kernels or COMPARISONS
    ]


def _relative(out: Tensor, reference: Tensor) -> Tensor:
    return (out.double() - reference.double()).norm() / reference.double().norm()


def _injection(p: Problem) -> Tensor:
    weights, wide = p.refiner.weights, p.h.double()
    out, _ = inject(p.h, p.anchors, weights)
    exact, _ = inject(wide, p.anchors, weights)
    return _relative(out.double() - wide, exact - wide)  # of what was written, not of what was there


def _pairs(p: Problem) -> Tensor:
    scores = pair_parts(p.h, read(p.h, p.refiner.weights), p.pairs, p.refiner).scores()
    wide = p.h.double()
    exact = pair_parts(wide, read(wide, p.refiner.weights), p.pairs, p.refiner)
    return _relative(scores, exact.scores())


def _walk(p: Problem, *, sampled: bool) -> Tensor:
    """Given the same table, the very same choices; probabilities to fp32 rounding."""
    parts = pair_parts(p.h, read(p.h, p.refiner.weights), p.pairs, p.refiner)
    noise = p.noise if sampled else None
    ours = walk(parts, p.pairs.candidates, temperature=0.7, noise=noise)
    table = TransitionCache(p.pairs.candidates, parts.scores())
    if noise is None or ours.q is None:
        return (ours.tokens != table.walk_greedy()).double().mean()
    tokens, probs = table.walk_sampled(0.7, noise)
    return (ours.tokens != tokens).double().mean() + _relative(ours.q.probs, probs)


def _candidates(p: Problem) -> Tensor:
    """The values found are the values there are, and no index comes twice."""
    index = top_candidates(p.logits, p.sizes.k)
    repeated = (index.sort(dim=-1).values.diff(dim=-1) == 0).any().double()
    return repeated + _relative(p.logits.gather(-1, index), p.logits.topk(p.sizes.k, dim=-1).values)


def _rotation(p: Problem) -> Tensor:
    ours, exact = (LayerCache(c.keys.clone(), c.values.clone()) for c in (p.cache, _double(p.cache)))
    queries = rotate_and_store(p.qkv, p.heads, p.rotary, p.starts, ours)
    heads = replace(p.heads, q_norm=_wide(p.heads.q_norm), k_norm=_wide(p.heads.k_norm))
    expected = rotate_and_store(p.qkv.double(), heads, p.rotary, p.starts, exact)
    pairs = ((queries, expected), (ours.keys, exact.keys), (ours.values, exact.values))
    return torch.stack([_relative(*pair) for pair in pairs]).max()


def _attention(p: Problem, *, causal: bool) -> Tensor:
    queries = p.qkv.unflatten(-1, (-1, p.sizes.d_head))[:, : p.sizes.heads].contiguous()
    out = block_attention(queries, p.cache, p.starts, causal=causal)
    exact = block_attention(queries.double(), _double(p.cache), p.starts, causal=causal)
    return _relative(out, exact)


def _silu_mul(p: Problem) -> Tensor:
    gate, up = p.gate_up.double().chunk(2, dim=-1)
    return _relative(silu_mul(p.gate_up), F.silu(gate) * up)


def _regret(scores: Float[Tensor, "batch vocab"], token: Tensor) -> Tensor:
    lost = scores.amax(-1) - scores.gather(-1, token[:, None])[:, 0]
    return (lost / scores.std(-1)).max()


def _markov(p: Problem) -> Tensor:
    path = markov_tokens(p.logits, p.anchors, p.markov)
    token, regrets = p.anchors, []
    for slot in range(p.sizes.slots - 1):
        bias = F.embedding(token, p.markov.first).double() @ p.markov.second.double().T
        token = path[:, slot]
        regrets.append(_regret(p.logits[:, slot].double() + bias, token))
    return torch.stack(regrets).max()


def _gru(p: Problem) -> Tensor:
    path = gru_tokens(p.logits, p.hidden, p.anchors, p.gru)
    head = replace(p.gru, recurrent=p.gru.recurrent.double())
    state = p.hidden.new_zeros(p.sizes.batch, p.sizes.serial_state, dtype=torch.float64)
    token, regrets = p.anchors, []
    for slot in range(p.sizes.slots - 1):
        state = gru_step(state, token, head)
        scores = p.logits[:, slot].double()
        if slot:
            inner = p.hidden[:, slot].double() @ p.gru.of_hidden.double().T
            inner = inner + state @ p.gru.of_state.double().T
            scores = scores + F.silu(inner) @ p.gru.out.double().T
        token = path[:, slot]
        regrets.append(_regret(scores, token))
    return torch.stack(regrets).max()


def _double(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.keys.double(), cache.values.double())


def _wide(gain: Tensor | None) -> Tensor | None:
    return None if gain is None else gain.double()


def _no_norm(p: Problem) -> Problem:
    plain = Heads(p.heads.queries, p.heads.keys, p.heads.size, p.heads.eps, None, None)
    return replace(p, heads=plain)


COMPARISONS: dict[str, Callable[[Problem], Tensor]] = {
    "injection": _injection,
    "pair scores": _pairs,
    "walk, greedy": lambda p: _walk(p, sampled=False),
    "walk, sampled": lambda p: _walk(p, sampled=True),
    "candidates": _candidates,
    "rotate and store": _rotation,
    "rotate and store, no norms": lambda p: _rotation(_no_norm(p)),
    "attention, causal": lambda p: _attention(p, causal=True),
    "attention, both ways": lambda p: _attention(p, causal=False),
    "silu and product": _silu_mul,
    "Markov head": _markov,
    "GRU head": _gru,
}
