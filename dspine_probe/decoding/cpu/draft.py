"""The draft engine: context rows, the block's pass with DSpine's injections, candidates, transition cache and walk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cpu.compute import Compute, Geometry, SpineOps
from dspine_probe.decoding.cpu.rows import Piece, Rows
from dspine_probe.decoding.cpu.weights import draft_geometry, draft_layers, draft_rotary, spine_weights
from dspine_probe.decoding.engine import Candidates, Proposal
from dspine_probe.drafts import Draft, DSpine
from dspine_probe.drafts.transition import TransitionCache
from dspine_probe.errors import UsageError
from dspine_probe.sampling import pick, tempered


@dataclass(frozen=True)
class PackedDraft:
    """A draft's weights as a compute wants them; made once, used by any number of engines.

    codes: √r e of every token, in the compute's dtype; None, like `spine`, for a DFlash.
    """

    compute: Compute
    geometry: Geometry
    layers: Any
    fc: Any
    head: Any
    norm_context: Float[Tensor, "d_model"]
    norm_final: Float[Tensor, "d_model"]
    spine: SpineOps | None
    codes: Float[Tensor, "vocab rank"] | None

    @classmethod
    def pack(cls, draft: Draft, compute: Compute) -> PackedDraft:
        """Pack a draft.

        Raises:
            UsageError: hooks are set on it, or its sizes are not supported.
        """
        geometry = draft_geometry(draft)
        spine = codes = None
        if isinstance(draft, DSpine):
            spine = compute.spine(spine_weights(draft))
            codes = (draft.codes.detach() * draft.codes.shape[1] ** 0.5).to(compute.dtype)
        return cls(
            compute,
            geometry,
            layers=compute.layers(draft_layers(draft)),
            fc=compute.matrix(draft.fc.weight),
            head=compute.matrix(draft.head),
            norm_context=draft.hidden_norm.weight.detach().float(),
            norm_final=draft.ln_final.weight.detach().float(),
            spine=spine,
            codes=codes,
        )


@dataclass(frozen=True)
class BlockPass:
    """What the layers leave of every slot: final states, those before the last injection, what that one mixed."""

    states: Float[Tensor, "row_width d_model"]
    before: Float[Tensor, "row_width d_model"]
    mixed: Float[Tensor, "row_width mixed"]


class CpuDraft:
    """`DraftEngine` over a packed draft."""

    def __init__(self, draft: Draft, packed: PackedDraft, rows: int, capacity: int, width: int) -> None:
        if width > draft.config.block_size:
            raise UsageError(
                f"a block of {width} slots is wider than the {draft.config.block_size} this draft was trained with"
            )
        self.draft, self.packed, self.compute, self.width = draft, packed, packed.compute, width
        self.depth = draft.config.num_hidden_layers
        self.rows = Rows(rows, capacity)
        rotary = draft_rotary(draft, capacity)
        self.stack = packed.compute.stack(
            packed.geometry, packed.layers, rotary, slots=rows, capacity=capacity
        )
        self.opened = False

    def extend(self, taps: Float[Tensor, "row width taps_d_model"], counts: Sequence[int]) -> None:
        """See `DraftEngine.extend`."""
        if not self.opened:
            self.rows.open(len(counts))
            self.opened = True
        packed, taps = self.packed, taps[:, : max(counts)].float()
        for piece in self.rows.pieces(taps.shape[1]):
            feature = self.compute.product(taps[piece.at].flatten(0, 1).contiguous(), packed.fc)
            for number in range(self.depth):
                self.stack.context(number, feature, packed.norm_context, piece.span)
        self.rows.grow(counts)

    def propose(
        self,
        anchor_tokens: Int[Tensor, "row"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "row draft_slot"] | None = None,
        on_trunk: Callable[[], None] | None = None,
    ) -> Proposal:
        """See `DraftEngine.propose`."""
        block = self._block(anchor_tokens)
        if on_trunk is not None:
            on_trunk()
        slots = self._drafted(block.states)
        if self.packed.spine is None:
            return self._marginals(slots, temperature, noise)
        return self._walk(self.packed.spine, block, slots, temperature, noise)

    def select(self, rows: Sequence[int]) -> None:
        """See `DraftEngine.select`."""
        self.rows.select(rows)

    def _block(self, anchor_tokens: Int[Tensor, "row"]) -> BlockPass:
        tokens = anchor_tokens.new_full((len(anchor_tokens), self.width), self.draft.config.mask_token_id)
        tokens[:, 0] = anchor_tokens
        states = F.embedding(tokens, self.draft.embedding).float()
        parts = [
            self._piece(piece, states[piece.at].flatten(0, 1), anchor_tokens[piece.at[0]])
            for piece in self.rows.pieces(self.width)
        ]
        if len(parts) == 1:
            return parts[0]
        return BlockPass(*(torch.cat(tensors) for tensors in zip(*map(_fields, parts), strict=True)))

    def _piece(self, piece: Piece, x: Tensor, anchors: Int[Tensor, "row"]) -> BlockPass:
        """The layers, and after each of them the injection, on whole blocks."""
        packed = self.packed
        before, mixed = x, x[:, :0]
        codes = None if packed.codes is None else packed.codes[anchors]
        for number in range(self.depth):
            self.stack.layer(number, x, piece.span)
            if packed.spine is not None and codes is not None:
                before = x.clone() if number == self.depth - 1 else x
                mixed = packed.spine.inject(number, x, codes)
        return BlockPass(x, before, mixed)

    def _drafted(self, states: Tensor) -> Float[Tensor, "row_draft_slot d_model"]:
        """States of slots 1…T of every row."""
        return states.view(-1, self.width, states.shape[-1])[:, 1:].flatten(0, 1).contiguous()

    def _marginals(self, slots: Tensor, temperature: float, noise: Tensor | None) -> Proposal:
        packed, eps = self.packed, self.packed.geometry.eps
        shape = (-1, self.width - 1)
        if noise is None:
            index = self.compute.best(slots, packed.head, 1, gain=packed.norm_final, eps=eps)
            return Proposal(self.draft.to_tokens(index.view(shape)))
        scores = self.compute.product(slots, packed.head, gain=packed.norm_final, eps=eps)
        probs = tempered(scores.unflatten(0, shape), temperature)
        every = self.draft.to_tokens(torch.arange(probs.shape[-1]))
        return Proposal(every[pick(probs, noise)], Candidates(every.expand_as(probs), probs))

    def _walk(
        self, spine: SpineOps, block: BlockPass, slots: Tensor, temperature: float, noise: Tensor | None
    ) -> Proposal:
        packed, draft = self.packed, self.draft
        assert isinstance(draft, DSpine)
        k, eps = draft.spine.top_k, packed.geometry.eps
        index = self.compute.best(slots, packed.head, k, gain=packed.norm_final, eps=eps)
        index = index.view(-1, self.width - 1, k)
        scores = spine.transitions(block.before, block.mixed, index)
        if noise is None:
            return Proposal(draft.to_tokens(self.compute.walk(scores, index)))
        candidates = draft.to_tokens(index)
        drawn, probs = TransitionCache(candidates, scores).walk_sampled(temperature, noise)
        return Proposal(drawn, Candidates(candidates, probs))


def _fields(block: BlockPass) -> tuple[Tensor, Tensor, Tensor]:
    return block.states, block.before, block.mixed
