"""A new draft for a target: geometry copied from it, block and taps by the public defaults, vocabulary by frequency."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor

from dspine_probe.config import DFLASH, DSPINE, DraftConfig, DSpineConfig, default_taps
from dspine_probe.drafts import DFlash, Draft, DSpine
from dspine_probe.errors import UsageError
from dspine_probe.target import Target, choose_mask_token

KINDS = {"dflash": DFLASH, "dspine": DSPINE}


def new_draft(
    kind: str,
    target: Target,
    *,
    layers: int = 5,
    block_size: int = 8,
    taps: tuple[int, ...] | None = None,
    vocabulary: Int[Tensor, "draft_vocab"] | None = None,
    spine: DSpineConfig | None = None,
    mask_token_id: int | None = None,
    causal: bool | None = None,
) -> Draft:
    """An untrained draft of the target's own layer geometry.

    `kind` is "dflash" (bidirectional unless `causal`) or "dspine" (always causal). `spine` defaults to a third of the
    hidden size as transfer rank and two ninths as message, the embedded default's 192 and 128.
    """
    if kind not in KINDS:
        raise UsageError(f"draft kind {kind!r} is unknown; use one of {', '.join(KINDS)}.")
    is_spine = kind == "dspine"
    if is_spine and spine is None:
        spine = DSpineConfig(transfer_rank=target.hidden_size // 3, message_size=target.hidden_size * 2 // 9)
    config = DraftConfig(
        architecture=KINDS[kind],
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=choose_mask_token(target) if mask_token_id is None else mask_token_id,
        target_layer_ids=taps or default_taps(target.num_layers),
        num_target_layers=target.num_layers,
        is_causal=is_spine if causal is None else causal,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_positions,
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
        target_name=target.name,
        dspine=spine if is_spine else None,
    )
    return (DSpine if is_spine else DFlash)(config, target.embedding, target.head, vocabulary=vocabulary)


def frequent_tokens(
    responses: Iterable[Iterable[int]], size: int, vocab_size: int
) -> Int[Tensor, "draft_vocab"]:
    """The `size` tokens that occur most often in `responses`, in ascending order (ties: lower id first)."""
    if not 1 <= size <= vocab_size:
        raise UsageError(f"a draft vocabulary of {size} tokens does not fit the target's {vocab_size}.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for response in responses:
        counts += torch.bincount(torch.tensor(list(response)), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values
