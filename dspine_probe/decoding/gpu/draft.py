"""The draft engine on a GPU: context rows, the block's pass with its injections, and the head, one captured step each.

The block's keys and values stand in the cache behind the context, where the next context rows will overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.engine import check_draft
from dspine_probe.decoding.gpu.layers import FusedLayer, FusedStack
from dspine_probe.decoding.graphs import Capturing, Outputs, frozen
from dspine_probe.decoding.kernels.candidates import top_candidates
from dspine_probe.decoding.kernels.injection import LayerInjection, LayerReads, fold, inject
from dspine_probe.decoding.kernels.last_write import Pairs, Refiner, pair_parts
from dspine_probe.decoding.kernels.layer_ops import rotate_and_store
from dspine_probe.decoding.kernels.walk import walk
from dspine_probe.decoding.weights import StackSizes, draft_layers, draft_rotary, draft_sizes
from dspine_probe.drafts import Backbone, Draft
from dspine_probe.drafts.block import BlockStates
from dspine_probe.drafts.injection import Injection
from dspine_probe.drafts.proposal import Candidates, Proposal


@dataclass(frozen=True)
class FusedDraft:
    """A draft's weights with fused products; made once, used by any number of engines.

    context: key and value projections of all layers, for context rows. injections, refiner: DSpine's own.
    """

    sizes: StackSizes
    layers: list[FusedLayer]
    context: Float[Tensor, "layer d_model two_kv"]
    injections: list[LayerInjection]
    refiner: Refiner | None

    @classmethod
    def fuse(cls, draft: Draft) -> FusedDraft:
        """Fuse a draft's weights."""
        sizes, plain = draft_sizes(draft), draft_layers(draft)
        context = torch.stack([torch.cat([layer.k, layer.v]).T for layer in plain]).contiguous()
        layers = [FusedLayer.fuse(layer, sizes) for layer in plain]
        if draft.codes is None:
            return cls(sizes, layers, context, [], None)
        injections = fold(cast(Injection, draft.injection), draft.codes)
        refiner = Refiner(injections[-1], draft.ln_final.weight.detach(), sizes.eps, draft.head)
        return cls(sizes, layers, context, injections, refiner)


class GpuDraft(FusedStack):
    """`DraftEngine` over fused weights."""

    def __init__(
        self, draft: Draft, fused: FusedDraft, *, rows: int, capacity: int, width: int, how: Capturing
    ) -> None:
        check_draft(draft, width)
        frozen(draft, self)
        rotary = draft_rotary(draft, capacity)
        super().__init__(fused.layers, fused.sizes, rotary, rows=rows, capacity=capacity, how=how)
        self.fused, self.draft, self.width = fused, draft, width
        self.set_lengths([0] * rows)

    def extend(
        self,
        taps: Float[Tensor, "row width taps_d_model"],
        counts: Sequence[int],
        following: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """See `DraftEngine.extend`."""
        inputs = self.inputs(taps.shape[1], taps=taps.to(self.draft.fc.weight.dtype))
        if taps.shape[1] == self.width:
            self.step("context", self._context)(**inputs)
        else:  # a prompt
            self._context(**inputs)
        self.commit(counts)

    def propose(
        self,
        anchor_tokens: Int[Tensor, "row"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "row draft_slot"] | None = None,
        on_trunk: Callable[[], None] | None = None,
    ) -> Proposal:
        """See `DraftEngine.propose`; the proposal is overwritten by the next one."""
        trunk, count = self.step("trunk", self._block), len(anchor_tokens)
        trunk(**self.inputs(self.width, anchors=anchor_tokens))
        if on_trunk is not None:
            on_trunk()
        if noise is None:
            return Proposal(self.step("greedy head", self._head, trunk)()[0][:count])
        head = self.step(("head", temperature), partial(self._head, temperature=temperature), trunk)
        tokens, ids, probs = head(noise=self.padded(noise))
        return Proposal(tokens[:count], Candidates(ids[:count], probs[:count]))

    def _context(self, taps: Float[Tensor, "row width taps_d_model"], starts: Int[Tensor, "row"]) -> Outputs:
        """Keys and values of context rows, of all layers."""
        feature = self.draft.hidden_norm.normalize(F.linear(taps.flatten(0, 1), self.draft.fc.weight))
        products = torch.bmm(feature.expand(len(self.layers), -1, -1), self.fused.context)
        for number, (layer, product) in enumerate(zip(self.layers, products, strict=True)):
            heads = replace(layer.heads, queries=0)
            rotate_and_store(product, heads, self.rotary, starts, self.cache(number, len(starts)))
        return ()

    def _block(self, anchors: Int[Tensor, "row"], starts: Int[Tensor, "row"]) -> Outputs:
        """The block's pass: final states, anchors; of a DSpine the states before the last write, and its readings."""
        tokens = anchors.new_full((len(anchors), self.width), self.draft.config.mask_token_id)
        tokens[:, 0] = anchors
        x = F.embedding(tokens, self.draft.embedding).flatten(0, 1)
        own: Outputs = ()
        for number in range(len(self.layers)):
            x = self.layer(number, x, starts)
            if self.fused.refiner is not None:
                before = x
                x, readings = inject(x, anchors, self.fused.injections[number])
                own = (before, *vars(readings).values())
        return self.draft.ln_final.normalize(x).view(len(anchors), self.width, -1), anchors, *own

    def _head(
        self,
        hidden: Float[Tensor, "row width d_model"],
        anchors: Int[Tensor, "row"],
        *own: Tensor,
        noise: Float[Tensor, "row draft_slot"] | None = None,
        temperature: float = 1.0,
    ) -> Outputs:
        """From what `_block` left: tokens, and with `noise` ids and probabilities of what they were drawn from."""
        refiner, draft = self.fused.refiner, self.draft
        if refiner is None:  # every slot chooses on its own
            states = BlockStates((), hidden, hidden)
            found = Backbone.propose(draft, states, anchors[:, None], temperature=temperature, noise=noise)
        else:
            assert draft.candidate_count is not None
            index = top_candidates(draft.logits(hidden[:, 1:]), draft.candidate_count)
            pairs = Pairs(draft.to_tokens(index), index, anchors)
            parts = pair_parts(own[0], LayerReads(*own[1:]), pairs, refiner)
            found = walk(parts, pairs.candidates, temperature=temperature, noise=noise)
        return (found.tokens,) if found.q is None else (found.tokens, found.q.ids, found.q.probs)
