"""Sizes and weights of targets and drafts in the plain form that the fast engines pack or fuse.

What those engines do not compute (other architectures, biases, activations, attentions) is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.drafts.layers import Rotary, rotary_tables
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

SUPPORTED = ("llama", "qwen3")
DRAFTS = ("dflash", "dspine")


@dataclass(frozen=True)
class StackSizes:
    """Sizes that the layers of a stack share. `causal`: whether a token sees only what stands before it."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    causal: bool


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer; `norm_q` and `norm_k` are None where heads are not normed."""

    q: Float[Tensor, "heads_d_head d_model"]
    k: Float[Tensor, "kv_heads_d_head d_model"]
    v: Float[Tensor, "kv_heads_d_head d_model"]
    out: Float[Tensor, "d_model heads_d_head"]
    gate: Float[Tensor, "d_mlp d_model"]
    up: Float[Tensor, "d_mlp d_model"]
    down: Float[Tensor, "d_model d_mlp"]
    norm_in: Float[Tensor, "d_model"]
    norm_mlp: Float[Tensor, "d_model"]
    norm_q: Float[Tensor, "d_head"] | None
    norm_k: Float[Tensor, "d_head"] | None


def target_sizes(target: Target) -> StackSizes:
    """Sizes of the target's layers.

    Raises:
        UsageError: the target is built in a way that the fast engines do not compute.
    """
    config = target.config
    rope = getattr(config, "rope_parameters", None) or {}
    turned = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1
    faults = {
        f"the type {target.model.config.model_type!r}": target.model.config.model_type not in SUPPORTED,
        "sliding-window attention": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
        "a rope that depends on length": rope.get("rope_type") in ("dynamic", "longrope"),
        f"rotary embedding of {turned} of each head": turned != 1,
        "biases": any(getattr(part, "bias", None) is not None for part in target.model.modules()),
        f"the activation {config.hidden_act!r}": config.hidden_act != "silu",
    }
    if found := [fault for fault, present in faults.items() if present]:
        raise UsageError(
            f"target '{target.name}' has {' and '.join(found)}, which the fast engines do not compute; they take "
            f"{' and '.join(SUPPORTED)} models of plain build, so use the reference engine"
        )
    return StackSizes(
        target.hidden_size,
        target.intermediate_size,
        target.num_heads,
        target.num_kv_heads,
        target.head_dim,
        target.rms_norm_eps,
        causal=True,
    )


def target_layers(target: Target) -> list[LayerWeights]:
    """Weights of all layers."""
    return [
        _layer(layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm)
        for layer in target.model.base_model.layers
    ]


def target_rotary(target: Target, capacity: int) -> Rotary:
    """cos and sin of positions 0, 1, … (half-split convention), as the model makes them."""
    with torch.no_grad():
        model, positions = target.model.base_model, torch.arange(capacity, device=target.device)[None]
        cos, sin = model.rotary_emb(torch.zeros(1, device=target.device, dtype=torch.float32), positions)
    return cos[0], sin[0]


def draft_sizes(draft: Draft) -> StackSizes:
    """Sizes of the draft's layers.

    Raises:
        UsageError: a kind of draft that the fast engines do not compute.
    """
    if draft.kind.name not in DRAFTS:
        raise UsageError(
            f"the fast engines do not compute drafts of the kind {draft.kind.name!r}, only {' and '.join(DRAFTS)}; "
            "use the reference engine"
        )
    c = draft.config
    sizes = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    return StackSizes(c.hidden_size, c.intermediate_size, *sizes, c.rms_norm_eps, c.is_causal)


def draft_layers(draft: Draft) -> list[LayerWeights]:
    """Weights of all layers."""
    return [_layer(layer.attn, layer.mlp, layer.ln1, layer.ln2) for layer in draft.blocks]


def draft_rotary(draft: Draft, capacity: int) -> Rotary:
    """cos and sin of positions 0, 1, … (half-split convention)."""
    config, device = draft.config, draft.fc.weight.device
    positions = torch.arange(capacity, device=device)
    cos, sin = rotary_tables(positions, config.head_dim, config.rope_theta, torch.float32)
    return cos[:, 0], sin[:, 0]


def _layer(attention: Any, mlp: Any, norm_in: Any, norm_mlp: Any) -> LayerWeights:
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    norms = norm_in, norm_mlp, getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    modules = *projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj, *norms
    weights: list[Any] = [None if module is None else module.weight.detach() for module in modules]
    return LayerWeights(*weights)
