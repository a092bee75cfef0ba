"""Domino: a parallel backbone whose proposals are corrected by a recurrent summary of the tokens before them.

A bias-free GRU reads the anchor and every earlier proposal, never the proposal itself; a two-layer head turns its state
and the slot's own state into a correction of the scores (arXiv 2605.29707). The first proposals are the backbone's
alone. The head's last matrix starts at zero, so a fresh Domino proposes as its backbone does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import SHARED_KEY, ConfigPart, DraftConfig
from dspine_probe.drafts.backbone import Backbone
from dspine_probe.drafts.block import BlockStates
from dspine_probe.drafts.proposal import Proposal, propose_serially
from dspine_probe.drafts.registry import register
from dspine_probe.errors import UsageError

_PROJECTORS = ("domino", "causal_v5")
_LEGACY = "logit_head."


@dataclass(frozen=True)
class DominoConfig(ConfigPart):
    """Sizes of the head, how many proposals it leaves alone, and whether slot k proposes the token at p + k + 1."""

    KEY: ClassVar[str] = SHARED_KEY

    projector_type: str = "domino"
    emb_dim: int = 256
    gru_hidden_dim: int = 1024
    pure_draft_prefix_len: int = 1
    shift_label: bool = True

    def __post_init__(self) -> None:
        if self.projector_type not in _PROJECTORS:
            raise UsageError(f"projector_type {self.projector_type!r} is no Domino; use {' or '.join(_PROJECTORS)}.")
        for name, least in (("emb_dim", 1), ("gru_hidden_dim", 1), ("pure_draft_prefix_len", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least {least}.")

    @classmethod
    def for_target(cls, hidden_size: int) -> Self:
        """The published share of the hidden size for the GRU, a sixth for the head, at most the published sizes."""
        return cls(emb_dim=max(1, min(256, hidden_size // 6)), gru_hidden_dim=max(1, min(1024, hidden_size // 4)))

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self | None:
        """As other parts, with `emb_dim` at the top level too, and the public defaults of what may be left out."""
        beside = {"pure_draft_prefix_len": 0, "shift_label": False}
        beside |= {"emb_dim": raw["emb_dim"]} if "emb_dim" in raw else {}
        return super().read({**raw, SHARED_KEY: {**beside, **(raw.get(SHARED_KEY) or {})}})


class PrefixGRU(nn.Module):
    """One GRU cell without biases, gates in the order r, z, n; the names are those of `torch.nn.GRU`."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, inputs).uniform_(-(size**-0.5), size**-0.5))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size).uniform_(-(size**-0.5), size**-0.5))

    def forward(
        self, given: Float[Tensor, "block inputs"], state: Float[Tensor, "block state"] | None
    ) -> Float[Tensor, "block state"]:
        """The state after one more input; None is the state before the first."""
        size = self.weight_hh_l0.shape[1]
        state = given.new_zeros(len(given), size) if state is None else state
        of_input = F.linear(given, self.weight_ih_l0).chunk(3, dim=-1)
        of_state = F.linear(state, self.weight_hh_l0).chunk(3, dim=-1)
        reset, keep = ((i + s).sigmoid() for i, s in zip(of_input[:2], of_state[:2], strict=True))
        new = (of_input[2] + reset * of_state[2]).tanh()
        return (1 - keep) * new + keep * state


class CorrectionSeams(nn.Module):
    """Observation points of one proposal's correction."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_prefix, self.hook_correction = nn.Identity(), nn.Identity()


@register(
    "domino",
    architecture="DominoDraftModel",
    objective="dspine_probe.training.objectives.domino:DominoObjective",
    part=DominoConfig,
)
class Domino(Backbone):
    """The backbone with its causal correction head."""

    late_seams = ("corrections.",)
    hook_axes = {
        "hook_prefix": ("block gru_state", "the GRU's state: anchor and earlier proposals, read one by one"),
        "hook_correction": ("block draft_vocab", "what the head adds to this proposal's unary scores"),
    }

    def __init__(
        self,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        *,
        vocabulary: Int[Tensor, "draft_vocab"] | None = None,
    ) -> None:
        super().__init__(config, embedding, head, vocabulary=vocabulary)
        part = self.domino = cast(DominoConfig, config.part)
        width = config.hidden_size
        self.prefix_gru = PrefixGRU(width, part.gru_hidden_dim)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + part.gru_hidden_dim, part.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(part.emb_dim, len(self.head), bias=False),
        )
        self.corrections = nn.ModuleList(CorrectionSeams() for _ in range(config.num_slots))
        self.zero_writes()

    @property
    def shifted(self) -> bool:
        """As `shift_label` says."""
        return self.domino.shift_label

    def zero_writes(self) -> None:
        """Zero the head's last matrix."""
        nn.init.zeros_(cast(nn.Linear, self.embed_proj[2]).weight)

    def reads(
        self, hidden: Float[Tensor, "block draft_slot d_model"], previous: Int[Tensor, "block draft_slot"]
    ) -> Float[Tensor, "block draft_slot emb"]:
        """What the head's last matrix turns into corrections, for all proposals after known tokens."""
        state, states = None, []
        for given in F.embedding(previous, self.embedding).unbind(1):
            state = self.prefix_gru(given, state)
            states.append(state)
        return self.embed_proj[:2](torch.cat([hidden, torch.stack(states, dim=1)], dim=-1))

    def propose(
        self,
        states: BlockStates,
        anchor_tokens: Int[Tensor, "batch anchor"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "block draft_slot"] | None = None,
    ) -> Proposal:
        """Tokens 1…T one after another, the likeliest or (with `noise`) drawn from the corrected distribution."""
        hidden = self.drafting(states.hidden)
        unary, state = self.logits(hidden), None

        def score(slot: int, token: Int[Tensor, "block"]) -> Float[Tensor, "block draft_vocab"]:
            nonlocal state
            seams = self.corrections[slot]
            state = seams.hook_prefix(self.prefix_gru(F.embedding(token, self.embedding), state))
            if slot < self.domino.pure_draft_prefix_len:
                return unary[:, slot]
            correction = self.embed_proj(torch.cat([hidden[:, slot], state], dim=-1))
            return unary[:, slot] + seams.hook_correction(correction)

        return propose_serially(
            self, anchor_tokens.flatten(), hidden.shape[1], score, temperature=temperature, noise=noise
        )

    @classmethod
    def build(
        cls,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        vocabulary: Int[Tensor, "draft_vocab"] | None,
        tensors: dict[str, Tensor],
    ) -> Self:
        """Early releases keep the head under a prefix, which is dropped."""
        for name in [name for name in tensors if name.startswith(_LEGACY)]:
            tensors[name.removeprefix(_LEGACY)] = tensors.pop(name)
        return super().build(config, embedding, head, vocabulary, tensors)
