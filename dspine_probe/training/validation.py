"""How a draft does on held-out text while it trains: tokens it would commit from a fixed set of anchors.

Averaged over all anchors, this is not the acceptance length of decoding, where long runs skip anchors
(`decoding.offline` walks those), but it moves with it and needs one pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.precision import Precision
from dspine_probe.training.anchors import valid_anchors
from dspine_probe.training.features import FeatureStore, Sequence


@dataclass(frozen=True)
class Validation:
    """Mean tokens per anchor (bonus included) and the share of anchors whose first k slots are all right."""

    tokens_per_anchor: float
    survival: tuple[float, ...]
    anchors: int


def split(ids: Seq[str], *, every: int = 50) -> tuple[list[int], list[int]]:
    """Indices for training and validation; about one in `every`, chosen by its id alone, is held out."""
    held = [int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % every == 0 for name in ids]
    return [i for i, out in enumerate(held) if not out], [i for i, out in enumerate(held) if out]


@torch.no_grad()
def validate(
    draft: Draft, store: FeatureStore, indices: Seq[int], *, precision: Precision, anchors: int = 16
) -> Validation:
    """Draft greedily from the anchors that `held_out_anchors` chooses."""
    device = draft.head.device
    hits = [
        _accepted(draft, sequence.tokens.to(device), sequence.taps.to(device), chosen.to(device), precision)
        for sequence in (store[i] for i in indices)
        if len(chosen := held_out_anchors(sequence, draft.config.num_slots, anchors))
    ]
    if not hits:
        return Validation(float("nan"), (), 0)
    accepted = torch.cat(hits).float()
    slots = torch.arange(1, draft.config.num_slots + 1)
    survival = (accepted[:, None] >= slots).float().mean(0)
    return Validation(float(accepted.mean()) + 1.0, tuple(survival.tolist()), len(accepted))


def held_out_anchors(sequence: Sequence, slots: int, count: int) -> Int[Tensor, "anchor"]:
    """Up to `count` evenly spaced anchors with a full block of `slots` tokens ahead of them."""
    anchors = valid_anchors(sequence)[:-slots]
    return anchors[:: max(1, len(anchors) // count)][:count]


def _accepted(
    draft: Draft,
    tokens: Int[Tensor, "n"],
    taps: Float[Tensor, "n taps_d_model"],
    anchors: Int[Tensor, "anchor"],
    precision: Precision,
) -> Int[Tensor, "anchor"]:
    """Length of the right prefix of each block."""
    with precision.autocast(taps.device):
        following = tokens[None].roll(-1, dims=1)
        context = draft.encode_context(taps[None].to(draft.fc.weight.dtype), following=following)
        drafted = draft.draft_greedy(context, tokens[anchors][None], anchors[None])
    labels = tokens[anchors[:, None] + torch.arange(1, drafted.shape[1] + 1, device=tokens.device)]
    return (drafted == labels).long().cumprod(dim=-1).sum(dim=-1).cpu()
