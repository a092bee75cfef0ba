"""The draft engine on a CPU: context rows, the block's pass with DSpine's injections, candidates and the walk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cpu.kernels import FLOAT, Kernels, PackedMatrix
from dspine_probe.decoding.cpu.spine import SpineKernels
from dspine_probe.decoding.cpu.stack import LayerStack, PackedLayer, check_even, floats
from dspine_probe.decoding.engine import check_draft
from dspine_probe.decoding.weights import StackSizes, draft_layers, draft_rotary, draft_sizes
from dspine_probe.drafts import Draft
from dspine_probe.drafts.proposal import Candidates, Proposal
from dspine_probe.drafts.transition import TransitionCache
from dspine_probe.errors import UsageError
from dspine_probe.sampling import pick, tempered


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
    spine: SpineKernels | None

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
            spine=None if draft.codes is None else SpineKernels(kernels, draft),
        )


class CpuDraft(LayerStack):
    """`DraftEngine` over a packed draft."""

    def __init__(self, draft: Draft, packed: PackedDraft, rows: int, capacity: int, width: int) -> None:
        check_draft(draft, width)
        rotary = draft_rotary(draft, capacity)
        super().__init__(packed.kernels, packed.sizes, packed.layers, rotary, rows=rows, capacity=capacity)
        self.draft, self.packed, self.width = draft, packed, width
        self.add(rows)

    def extend(
        self,
        taps: Float[Tensor, "row width taps_d_model"],
        counts: Sequence[int],
        following: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """See `DraftEngine.extend`; only the rows that count are computed."""
        counted = torch.cat([row[:count] for row, count in zip(taps, counts, strict=True)]).to(FLOAT)
        for part, place in self.tokens(counts):
            feature = self.kernels.product(counted[part], self.packed.fc)
            for number in range(len(self.layers)):
                self.layer(number, feature, place, self.packed.norm_context)
        self.commit(counts)

    def propose(
        self,
        anchor_tokens: Int[Tensor, "row"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "row draft_slot"] | None = None,
        on_trunk: Callable[[], None] | None = None,
    ) -> Proposal:
        """See `DraftEngine.propose`."""
        packed, spine, slots = self.packed, self.packed.spine, self.width - 1
        states, before, mixed = self._block(anchor_tokens)
        if on_trunk is not None:
            on_trunk()
        drafted, gain, eps = states[:, 1:].flatten(0, 1), packed.norm_final, packed.sizes.eps
        if spine is None and noise is not None:
            scores = self.kernels.product(drafted, packed.head, gain=gain, eps=eps)
            probs = tempered(scores.unflatten(0, (-1, slots)), temperature)
            every = self.draft.to_tokens(torch.arange(probs.shape[-1], device="cpu"))
            return Proposal(every[pick(probs, noise)], Candidates(every.expand_as(probs), probs))
        k = 1 if spine is None else spine.top_k
        index = self.kernels.best(drafted, packed.head, k, gain=gain, eps=eps).unflatten(0, (-1, slots))
        if spine is None:
            return Proposal(self.draft.to_tokens(index[..., 0]))
        scores = spine.transitions(before.flatten(0, 1), mixed, index)
        if noise is None:
            return Proposal(self.draft.to_tokens(self.kernels.walk(scores, index)))
        candidates = self.draft.to_tokens(index)
        drawn, probs = TransitionCache(candidates, scores).walk_sampled(temperature, noise)
        return Proposal(drawn, Candidates(candidates, probs))

    def _block(
        self, anchor_tokens: Int[Tensor, "row"]
    ) -> tuple[
        Float[Tensor, "row width d_model"], Float[Tensor, "row width d_model"], Float[Tensor, "row_width mixed"]
    ]:
        """The layers' final states; of a DSpine also those before the last injection, and what that one mixed."""
        spine, last = self.packed.spine, len(self.layers) - 1
        tokens = anchor_tokens.new_full((len(anchor_tokens), self.width), self.draft.config.mask_token_id)
        tokens[:, 0] = anchor_tokens
        states = F.embedding(tokens, self.draft.embedding).to(FLOAT)
        before, mixed = torch.empty_like(states), [states.new_empty(0, 0 if spine is None else spine.channels)]
        for here, place in self.pieces(self.width):
            x = states[here].flatten(0, 1)  # a view: pieces are whole rows
            for number in range(last + 1):
                self.layer(number, x, place)
                if spine is None:
                    continue
                if number == last:
                    before[here] = states[here]
                sent = spine.inject(number, x, spine.codes[anchor_tokens[here[0]]])
            if spine is not None:
                mixed.append(sent)
        return states, before, torch.cat(mixed)
