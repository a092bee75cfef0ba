"""What every hook point of a draft carries: its axes and its meaning, by the last part of its name.

`describe` makes one row of `HookedDraft.hook_table()`. Names follow TransformerLens. A kind of draft describes its own
hook points beside its class (`Backbone.hook_axes`), and says which of them do not fire in the full pass
(`Backbone.late_seams`).

Axes: batch = sequences, block = batch · anchor, slot = 0…T, draft_slot = 1…T, ctx = context rows, candidate = known
predecessors of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspine_probe.drafts.backbone import Backbone
from dspine_probe.errors import UsageError

_SLOT, _CTX = "block slot", "batch ctx"
_ABOUT = {
    "hook_context": (f"{_CTX} d_model", "context feature: the tapped target states after fc and norm"),
    "hook_embed": (f"{_SLOT} d_model", "block embedding: the anchor's token, then masks"),
    "hook_logits": ("block draft_slot draft_vocab", "unary scores of slots 1…T under the target's head"),
    "hook_resid_pre": (f"{_SLOT} d_model", "residual stream entering the layer"),
    "hook_resid_mid": (f"{_SLOT} d_model", "residual stream after attention"),
    "hook_resid_post": (f"{_SLOT} d_model", "residual stream after the layer, before any injection"),
    "hook_attn_out": (f"{_SLOT} d_model", "what attention adds to the residual stream"),
    "hook_mlp_out": (f"{_SLOT} d_model", "what the MLP adds to the residual stream"),
    "hook_normalized": (f"{_SLOT} d_model", "RMS-normed stream, after the gain"),
    "attn.hook_q": (f"{_SLOT} head d_head", "queries, normed and rotated, before the 1/√d_head"),
    "attn.hook_k": (f"{_SLOT} kv_head d_head", "keys of the block's slots, normed and rotated"),
    "attn.hook_v": (f"{_SLOT} kv_head d_head", "values of the block's slots"),
    "attn.hook_ctx_k": (f"{_CTX} kv_head d_head", "keys of the context rows, normed and rotated"),
    "attn.hook_ctx_v": (f"{_CTX} kv_head d_head", "values of the context rows"),
    "attn.hook_attn_scores": ("block head slot key", "scores after the mask; keys are ctx, then slots"),
    "attn.hook_pattern": ("block head slot key", "attention weights; keys are ctx, then slots"),
    "attn.hook_z": (f"{_SLOT} head d_head", "attended values by head"),
    "mlp.hook_pre": (f"{_SLOT} d_mlp", "MLP gate before SiLU"),
    "mlp.hook_post": (f"{_SLOT} d_mlp", "MLP hidden state entering the down projection"),
}


@dataclass(frozen=True)
class HookRow:
    """One hook point.

    shape: a number where the draft fixes an axis, the axis name where the input does.
    fires: "pass" (once in every full pass) or "walk" (once whenever the transition cache is built).
    """

    name: str
    axes: str
    shape: tuple[int | str, ...]
    dtype: str
    fires: str
    about: str


def fires_in_pass(name: str, draft: Backbone) -> bool:
    """Whether the full pass reaches this hook point; the others wait for a proposal (the transition cache)."""
    return not name.startswith(draft.late_seams)


def describe(name: str, draft: Backbone) -> HookRow:
    """The row for the hook point `name` of `draft`.

    Raises:
        UsageError: the name is not one that drafts have.
    """
    kind = ".".join(name.split(".")[-2:])
    known = _ABOUT | draft.hook_axes
    kind = kind if kind in known else name.split(".")[-1]
    if kind not in known:
        raise UsageError(
            f"the hook point {name!r} has no description; add its axes and meaning to {type(draft).__name__}.hook_axes."
        )
    axes, about = known[kind]
    config, (rank, message) = draft.config, draft.code_sizes
    sizes = {
        "d_model": config.hidden_size,
        "d_mlp": config.intermediate_size,
        "head": config.num_attention_heads,
        "kv_head": config.num_key_value_heads,
        "d_head": config.head_dim,
        "draft_vocab": draft.head.shape[0],
        "rank": rank,
        "message": message,
    }
    shape = tuple(sizes.get(axis, axis) for axis in axes.split())
    dtype = str(draft.fc.weight.dtype).removeprefix("torch.")
    return HookRow(name, axes, shape, dtype, "pass" if fires_in_pass(name, draft) else "walk", about)
