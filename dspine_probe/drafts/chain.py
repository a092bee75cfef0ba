"""What an autoregressive draft keeps while it drafts: one layer over true context rows and the rows of its own chain.

A row at position i pairs the token at i + 1 with a feature of the text up to i: of a context row the target's own, of
later rows what the draft itself left one step before. Blocks of many anchors of one sequence share its context rows.

Axes: batch = sequences, anchor = chains of a sequence, ctx = context rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dspine_probe.config import DraftConfig
from dspine_probe.drafts.block import Context
from dspine_probe.drafts.layers import MLP, RMSNorm, Rotary, rotary_tables, rotate


class ChainAttention(nn.Module):
    """Grouped-query attention of one new row of every chain; it reads an embedding beside a feature."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def kv(self, u: Float[Tensor, "batch row two_d_model"], rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values [batch row kv_head d_head]."""
        k = self.k_norm(self.k_proj(u).unflatten(-1, (self.kv_heads, self.head_dim)))
        return rotate(k, rotary), self.v_proj(u).unflatten(-1, (self.kv_heads, self.head_dim))

    def forward(
        self, u: Float[Tensor, "batch anchor two_d_model"], rotary: Rotary, chain: Chain
    ) -> Float[Tensor, "batch anchor d_model"]:
        """`chain` holds the keys of this row too."""
        q = rotate(self.q_norm(self.q_proj(u).unflatten(-1, (self.heads, self.head_dim))), rotary)
        q = q.unflatten(2, (self.kv_heads, -1)) * self.head_dim**-0.5
        context, own_k, own_v = chain.context, torch.stack(chain.keys, dim=2), torch.stack(chain.values, dim=2)
        to_context = torch.einsum("bakgd,bckd->bakgc", q, context.keys[0])
        to_context = to_context.masked_fill(~chain.visible[:, :, None, None], float("-inf"))
        to_own = torch.einsum("bakgd,bajkd->bakgj", q, own_k)
        pattern = torch.cat([to_context, to_own], dim=-1).softmax(dim=-1)
        on_context, on_own = pattern.split([context.length, len(chain.keys)], dim=-1)
        z = torch.einsum("bakgc,bckd->bakgd", on_context, context.values[0])
        return self.o_proj((z + torch.einsum("bakgj,bajkd->bakgd", on_own, own_v)).flatten(2))


class ChainLayer(nn.Module):
    """The layer: attention reads [norm of the token's embedding; norm of the feature], the stream is the feature."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = ChainAttention(config)
        self.ln2 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def read(
        self, embedded: Float[Tensor, "batch row d_model"], feature: Float[Tensor, "batch row d_model"]
    ) -> Float[Tensor, "batch row two_d_model"]:
        """What attention reads."""
        return torch.cat([self.ln1(embedded), self.hidden_norm(feature)], dim=-1)

    def forward(self, embedded: Float[Tensor, "batch anchor d_model"], chain: Chain, seam: nn.Module) -> Chain:
        """The chain with a row that pairs its feature with a token; what that leaves, through `seam`, is fed back."""
        u, rotary = self.read(embedded, chain.feature), chain.rotary()
        k, v = self.attn.kv(u, rotary)
        chain = replace(chain, keys=(*chain.keys, k), values=(*chain.values, v))
        x = chain.feature + self.attn(u, rotary, chain)
        x = seam((x + self.mlp(self.ln2(x))).flatten(0, 1)).view_as(x)
        return replace(chain, feature=x)


@dataclass(frozen=True)
class Chain:
    """Chains after some steps.

    feature: what the next row is paired with. visible: context rows that a chain sees; row p − 1, whose token is the
    anchor at p, is the chain's own first. keys, values: of the chain's own rows.
    """

    context: Context
    anchors: Int[Tensor, "batch anchor"]
    visible: Bool[Tensor, "batch anchor ctx"]
    feature: Float[Tensor, "batch anchor d_model"]
    head_dim: int
    theta: float
    keys: tuple[Float[Tensor, "batch anchor kv_head d_head"], ...] = ()
    values: tuple[Float[Tensor, "batch anchor kv_head d_head"], ...] = ()

    @classmethod
    def begin(cls, context: Context, anchors: Int[Tensor, "batch anchor"], config: DraftConfig) -> Chain:
        """Before the anchor's token is read."""
        assert context.features is not None
        last = (anchors - 1).clamp(min=0)
        feature = context.features.gather(1, last[..., None].expand(-1, -1, context.features.shape[-1]))
        rows = torch.arange(context.length, device=anchors.device)
        return cls(context, anchors, rows < anchors[..., None] - 1, feature, config.head_dim, config.rope_theta)

    def rotary(self) -> Rotary:
        """Of the next row."""
        return rotary_tables(self.anchors - 1 + len(self.keys), self.head_dim, self.theta, self.feature.dtype)


@dataclass(frozen=True)
class ChainStates:
    """Chains that have read their anchors, and the final-normed states that propose the first tokens."""

    chain: Chain
    hidden: Float[Tensor, "block d_model"]
    slots: int
