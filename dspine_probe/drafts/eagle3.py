"""EAGLE-3: an autoregressive draft of one layer that feeds its own state back, seven tokens in a row.

Each step pairs a token with the feature before it, first the target's (all taps through `fc`), then the draft's own
(arXiv 2503.01840, in the variant with the target's frozen head). It drafts no block in one pass and is no `Backbone`,
but has what decoding, evaluation and training ask of any draft; its context rows need the tokens after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import ConfigPart, DraftConfig
from dspine_probe.drafts.block import Context
from dspine_probe.drafts.borrowed import Borrowed
from dspine_probe.drafts.chain import Chain, ChainLayer, ChainStates
from dspine_probe.drafts.layers import HookedNorm, RMSNorm
from dspine_probe.drafts.proposal import Proposal, propose_serially
from dspine_probe.drafts.registry import register
from dspine_probe.errors import UsageError


@dataclass(frozen=True)
class Eagle3Config(ConfigPart):
    """Steps that training unrolls, and the weight of each step's loss relative to the one before."""

    KEY: ClassVar[str] = ""
    FLAT: ClassVar[bool] = True

    ttt_length: int = 7
    step_loss_decay: float = 0.8
    draft_num_hidden_layers: int = 1

    def __post_init__(self) -> None:
        if self.ttt_length < 1 or not 0 < self.step_loss_decay <= 1:
            raise UsageError(
                f"ttt_length is {self.ttt_length} and step_loss_decay {self.step_loss_decay}; give at least one step "
                "and a decay above 0, at most 1."
            )

    @classmethod
    def completed(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Public files name no block or mask, and may give the target's depth beside the draft's."""
        return {
            "block_size": raw.get("ttt_length", cls.ttt_length) + 1,
            "mask_token_id": 0,
            **raw,
            "num_hidden_layers": raw.get("draft_num_hidden_layers", raw.get("num_hidden_layers")),
            "is_causal": True,
        }


class StepSeams(nn.Module):
    """Observation points of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_feature, self.hook_scores = nn.Identity(), nn.Identity()


@register(
    "eagle3",
    architecture="Qwen3Eagle3Model",
    objective="dspine_probe.training.objectives.eagle3:Eagle3Objective",
    part=Eagle3Config,
    causal=True,
    layers=1,
)
class Eagle3(Borrowed):
    """fc, one layer and the final norm, beside the target's frozen embedding and head."""

    stores_borrowed = True
    late_seams: ClassVar[tuple[str, ...]] = ("",)
    """All hook points wait for `propose`: there is no pass over a whole block."""
    hook_axes: ClassVar[dict[str, tuple[str, str]]] = {
        "hook_context": ("batch ctx d_model", "the target's taps after fc, which context rows pair with tokens"),
        "ln_final.hook_normalized": ("block d_model", "state after the anchor, final-normed"),
        "mlp.hook_pre": ("batch anchor d_mlp", "MLP gate before SiLU, once in every step"),
        "mlp.hook_post": ("batch anchor d_mlp", "MLP hidden state entering the down projection, once in every step"),
        "hook_feature": ("block d_model", "the state that this step leaves, fed back to the next"),
        "hook_scores": ("block draft_vocab", "scores of this step's proposal"),
    }

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
        self.eagle = cast(Eagle3Config, config.part)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.blocks = nn.ModuleList([ChainLayer(config)])
        self.ln_final = HookedNorm(config.hidden_size, config.rms_norm_eps)
        self.hook_context = nn.Identity()
        self.steps = nn.ModuleList(StepSeams() for _ in range(config.num_slots))

    @property
    def layer(self) -> ChainLayer:
        """Its only layer."""
        return cast(ChainLayer, self.blocks[0])

    @property
    def hidden_norm(self) -> RMSNorm:
        """The norm of features, which lies in the layer."""
        return self.layer.hidden_norm

    @property
    def code_sizes(self) -> tuple[int, int]:
        """It has no codes."""
        return 0, 0

    def encode_context(
        self,
        taps: Float[Tensor, "batch ctx taps_d_model"],
        *,
        start: int | Int[Tensor, "batch"] = 0,
        following: Int[Tensor, "batch ctx"] | None = None,
    ) -> Context:
        """Keys, values and features of context rows at positions start, start+1, …; `following` are the tokens after.

        Raises:
            UsageError: no tokens are given.
        """
        if following is None:
            raise UsageError(
                "an eagle3 reads the token after every context row; give following, or probe a parallel draft instead."
            )
        feature = self.hook_context(self.fc(taps))
        u = self.layer.read(F.embedding(following.clamp(min=0), self.embedding), feature)
        keys, values = self.layer.attn.kv(u, self.context_rotary(feature, start))
        return Context((keys,), (values,), feature)

    def run(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
    ) -> ChainStates:
        """The first step of chains after `anchor_tokens` at positions `anchors`; `width` is their length plus one."""
        width = width or self.config.block_size
        if width > self.config.block_size:
            raise UsageError(f"{width - 1} steps are more than the {self.config.num_slots} of this draft.")
        chain = self._step(Chain.begin(context, anchors, self.config), anchor_tokens, 0)
        return ChainStates(chain, self.ln_final(chain.feature.flatten(0, 1)), width - 1)

    def _step(self, chain: Chain, tokens: Int[Tensor, "batch anchor"], slot: int) -> Chain:
        return self.layer(F.embedding(tokens, self.embedding), chain, self.steps[slot].hook_feature)

    def forced(
        self, context: Context, tokens: Int[Tensor, "block step"], anchors: Int[Tensor, "batch anchor"]
    ) -> Float[Tensor, "block step d_model"]:
        """Final-normed states of every step after known tokens, the anchor's first, with the draft's own features."""
        chain, states = Chain.begin(context, anchors, self.config), []
        for slot, token in enumerate(tokens.unbind(1)):
            chain = self._step(chain, token.view_as(anchors), slot)
            states.append(self.ln_final.normalize(chain.feature.flatten(0, 1)))
        return torch.stack(states, dim=1)

    def propose(
        self,
        states: ChainStates,
        anchor_tokens: Int[Tensor, "batch anchor"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "block draft_slot"] | None = None,
    ) -> Proposal:
        """Tokens one after another, the likeliest or (with `noise`) drawn; each is read before the next is proposed."""
        chain = states.chain

        def score(slot: int, token: Int[Tensor, "block"]) -> Float[Tensor, "block draft_vocab"]:
            nonlocal chain
            hidden = states.hidden
            if slot:
                chain = self._step(chain, token.view_as(chain.anchors), slot)
                hidden = self.ln_final.normalize(chain.feature.flatten(0, 1))
            return self.steps[slot].hook_scores(F.linear(hidden, self.head))

        return propose_serially(
            self, anchor_tokens.flatten(), states.slots, score, temperature=temperature, noise=noise
        )
