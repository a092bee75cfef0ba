"""DSpark's Markov head, greedy (arXiv 2607.05147): logits_t = U_t + W₂ W₁[x_{t−1}], slot after slot, one launch each.

The whole vocabulary is scored in every slot, as the model is defined. Entry point: `markov_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.serial_slot import Best, plan_slot
from dspine_probe.decoding.kernels.launch import Launch, usable


@dataclass(frozen=True)
class MarkovHead:
    """A bigram matrix of low rank: row v of `first` describes v as predecessor, of `second` as successor."""

    first: Float[Tensor, "vocab rank"]
    second: Float[Tensor, "vocab rank"]


def markov_tokens(
    unary: Float[Tensor, "batch slot vocab"], anchors: Int[Tensor, "batch"], head: MarkovHead
) -> Int[Tensor, "batch slot"]:
    """The greedy rollout of a Markov head."""
    if not usable(unary, anchors):
        return markov_reference(unary, anchors, head)
    launches, best = plan_markov(unary, anchors, head)
    for launch in launches:
        launch.run()
    return best.chosen()


def markov_reference(
    unary: Float[Tensor, "batch slot vocab"], anchors: Int[Tensor, "batch"], head: MarkovHead
) -> Int[Tensor, "batch slot"]:
    """`markov_tokens` in torch."""
    token, path = anchors, []
    for scores in unary.unbind(1):
        token = (scores + F.linear(F.embedding(token, head.first), head.second)).argmax(dim=-1)
        path.append(token)
    return torch.stack(path, dim=1)


def plan_markov(
    unary: Float[Tensor, "batch slot vocab"], anchors: Int[Tensor, "batch"], head: MarkovHead
) -> tuple[list[Launch], Best]:
    """One launch a slot and the buffers they fill."""
    best = Best.empty(unary)
    return [
        plan_slot(unary, slot, best, head.second, vectors=head.first, anchors=anchors) for slot in range(unary.shape[1])
    ], best
