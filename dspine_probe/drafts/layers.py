"""What a layer of a draft is made of: norms, rotary positions, attention to context and block, MLP.

Keys and values of the context come ready-made (`Attention.context_kv`); only the slots of a block form queries. Axes
are those of `backbone`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import DraftConfig

Rotary = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, computed in fp32. `hook_normalized` is after the gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def normalize(self, x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """The norm itself, past any seam of a subclass."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def forward(self, x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        return self.normalize(x)


class HookedNorm(RMSNorm):
    """An RMSNorm whose output is a seam."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.hook_normalized = nn.Identity()

    def forward(self, x: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        return self.hook_normalized(self.normalize(x))


def rotary_tables(positions: Int[Tensor, "..."], head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """cos and sin [..., 1, head_dim] of the rotary embedding at absolute positions (half-split convention)."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions[..., None].float() * theta**-exponent
    angle = torch.cat([angle, angle], dim=-1)[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Float[Tensor, "... head d_head"], rotary: Rotary) -> Float[Tensor, "... head d_head"]:
    """Apply rotary position embedding."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention of block slots over context rows and the block's own slots."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.hook_q, self.hook_k, self.hook_v = nn.Identity(), nn.Identity(), nn.Identity()
        self.hook_ctx_k, self.hook_ctx_v = nn.Identity(), nn.Identity()
        self.hook_attn_scores, self.hook_pattern, self.hook_z = nn.Identity(), nn.Identity(), nn.Identity()

    def context_kv(
        self, context: Float[Tensor, "batch ctx d_model"], rotary: Rotary
    ) -> tuple[Float[Tensor, "batch ctx kv_head d_head"], Float[Tensor, "batch ctx kv_head d_head"]]:
        """Keys and values of context rows: the block's own projections, without the block's input norm."""
        k = self.k_norm(self.k_proj(context).unflatten(-1, (self.kv_heads, self.head_dim)))
        v = self.v_proj(context).unflatten(-1, (self.kv_heads, self.head_dim))
        return self.hook_ctx_k(rotate(k, rotary)), self.hook_ctx_v(v)

    def forward(
        self,
        x: Float[Tensor, "block slot d_model"],
        context_k: Float[Tensor, "batch ctx kv_head d_head"],
        context_v: Float[Tensor, "batch ctx kv_head d_head"],
        rotary: Rotary,
        bias: BlockBias,
    ) -> Float[Tensor, "block slot d_model"]:
        blocks, slots, _ = x.shape
        batch, ctx = context_k.shape[:2]
        per_sequence, group = blocks // batch, self.heads // self.kv_heads
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))), rotary)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))), rotary)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        q, k, v = self.hook_q(q) * self.head_dim**-0.5, self.hook_k(k), self.hook_v(v)

        # Query heads of one group become rows, so keys and values are never expanded.
        q = q.view(batch, per_sequence, slots, self.kv_heads, group, self.head_dim)
        q = q.permute(0, 3, 1, 4, 2, 5)  # batch kv_head anchor group slot d_head
        to_context = q.reshape(batch, self.kv_heads, -1, self.head_dim) @ context_k.permute(0, 2, 3, 1)
        own = q.transpose(1, 2).reshape(blocks, self.kv_heads, group * slots, self.head_dim)
        to_block = own @ k.permute(0, 2, 3, 1)

        to_context = to_context.view(batch, self.kv_heads, per_sequence, group, slots, ctx) + bias.context
        to_block = to_block.view(batch, per_sequence, self.kv_heads, group, slots, slots).transpose(1, 2) + bias.block
        scores = self._by_head(torch.cat([to_context, to_block], dim=-1))
        pattern = self.hook_pattern(self.hook_attn_scores(scores).softmax(dim=-1))

        pattern = pattern.view(batch, per_sequence, self.kv_heads, group * slots, ctx + slots)
        on_context, on_block = pattern.split([ctx, slots], dim=-1)
        z = on_context.transpose(1, 2).reshape(batch, self.kv_heads, -1, ctx) @ context_v.transpose(1, 2)
        z = z.view(batch, self.kv_heads, per_sequence, group * slots, self.head_dim).transpose(1, 2)
        z = z.flatten(0, 1) + on_block.flatten(0, 1) @ v.transpose(1, 2)
        z = z.reshape(blocks, self.heads, slots, self.head_dim).transpose(1, 2)
        return self.o_proj(self.hook_z(z).flatten(-2))

    def _by_head(self, scores: Tensor) -> Float[Tensor, "block head slot key"]:
        batch, _, per_sequence, _, slots, keys = scores.shape
        return scores.transpose(1, 2).reshape(batch * per_sequence, self.heads, slots, keys)


@dataclass(frozen=True)
class BlockBias:
    """Additive masks: 0 where a slot may look, −∞ elsewhere."""

    context: Float[Tensor, "batch 1 anchor 1 1 ctx"]
    block: Float[Tensor, "slot slot"]

    @classmethod
    def build(
        cls, anchors: Int[Tensor, "batch anchor"], ctx: int, slots: int, *, causal: bool, dtype: torch.dtype
    ) -> BlockBias:
        """A block sees context rows at positions before its anchor, and its own slots (up to each slot if causal)."""
        rows = torch.arange(ctx, device=anchors.device)
        context = _bias(rows < anchors[..., None], dtype)[:, None, :, None, None, :]
        visible = torch.ones(slots, slots, dtype=torch.bool, device=anchors.device)
        return cls(context, _bias(visible.tril() if causal else visible, dtype))


def _bias(visible: Bool[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.hook_pre, self.hook_post = nn.Identity(), nn.Identity()

    def forward(self, x: Float[Tensor, "block slot d_model"]) -> Float[Tensor, "block slot d_model"]:
        gate = F.silu(self.hook_pre(self.gate_proj(x)))
        return self.down_proj(self.hook_post(gate * self.up_proj(x)))


class DraftLayer(nn.Module):
    """One decoder layer over the slots of all blocks: attention, then the MLP."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.ln1 = HookedNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config)
        self.ln2 = HookedNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.hook_resid_pre, self.hook_resid_mid, self.hook_resid_post = (nn.Identity(), nn.Identity(), nn.Identity())
        self.hook_attn_out, self.hook_mlp_out = nn.Identity(), nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "block slot d_model"],
        context_k: Tensor,
        context_v: Tensor,
        rotary: Rotary,
        bias: BlockBias,
    ) -> Float[Tensor, "block slot d_model"]:
        return self.feed(self.attend(x, context_k, context_v, rotary, bias))

    def attend(
        self,
        x: Float[Tensor, "block slot d_model"],
        context_k: Tensor,
        context_v: Tensor,
        rotary: Rotary,
        bias: BlockBias,
    ) -> Float[Tensor, "block slot d_model"]:
        """The stream after attention."""
        x = self.hook_resid_pre(x)
        attended = self.attn(self.ln1(x), context_k, context_v, rotary, bias)
        return self.hook_resid_mid(x + self.hook_attn_out(attended))

    def feed(self, x: Float[Tensor, "block slot d_model"]) -> Float[Tensor, "block slot d_model"]:
        """The stream after the MLP."""
        return self.hook_resid_post(x + self.hook_mlp_out(self.mlp(self.ln2(x))))
