"""The trunk shared by every parallel draft: context K/V injection and a block of slots drafted in one pass.

The target's tapped hidden states are projected once to a context feature C (fc, then norm). Every layer turns C into
keys and values with the same matrices that serve the block; context rows never form queries. A block's slots see the
context rows before their anchor and each other, causally or in both directions (DFlash, arXiv 2602.06036).

Blocks of many anchors of one sequence share its context pass, in training as in decoding: one code path for both.
Identity modules named `hook_*` mark hook points; they cost nothing, and `dspine_probe.hooks` taps them.

Axes: batch = sequences, block = batch · anchor (all blocks, sequence-major), slot = 0…T, ctx = context rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import DraftConfig
from dspine_probe.drafts.block import BlockInputs, BlockStates, Context, LayerStreams, Stage, TruePredecessors
from dspine_probe.drafts.borrowed import Borrowed, check_visible
from dspine_probe.drafts.layers import BlockBias, DraftLayer, HookedNorm, RMSNorm, rotary_tables
from dspine_probe.drafts.proposal import Candidates, Proposal
from dspine_probe.errors import UsageError
from dspine_probe.sampling import pick, tempered


class Backbone(Borrowed):
    """fc, context norm, layers and final norm of a parallel draft, beside the target's frozen embedding and head.

    A kind of draft is a subclass under `registry.register`; what it may change comes first below.
    """

    layer: ClassVar[type[DraftLayer]] = DraftLayer
    """The class of its layers."""
    after_seams: ClassVar[tuple[str, str] | None] = None
    """Hook points of a layer for what `after_layer` adds and for the stream behind it."""
    code_seams: ClassVar[tuple[str, ...]] = ()
    """Hook points, in a layer or in the draft, that carry the codes which slots receive from their predecessors."""

    codes: Tensor | None
    """Unit-length code of every token of the target's vocabulary, in drafts whose slots receive codes."""

    def __init__(
        self,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        *,
        vocabulary: Int[Tensor, "draft_vocab"] | None = None,
    ) -> None:
        self.kind.check(config)
        super().__init__(config, embedding, head, vocabulary=vocabulary)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.blocks = nn.ModuleList(self.layer(config) for _ in range(config.num_hidden_layers))
        self.ln_final = HookedNorm(config.hidden_size, config.rms_norm_eps)
        self.hook_context, self.hook_embed, self.hook_logits = nn.Identity(), nn.Identity(), nn.Identity()
        self.register_buffer("codes", None, persistent=False)

    # ---- what a kind may change

    def after_layer(
        self, layer: int, x: Float[Tensor, "block slot d_model"], inputs: BlockInputs
    ) -> Float[Tensor, "block slot d_model"]:
        """The stream that goes on after `layer`; here what the layer left."""
        return x

    def propose(
        self,
        states: BlockStates,
        anchor_tokens: Int[Tensor, "batch anchor"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "block draft_slot"] | None = None,
    ) -> Proposal:
        """Tokens of slots 1…T from a pass: the likeliest, or with `noise` (uniform in [0, 1)) a draw of each.

        Here every slot chooses on its own.
        """
        scores = self.logits(self.drafting(states.hidden))
        if noise is None:
            return Proposal(self.to_tokens(scores.argmax(dim=-1)))
        probs = tempered(scores, temperature)
        return Proposal(self.to_tokens(pick(probs, noise)), Candidates.all_of(self, probs))

    def drafting(self, hidden: Float[Tensor, "block slot d_model"]) -> Float[Tensor, "block draft_slot d_model"]:
        """The states that propose tokens 1…T: every slot's but the anchor's, or of a shifted draft all."""
        return hidden if self.shifted else hidden[:, 1:]

    def message_codes(self, tokens: Int[Tensor, "*batch"], dtype: torch.dtype) -> Float[Tensor, "*batch rank"] | None:
        """The form in which a known token's code is received by the slot after it; None where none is sent."""
        if self.codes is None:
            return None
        return (F.embedding(tokens, self.codes) * self.codes.shape[1] ** 0.5).to(dtype)

    def prediction_feature(self, layer: int, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch rank"] | None:
        """The draft's own reading of what the stream after `layer` predicts, to be compared with `codes`."""
        return None

    @property
    def shifted(self) -> bool:
        """Whether slot k proposes the token at p + k + 1, so that a block of T proposals takes T slots."""
        return self.config.part is not None and self.config.part.SHIFTED

    @property
    def code_sizes(self) -> tuple[int, int]:
        """Size of a code and of a message; where the kind has none, a third and two ninths of the hidden size."""
        return self.config.hidden_size // 3, self.config.hidden_size * 2 // 9

    # ---- passes

    def run(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
        visible: Int[Tensor, "block draft_slot"] | None = None,
        true_predecessors: TruePredecessors | None = None,
    ) -> BlockStates:
        """One parallel pass over all blocks.

        Args:
            anchors: the positions of `anchor_tokens`.
            width: slots of a block, the anchor's included; at most, and by default, `block_size`.
            visible: tokens shown in slots 1…T (−1: the mask).
            true_predecessors: training only, for drafts whose slots receive codes.
        """
        width = width or self.config.block_size
        inputs = self.block_inputs(context, anchor_tokens, anchors, width)
        if true_predecessors is not None:
            if self.codes is None:
                raise UsageError(f"the slots of a {self.kind.name} receive no codes; give no true_predecessors.")
            inputs = replace(inputs, true_predecessors=true_predecessors)
        streams = self.run_layers(self.embed_block(anchor_tokens, width, visible), inputs)
        return BlockStates(streams.residuals, streams.last_layer, self.ln_final(streams.residuals[-1]))

    def run_layers(
        self, x: Float[Tensor, "block slot d_model"], inputs: BlockInputs, start: int = 0, stop: int | None = None
    ) -> LayerStreams:
        """Layers start…stop − 1, each with what follows it, on the stream `x` that enters them."""
        residuals, last = [], x
        for layer in range(start, len(self.blocks) if stop is None else stop):
            keys, values = inputs.context.keys[layer], inputs.context.values[layer]
            last = self.blocks[layer](x, keys, values, inputs.rotary, inputs.bias)
            x = self.after_layer(layer, last, inputs)
            residuals.append(x)
        return LayerStreams(tuple(residuals), last)

    def stages(self, layer: int) -> list[Stage]:
        """The same layer in parts: everything that is added to the stream there, one after another."""
        block, at = cast(DraftLayer, self.blocks[layer]), f"blocks.{layer}."

        def attend(x: Tensor, inputs: BlockInputs) -> Tensor:
            keys, values = inputs.context.keys[layer], inputs.context.values[layer]
            return block.attend(x, keys, values, inputs.rotary, inputs.bias)

        stages = [
            Stage(at + "hook_attn_out", at + "hook_resid_mid", attend),
            Stage(at + "hook_mlp_out", at + "hook_resid_post", lambda x, _: block.feed(x)),
        ]
        if self.after_seams is not None:
            added, after = self.after_seams
            stages.append(Stage(at + added, at + after, partial(self.after_layer, layer)))
        return stages

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
        return self.logits(self.drafting(states.hidden))

    def encode_context(
        self,
        taps: Float[Tensor, "batch ctx taps_d_model"],
        *,
        start: int | Int[Tensor, "batch"] = 0,
        following: Int[Tensor, "batch ctx"] | None = None,
    ) -> Context:
        """Keys and values of context rows at positions start, start+1, … from the target's tapped hidden states.

        `start` may differ from sequence to sequence. `following`, the token after each row, is for drafts that read it.
        """
        feature = self.hook_context(self.hidden_norm(self.fc(taps)))
        rotary = self.context_rotary(feature, start)
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
            check_visible(visible, (len(tokens), width - 1), self.config.vocab_size)
            tokens[:, 1:] = torch.where(visible >= 0, visible, tokens[:, 1:])
        return self.hook_embed(F.embedding(tokens[:, : width - self.shifted], self.embedding))

    def block_inputs(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        width: int,
    ) -> BlockInputs:
        """What the layers need for blocks of `width` slots at `anchors`."""
        if width > self.config.block_size:
            raise UsageError(
                f"a block of {width} slots is wider than the {self.config.block_size} this draft was trained with."
            )
        dtype = context.keys[0].dtype
        slots = width - self.shifted
        positions = anchors.flatten()[:, None] + torch.arange(slots, device=anchors.device)
        bias = BlockBias.build(anchors, context.length, slots, causal=self.config.is_causal, dtype=dtype)
        code = self.message_codes(anchor_tokens.flatten(), dtype)
        rotary = rotary_tables(positions, self.config.head_dim, self.config.rope_theta, dtype)
        return BlockInputs(context, rotary, bias, None if code is None else code[:, None])

    def logits(self, hidden: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch draft_vocab"]:
        """Scores of final-normed states under the target's frozen head."""
        # A slice of slots is not contiguous, and a product with it is several times slower.
        return self.hook_logits(F.linear(hidden.contiguous(), self.head))
