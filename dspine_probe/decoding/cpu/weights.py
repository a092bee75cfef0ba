"""Reading the weights of targets and drafts into the plain form that a compute packs.

What the computes do not reproduce (biases, other activations or attentions, hooks that are set) is refused here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dspine_probe.decoding.cpu.compute import Geometry, Layer, Rotary, Spine
from dspine_probe.decoding.lean import check_supported
from dspine_probe.drafts import Draft, DSpine
from dspine_probe.drafts.layers import rotary_tables
from dspine_probe.errors import UsageError
from dspine_probe.target import Target


def target_geometry(target: Target) -> Geometry:
    """Sizes of the target's layers.

    Raises:
        UsageError: the target is built in a way that is not reproduced.
    """
    check_supported(target.model)
    if target.device.type != "cpu":
        raise UsageError(
            f"target '{target.name}' lies on {target.device}; fast CPU decoding needs it on the CPU"
        )
    _refuse_hooks(target.model, f"target '{target.name}'")
    if any(module.bias is not None for module in target.model.modules() if isinstance(module, nn.Linear)):
        raise UsageError(
            f"target '{target.name}' has biases, which fast CPU decoding does not compute; use the reference engines"
        )
    if (activation := target.config.hidden_act) != "silu":
        raise UsageError(
            f"target '{target.name}' has the activation {activation!r}; fast CPU decoding computes 'silu' alone, "
            "so use the reference engines"
        )
    geometry = Geometry(
        target.hidden_size,
        target.intermediate_size,
        target.num_heads,
        target.num_kv_heads,
        target.head_dim,
        target.rms_norm_eps,
        causal=True,
    )
    return _even(geometry)


def target_layers(target: Target) -> list[Layer]:
    """Weights of all layers."""
    return [
        _layer(block.self_attn, block.mlp, block.input_layernorm, block.post_attention_layernorm)
        for block in target.model.base_model.layers
    ]


def target_rotary(target: Target, capacity: int) -> Rotary:
    """Tables as the target's own module makes them, any scaling included."""
    at = torch.arange(capacity)[None]
    cos, sin = target.model.base_model.rotary_emb(torch.zeros(1), at)
    return Rotary(cos[0], sin[0])


def draft_geometry(draft: Draft) -> Geometry:
    """Sizes of the draft's layers.

    Raises:
        UsageError: hooks are set on the draft, or a size is odd.
    """
    _refuse_hooks(draft, "the draft")
    c = draft.config
    geometry = Geometry(
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.rms_norm_eps,
        c.is_causal,
    )
    spine = (
        {} if c.dspine is None else {"rank": c.dspine.transfer_rank, "message size": c.dspine.message_size}
    )
    return _even(geometry, **spine)


def draft_layers(draft: Draft) -> list[Layer]:
    """Weights of all layers."""
    return [_layer(block.attn, block.mlp, block.ln1, block.ln2) for block in draft.blocks]


def draft_rotary(draft: Draft, capacity: int) -> Rotary:
    """Tables of absolute positions."""
    tables = rotary_tables(
        torch.arange(capacity), draft.config.head_dim, draft.config.rope_theta, torch.float32
    )
    return Rotary(*(table[:, 0] for table in tables))


def spine_weights(draft: DSpine) -> Spine:
    """DSpine's own weights; what every token of the draft's vocabulary sends is computed here, once."""
    injection = draft.injection
    sends = torch.cat([injection.predecessor_gate.weight, injection.message.weight]).float()
    codes = draft.codes if draft.vocabulary is None else draft.codes[draft.vocabulary]
    return Spine(
        readouts=_weights(injection.readouts),
        writes=_weights(injection.writes),
        mix=torch.cat([injection.receiver_gate.weight.float(), sends]),
        bias=injection.bias.float(),
        norm=draft.ln_final.weight,
        eps=draft.config.rms_norm_eps,
        head=draft.head,
        sent=codes.float() * codes.shape[1] ** 0.5 @ sends.T,
    )


def _layer(attention: Any, mlp: Any, norm_in: Any, norm_mlp: Any) -> Layer:
    norm_q, norm_k = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        q=attention.q_proj.weight.detach(),
        k=attention.k_proj.weight.detach(),
        v=attention.v_proj.weight.detach(),
        out=attention.o_proj.weight.detach(),
        gate=mlp.gate_proj.weight.detach(),
        up=mlp.up_proj.weight.detach(),
        down=mlp.down_proj.weight.detach(),
        norm_in=norm_in.weight.detach(),
        norm_mlp=norm_mlp.weight.detach(),
        norm_q=None if norm_q is None else norm_q.weight.detach(),
        norm_k=None if norm_k is None else norm_k.weight.detach(),
    )


def _weights(modules: Any) -> list[Tensor]:
    return [module.weight.detach() for module in modules]


def _even(geometry: Geometry, **others: int) -> Geometry:
    """Numbers are multiplied in pairs."""
    sizes = {"hidden size": geometry.width, "head size": geometry.head_dim, **others}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 2]
    if odd:
        raise UsageError(
            f"fast CPU decoding takes even sizes only, got {', '.join(odd)}; use the reference engines"
        )
    return geometry


def _refuse_hooks(module: nn.Module, name: str) -> None:
    for path, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            raise UsageError(
                f"a hook is set on {path or 'the module'} of {name}, and fast CPU decoding would pass it by; "
                "remove it or use the reference engines"
            )
