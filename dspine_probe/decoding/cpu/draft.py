"""The draft engine on a CPU: context rows, the block's pass with DSpine's injections, candidates and the walk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cpu.kernels import FLOAT, Kernels, PackedMatrix
from dspine_probe.decoding.cpu.rows import RowSlots
from dspine_probe.decoding.cpu.stack import LayerStack, PackedLayer, SpineKernels, check_even, floats
from dspine_probe.decoding.engine import check_width, draw_marginals
from dspine_probe.decoding.weights import StackSizes, draft_layers, draft_rotary, draft_sizes, spine_weights
from dspine_probe.drafts import Draft
from dspine_probe.drafts.proposal import Candidates, Proposal
from dspine_probe.drafts.transition import TransitionCache
from dspine_probe.errors import UsageError


@dataclass(frozen=True)
class PackedSpine:
    """DSpine's own part.

    codes: √r e of every token, in the kernels' dtype. top_k: candidates of a slot.
    """

    kernels: SpineKernels
    codes: Float[Tensor, "vocab rank"]
    top_k: int


@dataclass(frozen=True)
class PackedDraft:
    """A draft's weights as the kernels want them; made once, used by any number of engines."""

    kernels: Kernels
    sizes: StackSizes
    layers: list[PackedLayer]
    fc: PackedMatrix
    head: PackedMatrix
    norm_context: Float[Tensor, "d_model"]
    norm_final: Float[Tensor, "d_model"]
    spine: PackedSpine | None

    @classmethod
    def pack(cls, draft: Draft, kernels: Kernels) -> PackedDraft:
        """Pack a draft.

        Raises:
            UsageError: a size is odd, or the draft lies elsewhere.
        """
        sizes, device = draft_sizes(draft), draft.fc.weight.device
        if device.type != "cpu":
            raise UsageError(f"the draft lies on {device}; fast CPU decoding needs it on the CPU")
        check_even(**{"hidden size": sizes.width, "head size": sizes.head_dim})
        return cls(
            kernels,
            sizes,
            layers=[PackedLayer(kernels, layer) for layer in draft_layers(draft)],
            fc=kernels.matrix(draft.fc.weight),
            head=kernels.matrix(draft.head),
            norm_context=floats(draft.hidden_norm.weight),
            norm_final=floats(draft.ln_final.weight),
            spine=_pack_spine(draft, kernels),
        )


def _pack_spine(draft: Draft, kernels: Kernels) -> PackedSpine | None:
    weights, top_k = spine_weights(draft), draft.candidate_count
    if weights is None or draft.codes is None or top_k is None:
        return None
    rank, message = draft.code_sizes
    check_even(**{"rank": rank, "message size": message})
    codes = (draft.codes.detach() * draft.codes.shape[1] ** 0.5).to(kernels.dtype)
    return PackedSpine(SpineKernels(kernels, weights), codes, top_k)


@dataclass(frozen=True)
class BlockRows:
    """What the layers leave of every slot: final states, those before the last injection, what that one mixed."""

    states: Float[Tensor, "row_width d_model"]
    before: Float[Tensor, "row_width d_model"]
    mixed: Float[Tensor, "row_width mixed"]


class CpuDraft:
    """`DraftEngine` over a packed draft."""

    def __init__(self, draft: Draft, packed: PackedDraft, rows: int, capacity: int, width: int) -> None:
        check_width(draft, width)
        self.draft, self.packed, self.kernels, self.width = draft, packed, packed.kernels, width
        self.rows = RowSlots(rows, capacity)
        self.rows.add(rows)
        rotary = draft_rotary(draft, capacity)
        self.stack = LayerStack(self.kernels, packed.sizes, packed.layers, rotary, slots=rows, capacity=capacity)

    def extend(self, taps: Float[Tensor, "row width taps_d_model"], counts: Sequence[int]) -> None:
        """See `DraftEngine.extend`; only the rows that count are computed."""
        counted = torch.cat([row[:count] for row, count in zip(taps, counts, strict=True)]).to(FLOAT)
        for part, span in self.rows.tokens(counts):
            feature = self.kernels.product(counted[part], self.packed.fc)
            for number in range(len(self.packed.layers)):
                self.stack.context(number, feature, self.packed.norm_context, span)
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
        drafted = block.states.unflatten(0, (-1, self.width))[:, 1:].flatten(0, 1)
        if self.packed.spine is None:
            return self._marginals(drafted, temperature, noise)
        return self._walk(self.packed.spine, block, drafted, temperature, noise)

    def select(self, rows: Sequence[int]) -> None:
        """See `DraftEngine.select`."""
        self.rows.select(rows)

    def _block(self, anchor_tokens: Int[Tensor, "row"]) -> BlockRows:
        """The layers, and after each of them the injection."""
        spine, last = self.packed.spine, len(self.packed.layers) - 1
        tokens = anchor_tokens.new_full((len(anchor_tokens), self.width), self.draft.config.mask_token_id)
        tokens[:, 0] = anchor_tokens
        states = F.embedding(tokens, self.draft.embedding).to(FLOAT)
        before, mixed = states if spine is None else torch.empty_like(states), []
        for piece in self.rows.pieces(self.width):
            x = states[piece.at].flatten(0, 1)  # a view: pieces are whole rows
            for number in range(last + 1):
                self.stack.layer(number, x, piece.span)
                if spine is None:
                    continue
                if number == last:
                    before[piece.at] = states[piece.at]
                sent = spine.kernels.inject(number, x, spine.codes[anchor_tokens[piece.at[0]]])
            if spine is not None:
                mixed.append(sent)
        rows = states.flatten(0, 1)
        return BlockRows(rows, before.flatten(0, 1), torch.cat(mixed) if mixed else rows[:, :0])

    def _marginals(
        self, drafted: Float[Tensor, "row_draft_slot d_model"], temperature: float, noise: Tensor | None
    ) -> Proposal:
        """Every slot's token from its own scores."""
        packed, eps = self.packed, self.packed.sizes.eps
        shape = (-1, self.width - 1)
        if noise is None:
            index = self.kernels.best(drafted, packed.head, 1, gain=packed.norm_final, eps=eps)
            return Proposal(self.draft.to_tokens(index.view(shape)))
        scores = self.kernels.product(drafted, packed.head, gain=packed.norm_final, eps=eps)
        return draw_marginals(self.draft, scores.unflatten(0, shape), temperature, noise)

    def _walk(
        self,
        spine: PackedSpine,
        block: BlockRows,
        drafted: Float[Tensor, "row_draft_slot d_model"],
        temperature: float,
        noise: Tensor | None,
    ) -> Proposal:
        """A walk over the transition cache."""
        packed, k = self.packed, spine.top_k
        index = self.kernels.best(drafted, packed.head, k, gain=packed.norm_final, eps=packed.sizes.eps)
        index = index.view(-1, self.width - 1, k)
        scores = spine.kernels.transitions(block.before, block.mixed, index)
        if noise is None:
            return Proposal(self.draft.to_tokens(self.kernels.walk(scores, index)))
        candidates = self.draft.to_tokens(index)
        drawn, probs = TransitionCache(candidates, scores).walk_sampled(temperature, noise)
        return Proposal(drawn, Candidates(candidates, probs))
