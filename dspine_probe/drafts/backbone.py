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
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import DraftConfig
from dspine_probe.drafts.layers import Block, BlockBias, HookedNorm, RMSNorm, Rotary, rotary_tables
from dspine_probe.errors import UsageError


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
