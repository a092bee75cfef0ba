"""The trunk shared by every parallel draft: context K/V injection and a block of slots drafted in one pass.

The target's tapped hidden states are projected once to a context feature C (fc, then norm). Every layer turns C into
keys and values with the same matrices that serve the block; context rows never form queries. A block's slots see the
context rows before their anchor and each other, causally or in both directions (DFlash, arXiv 2602.06036).

Blocks of many anchors of one sequence share its context pass, in training as in decoding: one code path for both.
Identity modules named `hook_*` mark what is worth seeing; they cost nothing, and `dspine_probe.hooks` taps them.

Axes: batch = sequences, block = batch · anchor (all blocks, sequence-major), slot = 0…T, ctx = context rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import DraftConfig
from dspine_probe.errors import UsageError

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Context:
    """Per layer, the keys (normed, rotated) and values of the committed context rows 0…length−1."""

    keys: tuple[Float[Tensor, "batch ctx kv_head d_head"], ...]
    values: tuple[Float[Tensor, "batch ctx kv_head d_head"], ...]

    @property
    def length(self) -> int:
        """Number of context rows."""
        return self.keys[0].shape[1]

    def extend(self, new: Context) -> Context:
        """This context followed by `new` rows."""
        join = zip(self.keys, new.keys, strict=True), zip(self.values, new.values, strict=True)
        keys, values = (tuple(torch.cat(pair, dim=1) for pair in pairs) for pairs in join)
        return Context(keys, values)

    def select(self, rows: Tensor) -> Context:
        """The sequences that `rows` names or marks, each as often as it is named."""
        return Context(tuple(k[rows] for k in self.keys), tuple(v[rows] for v in self.values))

    def crop(self, length: int) -> Context:
        """The first `length` rows."""
        return Context(tuple(k[:, :length] for k in self.keys), tuple(v[:, :length] for v in self.values))


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
        to_block = (
            to_block.view(batch, per_sequence, self.kv_heads, group, slots, slots).transpose(1, 2)
            + bias.block
        )
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
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )


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


class Block(nn.Module):
    """One decoder layer over the slots of all blocks."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.ln1 = HookedNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config)
        self.ln2 = HookedNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.hook_resid_pre, self.hook_resid_mid, self.hook_resid_post = (
            nn.Identity(),
            nn.Identity(),
            nn.Identity(),
        )
        self.hook_attn_out, self.hook_mlp_out = nn.Identity(), nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "block slot d_model"],
        context_k: Tensor,
        context_v: Tensor,
        rotary: Rotary,
        bias: BlockBias,
    ) -> Float[Tensor, "block slot d_model"]:
        x = self.hook_resid_pre(x)
        x = self.hook_resid_mid(
            x + self.hook_attn_out(self.attn(self.ln1(x), context_k, context_v, rotary, bias))
        )
        return self.hook_resid_post(x + self.hook_mlp_out(self.mlp(self.ln2(x))))


@dataclass(frozen=True)
class BlockStates:
    """Final-normed hidden states of every slot, the anchor's included."""

    hidden: Float[Tensor, "block slot d_model"]


