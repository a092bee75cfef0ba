"""A new draft for a target: geometry copied from it, block and taps by the public defaults, vocabulary by frequency."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor

from dspine_probe.config import ConfigPart, DraftConfig, default_taps
from dspine_probe.drafts import Draft
from dspine_probe.drafts.registry import kind_named
from dspine_probe.errors import UsageError
from dspine_probe.target import Target, choose_mask_token


def new_draft(
    kind: str,
    target: Target,
    *,
    layers: int = 5,
    block_size: int = 8,
    taps: tuple[int, ...] | None = None,
    vocabulary: Int[Tensor, "draft_vocab"] | None = None,
    part: ConfigPart | None = None,
    mask_token_id: int | None = None,
    causal: bool | None = None,
) -> Draft:
    """An untrained draft of the target's own layer geometry.

    `kind` is a name from `drafts.registry`: "dflash" (bidirectional unless `causal`), "dspine" (always causal). `part`
    is the kind's own part of the config, by default what suits the target's width.
    """
    made = kind_named(kind)
    if made.part is not None and part is None:
        part = made.part.for_target(target.hidden_size)
    config = DraftConfig(
        architecture=made.architecture,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=made.layers or layers,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=choose_mask_token(target) if mask_token_id is None else mask_token_id,
        target_layer_ids=taps or default_taps(target.num_layers),
        num_target_layers=target.num_layers,
        is_causal=made.causal if causal is None else causal,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_positions,
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
        target_name=target.name,
        part=part,
    )
    draft: Draft = made.draft(config, target.embedding, target.head, vocabulary=vocabulary)
    return draft


def frequent_tokens(responses: Iterable[Iterable[int]], size: int, vocab_size: int) -> Int[Tensor, "draft_vocab"]:
    """The `size` tokens that occur most often in `responses`, in ascending order (ties: lower id first)."""
    if not 1 <= size <= vocab_size:
        raise UsageError(f"a draft vocabulary of {size} tokens does not fit the target's {vocab_size}.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for response in responses:
        counts += torch.bincount(torch.tensor(list(response)), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values
