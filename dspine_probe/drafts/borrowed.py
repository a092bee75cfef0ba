"""What every draft has: its target's embedding and head, which tokens it may propose, and how it is stored and asked.

A parallel draft is a `Backbone`; a draft that is no block pass derives from `Borrowed` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dspine_probe.config import DraftConfig
from dspine_probe.drafts.block import Context
from dspine_probe.drafts.layers import Rotary, rotary_tables
from dspine_probe.errors import UsageError

if TYPE_CHECKING:
    from dspine_probe.drafts.proposal import Proposal
    from dspine_probe.drafts.registry import Kind


class Borrowed(nn.Module):
    """The target's own matrices, kept frozen as buffers.

    With `vocabulary`, the draft predicts only these token ids (a frequency-trimmed head); scores then range over them.
    """

    kind: ClassVar[Kind]
    hook_axes: ClassVar[dict[str, tuple[str, str]]] = {}
    """Axes and meaning of the kind's own hook points, by the last parts of their names."""
    late_seams: ClassVar[tuple[str, ...]] = ()
    """Hook points (by the start of their names) that wait for `propose` and do not fire in `run`."""
    side_files: ClassVar[dict[str, tuple[str, str]]] = {}
    """Files that a checkpoint may hold beside the weights: the key to read from each, and its public tensor name."""
    stores_borrowed: ClassVar[bool] = False
    """Whether public releases of the kind hold copies of the target's matrices."""
    training_record: Mapping[str, Any] = MappingProxyType({})
    """Plan, budget and seed with which the draft was trained, as its checkpoint says; empty where that is not known."""
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
        index = _inverse(vocabulary, config.vocab_size)
        head = head if vocabulary is None else head[vocabulary]
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("draft_index", index, persistent=False)
        self.register_buffer("head", head.detach(), persistent=False)

    def zero_writes(self) -> None:
        """Zero whatever adds to the plain backbone, in place; here nothing does."""

    @property
    def candidate_count(self) -> int | None:
        """How many candidates a slot's token is chosen among; None for the whole vocabulary."""
        return None

    def own_tensors(self, *, full: bool) -> dict[str, Tensor]:
        """What a checkpoint holds beside parameters and vocabulary, under public names; `full` may spell out more."""
        return {}

    @classmethod
    def build(
        cls,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        vocabulary: Int[Tensor, "draft_vocab"] | None,
        tensors: dict[str, Tensor],
    ) -> Self:
        """The draft of a checkpoint with parameters still to be assigned; takes its own tensors out of `tensors`."""
        with torch.device("meta"):
            return cls(config, embedding, head, vocabulary=vocabulary)

    def draft_greedy(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
    ) -> Int[Tensor, "block draft_slot"]:
        """The tokens the draft proposes for slots 1…T without drawing."""
        proposal: Proposal = self.propose(self.run(context, anchor_tokens, anchors, width=width), anchor_tokens)
        return proposal.tokens

    def context_rotary(self, feature: Float[Tensor, "batch ctx d_model"], start: int | Int[Tensor, "batch"]) -> Rotary:
        """Rotary tables of context rows at positions start, start+1, …"""
        ahead = torch.arange(feature.shape[1], device=feature.device)
        positions = start + ahead if isinstance(start, int) else start[:, None] + ahead
        return rotary_tables(positions, self.config.head_dim, self.config.rope_theta, feature.dtype)

    def to_tokens(self, index: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Token ids of positions in the draft's vocabulary."""
        return index if self.vocabulary is None else self.vocabulary[index]

    def to_index(self, tokens: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Positions of tokens in the draft's vocabulary; −1 for a token the draft cannot propose."""
        return tokens if self.draft_index is None else self.draft_index[tokens]


def check_visible(visible: Tensor, shape: tuple[int, int], vocab_size: int) -> None:
    """Refuse tokens to show in draft slots that are not −1 or the target's, or not one for each slot."""
    if tuple(visible.shape) != shape:
        raise UsageError(
            f"visible tokens are {tuple(visible.shape)} but the blocks have {shape} draft slots; give each slot a "
            "token, or −1 for the mask."
        )
    if visible.numel() and not -1 <= int(visible.min()) <= int(visible.max()) < vocab_size:
        raise UsageError(f"visible tokens must be −1 or one of 0…{vocab_size - 1}.")


def _inverse(vocabulary: Int[Tensor, "draft_vocab"] | None, vocab_size: int) -> Int[Tensor, "vocab"] | None:
    if vocabulary is None:
        return None
    index = torch.full((vocab_size,), -1, device=vocabulary.device)
    index[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return index


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
        raise UsageError(f"the draft's vocabulary lists {size} tokens but its config says {config.draft_vocab_size}.")