class Backbone(nn.Module, ABC):
    """fc, context norm, layers and final norm of a parallel draft, beside the target's frozen embedding and head.

    `embedding` and `head` are the target's own matrices, kept as buffers that no checkpoint stores. With
    `vocabulary`, the draft predicts only these token ids (a frequency-trimmed head); logits then range over them.
    """

    embedding: Tensor
    head: Tensor
    vocabulary: Tensor | None
    draft_index: Tensor | None

    def __init__(
        self,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        *,
        vocabulary: Int[Tensor, "draft_vocab"] | None = None,
    ) -> None:
        super().__init__()
        _check_target(config, embedding, head, vocabulary)
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.ln_final = HookedNorm(config.hidden_size, config.rms_norm_eps)
        self.hook_context, self.hook_embed, self.hook_logits = nn.Identity(), nn.Identity(), nn.Identity()
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("draft_index", _inverse(vocabulary, config.vocab_size), persistent=False)
        self.register_buffer(
            "head", (head if vocabulary is None else head[vocabulary]).detach(), persistent=False
        )

    @abstractmethod
    def run(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
        visible: Int[Tensor, "block draft_slot"] | None = None,
    ) -> BlockStates:
        """One parallel pass over all blocks; `visible` as in `embed_block`."""

    def forward(
        self,
        taps: Float[Tensor, "batch ctx taps_d_model"],
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
        visible: Int[Tensor, "block draft_slot"] | None = None,
    ) -> Float[Tensor, "block draft_slot draft_vocab"]:
        """Unary scores of slots 1…T for blocks at `anchors`, from the tapped states of whole sequences."""
        states = self.run(self.encode_context(taps), anchor_tokens, anchors, width=width, visible=visible)
        return self.logits(states.hidden[:, 1:])

    def encode_context(
        self, taps: Float[Tensor, "batch ctx taps_d_model"], *, start: int | Int[Tensor, "batch"] = 0
    ) -> Context:
        """Keys and values of context rows at positions start, start+1, … from the target's tapped hidden states.

        `start` may differ from sequence to sequence.
        """
        feature = self.hook_context(self.hidden_norm(self.fc(taps)))
        ahead = torch.arange(taps.shape[1], device=taps.device)
        positions = start + ahead if isinstance(start, int) else start[:, None] + ahead
        rotary = self._rotary(positions, feature.dtype)
        pairs = [block.attn.context_kv(feature, rotary) for block in self.blocks]
        return Context(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))

    def embed_block(
        self,
        anchor_tokens: Int[Tensor, "batch anchor"],
        width: int,
        visible: Int[Tensor, "block draft_slot"] | None = None,
    ) -> Float[Tensor, "block slot d_model"]:
        """[E(anchor), E(mask) × (width − 1)] for every block; where `visible` is not −1, E(that token) for E(mask)."""
        tokens = anchor_tokens.new_full((anchor_tokens.numel(), width), self.config.mask_token_id)
        tokens[:, 0] = anchor_tokens.flatten()
        if visible is not None:
            _check_visible(visible, (len(tokens), width - 1), self.config.vocab_size)
            tokens[:, 1:] = torch.where(visible >= 0, visible, tokens[:, 1:])
        return self.hook_embed(F.embedding(tokens, self.embedding))

    def block_inputs(
        self, context: Context, anchors: Int[Tensor, "batch anchor"], width: int
    ) -> tuple[Rotary, BlockBias]:
        """Rotary tables at the slots' absolute positions (anchor + slot) and the visibility of context and slots."""
        if width > self.config.block_size:
            raise UsageError(
                f"a block of {width} slots is wider than the {self.config.block_size} this draft was trained with."
            )
        dtype = context.keys[0].dtype
        positions = anchors.flatten()[:, None] + torch.arange(width, device=anchors.device)
        bias = BlockBias.build(anchors, context.length, width, causal=self.config.is_causal, dtype=dtype)
        return self._rotary(positions, dtype), bias

    def logits(self, hidden: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch draft_vocab"]:
        """Scores of final-normed states under the target's frozen head."""
        # A slice of slots is not contiguous, and a product with it is several times slower.
        return self.hook_logits(F.linear(hidden.contiguous(), self.head))

    def to_tokens(self, index: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Token ids of positions in the draft's vocabulary."""
        return index if self.vocabulary is None else self.vocabulary[index]

    def to_index(self, tokens: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Positions of tokens in the draft's vocabulary; −1 for a token the draft cannot propose."""
        return tokens if self.draft_index is None else self.draft_index[tokens]

    def _rotary(self, positions: Int[Tensor, "..."], dtype: torch.dtype) -> Rotary:
        return rotary_tables(positions, self.config.head_dim, self.config.rope_theta, dtype)


def _inverse(vocabulary: Int[Tensor, "draft_vocab"] | None, vocab_size: int) -> Int[Tensor, "vocab"] | None:
    if vocabulary is None:
        return None
    index = torch.full((vocab_size,), -1, device=vocabulary.device)
    index[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return index


def _check_visible(visible: Tensor, shape: tuple[int, int], vocab_size: int) -> None:
    if tuple(visible.shape) != shape:
        raise UsageError(
            f"visible tokens are {tuple(visible.shape)} but the blocks have {shape} draft slots; give each slot a "
            "token, or −1 for the mask."
        )
    if visible.numel() and not -1 <= int(visible.min()) <= int(visible.max()) < vocab_size:
        raise UsageError(f"visible tokens must be −1 or one of 0…{vocab_size - 1}.")


def _check_target(config: DraftConfig, embedding: Tensor, head: Tensor, vocabulary: Tensor | None) -> None:
    expected = (config.vocab_size, config.hidden_size)
    for name, matrix in (("embedding", embedding), ("head", head)):
        if tuple(matrix.shape) != expected:
            raise UsageError(
                f"the target's {name} is {tuple(matrix.shape)} but the draft was made for {expected}; "
                "load the target that this draft belongs to."
            )
    size = None if vocabulary is None else len(vocabulary)
    if size != config.draft_vocab_size:
        raise UsageError(
            f"the draft's vocabulary lists {size} tokens but its config says {config.draft_vocab_size}."
        )
