"""Start a draft from its target: the last layers, the final norm, and taps read through the identity.

With random weights a small budget is spent learning what the target's last layers already know. Input-norm gains are
folded into the q, k, v projections, so that context rows, which skip the input norm, meet the matrices they were
made for. Query and key norms, which a Llama target lacks, start at the scale its queries and keys really have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dspine_probe.drafts.backbone import Backbone
from dspine_probe.drafts.layers import DraftLayer
from dspine_probe.errors import UsageError
from dspine_probe.target import Target


def warm_start(
    draft: Backbone, target: Target, sample: Int[Tensor, "batch ctx"], *, layers: Sequence[int] | None = None
) -> None:
    """Copy target layers (by default the last ones) into the draft; `sample` is text to measure query/key scales on."""
    depth = len(draft.blocks)
    layers = tuple(range(target.num_layers - depth, target.num_layers)) if layers is None else tuple(layers)
    if len(layers) != depth or not all(0 <= layer < target.num_layers for layer in layers):
        raise UsageError(
            f"warm start needs {depth} of the target's layers 0…{target.num_layers - 1}, got {list(layers)}."
        )
    sources = target.model.base_model.layers
    scales = _qk_scales(target, layers, sample)
    with torch.no_grad():
        for block, layer, scale in zip(draft.blocks, layers, scales, strict=True):
            _copy_layer(cast(DraftLayer, block), sources[layer], scale)
        draft.ln_final.weight.copy_(target.model.base_model.norm.weight)
        draft.hidden_norm.weight.fill_(1.0)
        _read_last_tap(draft.fc, draft.config.hidden_size)


def _copy_layer(block: DraftLayer, source: Any, scale: tuple[float, float]) -> None:
    attention: Any = source.self_attn
    gain = source.input_layernorm.weight.float()
    for name in ("q_proj", "k_proj", "v_proj"):
        # A layer that reads an embedding before its feature begins with the feature alone.
        own = getattr(block.attn, name).weight.zero_()
        own[:, -len(gain) :].copy_(getattr(attention, name).weight.float() * gain)
    block.ln1.weight.fill_(1.0)
    block.attn.o_proj.weight.copy_(attention.o_proj.weight)
    block.ln2.weight.copy_(source.post_attention_layernorm.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(block.mlp, name).weight.copy_(getattr(source.mlp, name).weight)
    if hasattr(attention, "q_norm"):
        block.attn.q_norm.weight.copy_(attention.q_norm.weight)
        block.attn.k_norm.weight.copy_(attention.k_norm.weight)
    else:
        block.attn.q_norm.weight.fill_(scale[0])
        block.attn.k_norm.weight.fill_(scale[1])


def _read_last_tap(fc: nn.Linear, hidden_size: int) -> None:
    fc.weight.zero_()
    fc.weight[:, -hidden_size:].fill_diagonal_(1.0)


def _qk_scales(target: Target, layers: Sequence[int], sample: Int[Tensor, "batch ctx"]) -> list[tuple[float, float]]:
    """Root-mean-square of the target's queries and keys in each layer."""
    seen: dict[tuple[int, str], float] = {}

    def record(layer: int, name: str):  # type: ignore[no-untyped-def]
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            seen[layer, name] = float(output.float().square().mean().sqrt())

        return hook

    handles = []
    try:
        for layer in layers:
            attention = target.model.base_model.layers[layer].self_attn
            for name in ("q_proj", "k_proj"):
                handles.append(getattr(attention, name).register_forward_hook(record(layer, name)))
        target.hidden_states(sample, [0])
    finally:
        for handle in handles:
            handle.remove()
    return [(seen[layer, "q_proj"], seen[layer, "k_proj"]) for layer in layers]
