"""What a public `config.json` may say about a draft's computation: what is computed here passes, the rest is refused.

Drafts are Qwen3 decoders. A field of that format which changes the numbers (windows, scaled or partial rotary
embeddings, other activations and norms, biases, capped or scaled logits) must be neutral; left out, it has the default
that the format gives it. `checked` runs before a configuration is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspine_probe.config import ConfigPart
from dspine_probe.errors import UsageError

_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}  # of transformers' Qwen3Config
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu", "swish"),
    "norm_type": ("rmsnorm", "rms_norm"),
    **dict.fromkeys(("qk_norm", "use_qk_norm"), (True,)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "layer_norm_eps"), (False,)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "clip_qkv", "num_experts"), (0,)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "output_multiplier", "residual_multiplier"), (1,)),
    **dict.fromkeys(("input_embedding_scale", "embedding_multiplier", "partial_rotary_factor"), (1,)),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar"), ()),
    "projector_type": ("dflash",),
    **dict.fromkeys(("shift_label", "sample_from_anchor", "markov_rank"), (False,)),
}
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


def checked(raw: Mapping[str, Any], part: type[ConfigPart] | None = None) -> dict[str, Any]:
    """The configuration with the format's defaults and one `rope_theta`, or a refusal of what is not computed.

    Fields of `part`, the kind's own, are computed.

    Raises:
        UsageError: naming the field, its value and what is computed.
    """
    try:
        own = {field.name for field in dataclasses.fields(part)} if part else set()
        for place in (raw, raw.get("dflash_config") or {}):
            for name, neutral in _NEUTRAL.items():
                value = None if name in own else place.get(name)
                if value is not None and value not in neutral:
                    allowed = " or ".join(map(repr, neutral)) or "no such field"
                    _refuse(name, value, f"{allowed} is computed")
        _check_windows(raw)
        return {**_DEFAULTS, **raw, "rope_theta": _rope_theta(raw)}
    except (AttributeError, TypeError) as error:
        raise UsageError(f"the draft's config.json is not in the public layout: {error}") from error


def _check_windows(raw: Mapping[str, Any]) -> None:
    kinds, count = raw.get("layer_types"), raw.get("num_hidden_layers")
    if kinds is not None and kinds != ["full_attention"] * (count or 0):
        _refuse("layer_types", kinds, f"'full_attention' in each of the {count} layers is computed")
    window, used = raw.get("sliding_window"), raw.get("use_sliding_window")
    if used or (window is not None and used is None):
        _refuse("sliding_window", window, "attention to the whole context is computed")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    found = {float(raw["rope_theta"])} if raw.get("rope_theta") is not None else set()
    for name in _ROPE_KEYS:
        rope = raw.get(name) or {}
        if any(isinstance(value, Mapping) for value in rope.values()):
            rope = rope.get("full_attention") or {}  # one entry for each type of layer; drafts have this type alone
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            _refuse(name, kind, "the unscaled rotary embedding ('default') is computed")
        if rope.get("partial_rotary_factor") not in (None, 1):
            _refuse("partial_rotary_factor", rope["partial_rotary_factor"], "the whole head is rotated")
        if rope.get("rope_theta") is not None:
            found.add(float(rope["rope_theta"]))
    if len(found) != 1:
        given = "no rope_theta" if not found else f"several rope_theta {sorted(found)}"
        raise UsageError(f"the draft's config.json names {given}; it must name the one that the draft was trained with")
    return found.pop()


def _refuse(name: str, value: object, computed: str) -> None:
    raise UsageError(
        f"the draft's config.json has {name} {value!r}, which is not computed here ({computed}); use another draft"
    )
