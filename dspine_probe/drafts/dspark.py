"""DSpark: a parallel backbone with shifted slots and a sequential head that scores each token by the one before it.

The head adds W₂ of a vector made from the predecessor's row of W₁: the row itself (vanilla), the row gated by the
slot's state, or the output of a small recurrent cell (rnn); arXiv 2607.05147. A confidence head predicts whether a
proposal is accepted given that those before it are. W₂ starts at zero, so a fresh DSpark proposes as its
backbone does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspine_probe.config import ConfigPart, DraftConfig
from dspine_probe.drafts.backbone import Backbone
from dspine_probe.drafts.block import BlockStates
from dspine_probe.drafts.proposal import Proposal, propose_serially
from dspine_probe.drafts.registry import register
from dspine_probe.errors import UsageError

HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig(ConfigPart):
    """The sequential head's rank and type, and the confidence head."""

    KEY: ClassVar[str] = ""
    SHIFTED: ClassVar[bool] = True
    FLAT: ClassVar[bool] = True

    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self) -> None:
        if self.markov_rank < 1:
            raise UsageError(f"markov_rank is {self.markov_rank}; without that head the draft is a dflash.")
        if self.markov_head_type not in HEADS:
            raise UsageError(f"markov_head_type {self.markov_head_type!r} is unknown; use one of {', '.join(HEADS)}.")

    @classmethod
    def for_target(cls, hidden_size: int) -> Self:
        """A sixth of the hidden size as the head's rank, at most the published 256."""
        return cls(markov_rank=max(1, min(256, hidden_size // 6)))


class SequentialHead(nn.Module):
    """From a slot's state and the token before it to what W₂ turns into scores."""

    def __init__(self, vocab: int, draft_vocab: int, width: int, slots: int, part: DSparkConfig) -> None:
        super().__init__()
        rank, self.form = part.markov_rank, part.markov_head_type
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        nn.init.zeros_(self.markov_w2.weight)
        if self.form == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.form == "rnn":
            self.joint_proj = nn.Linear(width + 2 * rank, 3 * rank)
        self.slots = nn.ModuleList(_Seam() for _ in range(slots))

    def step(
        self,
        hidden: Float[Tensor, "block d_model"],
        previous: Int[Tensor, "block"],
        state: Float[Tensor, "block rank"] | None,
    ) -> tuple[Float[Tensor, "block rank"], Float[Tensor, "block rank"] | None]:
        """The input of W₂ for one slot after tokens `previous`, and the recurrent state (None at the first slot)."""
        row = self.markov_w1(previous).to(hidden.dtype)
        if self.form == "vanilla":
            return row, None
        if self.form == "gated":
            return self.gate_proj(torch.cat([hidden, row], dim=-1)).sigmoid() * row, None
        state = torch.zeros_like(row) if state is None else state
        keep, new, out = self.joint_proj(torch.cat([state, row, hidden], dim=-1)).chunk(3, dim=-1)
        keep = keep.sigmoid()
        return out.tanh(), keep * state + (1 - keep) * new.tanh()

    def forced(
        self, hidden: Float[Tensor, "block draft_slot d_model"], previous: Int[Tensor, "block draft_slot"]
    ) -> Float[Tensor, "block draft_slot rank"]:
        """The inputs of W₂ for all slots after known tokens."""
        state, found = None, []
        for slot in range(hidden.shape[1]):
            one, state = self.step(hidden[:, slot], previous[:, slot], state)
            found.append(one)
        return torch.stack(found, dim=1)


class _Seam(nn.Module):
    """Observation point of one slot's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_bias = nn.Identity()


class ConfidenceHead(nn.Module):
    """One linear map to the log-odds of acceptance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


@register(
    "dspark",
    architecture="Qwen3DSparkModel",
    objective="dspine_probe.training.objectives.dspark:DSparkObjective",
    part=DSparkConfig,
)
class DSpark(Backbone):
    """The shifted backbone with its sequential head; `confidence` is there where the config enables it."""

    stores_borrowed = True
    late_seams = ("markov_head.",)
    hook_axes = {"hook_bias": ("block draft_vocab", "what this slot's scores gain from the token before it")}

    def __init__(
        self,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        *,
        vocabulary: Int[Tensor, "draft_vocab"] | None = None,
    ) -> None:
        super().__init__(config, embedding, head, vocabulary=vocabulary)
        self.spark = cast(DSparkConfig, config.part)
        width = config.hidden_size
        self.markov_head = SequentialHead(config.vocab_size, len(self.head), width, config.num_slots, self.spark)
        self.confidence_head: ConfidenceHead | None = None
        if self.spark.enable_confidence_head:
            extra = self.spark.markov_rank if self.spark.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(width + extra)

    def zero_writes(self) -> None:
        """Zero W₂."""
        with torch.no_grad():
            self.markov_head.markov_w2.weight.zero_()

    def confidence(
        self, hidden: Float[Tensor, "block draft_slot d_model"], previous: Int[Tensor, "block draft_slot"]
    ) -> Float[Tensor, "block draft_slot"]:
        """Log-odds that each slot's proposal is accepted if those before it are; `previous` are the tokens before each.

        Its gradient does not reach the rows of W₁.

        Raises:
            UsageError: the draft has no confidence head.
        """
        if self.confidence_head is None:
            raise UsageError("this dspark has no confidence head; load one with enable_confidence_head.")
        if self.spark.confidence_head_with_markov:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(previous).detach().to(hidden.dtype)], dim=-1)
        return self.confidence_head.proj(hidden).squeeze(-1)

    def propose(
        self,
        states: BlockStates,
        anchor_tokens: Int[Tensor, "batch anchor"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "block draft_slot"] | None = None,
    ) -> Proposal:
        """Tokens 1…T one after another, the likeliest or (with `noise`) drawn from the corrected distribution."""
        hidden, markov = self.drafting(states.hidden), self.markov_head
        unary, state = self.logits(hidden), None

        def score(slot: int, token: Int[Tensor, "block"]) -> Float[Tensor, "block draft_vocab"]:
            nonlocal state
            read, state = markov.step(hidden[:, slot], token, state)
            return unary[:, slot] + markov.slots[slot].hook_bias(markov.markov_w2(read))

        return propose_serially(
            self, anchor_tokens.flatten(), hidden.shape[1], score, temperature=temperature, noise=noise
        )
