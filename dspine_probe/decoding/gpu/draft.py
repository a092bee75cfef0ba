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

from dspine_probe.decoding.engine import check_width, draw_marginals
from dspine_probe.decoding.gpu.layers import FusedLayer, FusedStack, RowEnds
from dspine_probe.decoding.graphs import Capturing, FixedStep, Outputs, frozen
from dspine_probe.decoding.kernels.candidates import top_candidates
from dspine_probe.decoding.kernels.folding import LayerInjection, code_tables, fold
from dspine_probe.decoding.kernels.injection import LayerReads, inject
from dspine_probe.decoding.kernels.last_write import Pairs, Refiner, pair_parts
from dspine_probe.decoding.kernels.layer_ops import rotate_and_store
from dspine_probe.decoding.kernels.walk import Walk, walk
from dspine_probe.decoding.weights import StackSizes, draft_layers, draft_rotary, draft_sizes
from dspine_probe.drafts import Draft
from dspine_probe.drafts.injection import Injection
from dspine_probe.drafts.proposal import Candidates, Proposal


@dataclass(frozen=True)
class FusedDraft:
    """A draft's weights with fused products; made once, used by any number of engines.

    context: key and value projections of all layers, for context rows. injections, refiner: DSpine's own.
    """

    sizes: StackSizes
    layers: tuple[FusedLayer, ...]
    context: Float[Tensor, "layer d_model two_kv"]
    injections: tuple[LayerInjection, ...]
    refiner: Refiner | None

    @classmethod
    def fuse(cls, draft: Draft) -> FusedDraft:
        """Fuse a draft's weights."""
        sizes = draft_sizes(draft)
        plain = draft_layers(draft)
        context = torch.stack([torch.cat([layer.k, layer.v]).T for layer in plain]).contiguous()
        layers = tuple(FusedLayer.fuse(layer, sizes) for layer in plain)
        if draft.codes is None:
            return cls(sizes, layers, context, (), None)
        injection = cast(Injection, draft.injection)
        injections = tuple(fold(injection, number) for number in range(len(layers)))
        tables = code_tables(injection, draft.codes)
        refiner = Refiner(injections[-1], tables, draft.ln_final.weight.detach(), sizes.eps, draft.head)
        return cls(sizes, layers, context, injections, refiner)


@dataclass(frozen=True)
class Trunk:
    """What the block's pass leaves for the head; the last two are DSpine's."""

    hidden: Float[Tensor, "row width d_model"]
    anchors: Int[Tensor, "row"]
    pre_write: Float[Tensor, "slot d_model"] | None = None
    readings: LayerReads | None = None


class GpuDraft:
    """`DraftEngine` over fused weights."""

    def __init__(
        self, draft: Draft, fused: FusedDraft, *, rows: int, capacity: int, width: int, how: Capturing
    ) -> None:
        check_width(draft, width)
        frozen(draft, self)
        self.fused, self.draft, self.width, self.how = fused, draft, width, how
        rotary = draft_rotary(draft, capacity)
        self.stack = FusedStack(fused.layers, fused.sizes, rotary, rows=rows, capacity=capacity)
        self.rows = RowEnds(rows, capacity, draft.fc.weight.device)
        self.rows.open(rows)
        self.steps: dict[tuple[str, int], FixedStep] = {}
        self.trunks: dict[int, Trunk] = {}  # by rows, as steps are

    def extend(self, taps: Float[Tensor, "row width taps_d_model"], counts: Sequence[int]) -> None:
        """See `DraftEngine.extend`."""
        taps = taps.to(self.draft.fc.weight.dtype)
        self.rows.require(taps.shape[1])
        inputs = {"taps": self.rows.padded(taps), "starts": self._starts()}
        if taps.shape[1] == self.width:
            self._step("context", self._context)(**inputs)
        else:  # a prompt
            self._context(**inputs)
        self.rows.grow(counts)

    def propose(
        self,
        anchor_tokens: Int[Tensor, "row"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "row draft_slot"] | None = None,
        on_trunk: Callable[[], None] | None = None,
    ) -> Proposal:
        """See `DraftEngine.propose`; the proposal is overwritten by the next one."""
        self.rows.require(self.width)
        count = len(anchor_tokens)
        trunk = self._step("trunk", self._block)
        trunk(anchors=self.rows.padded(anchor_tokens), starts=self._starts())
        if on_trunk is not None:
            on_trunk()
        if noise is None:
            (tokens,) = self._step("greedy head", self._greedy_head, source=trunk)()
            return Proposal(tokens[:count])
        head = partial(self._sampled_head, temperature=temperature)
        step = self._step(f"head at {temperature}", head, source=trunk)
        tokens, ids, probs = step(noise=self.rows.padded(noise))
        return Proposal(tokens[:count], Candidates(ids[:count], probs[:count]))

    def select(self, rows: Sequence[int]) -> None:
        """See `DraftEngine.select`."""
        self.rows.select(rows, self.stack)

    # ---- steps

    def _step(self, kind: str, function: Callable[..., Outputs], source: FixedStep | None = None) -> FixedStep:
        """The step of this kind for as many rows as there are."""
        key = kind, self.rows.bucket
        if key not in self.steps:
            self.steps[key] = FixedStep(function, self.how, source=source)
        return self.steps[key]

    def _starts(self) -> Int[Tensor, "row"]:
        return self.rows.ends[: self.rows.bucket]

    def _context(self, taps: Float[Tensor, "row width taps_d_model"], starts: Int[Tensor, "row"]) -> Outputs:
        """Keys and values of context rows, of all layers."""
        feature = self.draft.hidden_norm.normalize(F.linear(taps.flatten(0, 1), self.draft.fc.weight))
        products = torch.bmm(feature.expand(len(self.fused.context), -1, -1), self.fused.context)
        for number, (layer, product) in enumerate(zip(self.fused.layers, products, strict=True)):
            heads = replace(layer.heads, queries=0)
            rotate_and_store(product, heads, self.stack.rotary, starts, self.stack.cache(number, len(starts)))
        return ()

    def _block(self, anchors: Int[Tensor, "row"], starts: Int[Tensor, "row"]) -> Outputs:
        """The block's pass."""
        tokens = anchors.new_full((len(anchors), self.width), self.draft.config.mask_token_id)
        tokens[:, 0] = anchors
        x = F.embedding(tokens, self.draft.embedding).flatten(0, 1)
        pre_write, readings = None, None
        for number in range(len(self.fused.layers)):
            x = self.stack.run(number, x, starts)
            if self.fused.refiner is not None:
                pre_write = x
                x, readings = inject(x, anchors, self.fused.injections[number], self.fused.refiner.tables)
        hidden = self.draft.ln_final.normalize(x).view(len(anchors), self.width, -1)
        self.trunks[len(anchors)] = Trunk(hidden, anchors, pre_write, readings)
        return (hidden,)

    def _greedy_head(self) -> Outputs:
        """The tokens alone."""
        trunk = self.trunks[self.rows.bucket]
        if self.fused.refiner is None:
            return (self.draft.to_tokens(self._logits(trunk).max(dim=-1).indices),)
        walked, _ = self._walk(trunk, self.fused.refiner)
        return (walked.tokens,)

    def _sampled_head(self, noise: Float[Tensor, "row draft_slot"], temperature: float) -> Outputs:
        """Tokens, and ids and probabilities of what they were drawn from."""
        trunk = self.trunks[self.rows.bucket]
        if self.fused.refiner is not None:
            walked, candidates = self._walk(trunk, self.fused.refiner, temperature, noise)
            assert walked.probs is not None
            return walked.tokens, candidates, walked.probs
        drawn = draw_marginals(self.draft, self._logits(trunk), temperature, noise)
        assert drawn.q is not None
        return drawn.tokens, drawn.q.ids, drawn.q.probs

    def _walk(
        self, trunk: Trunk, refiner: Refiner, temperature: float = 1.0, noise: Tensor | None = None
    ) -> tuple[Walk, Int[Tensor, "row draft_slot k"]]:
        """The walk over the transition cache, and the candidates."""
        top_k = self.draft.candidate_count
        assert top_k is not None and trunk.pre_write is not None and trunk.readings is not None
        index = top_candidates(self._logits(trunk), top_k)
        candidates = self.draft.to_tokens(index)
        pairs = Pairs(candidates, index, trunk.anchors)
        parts = pair_parts(trunk.pre_write, trunk.readings, pairs, refiner)
        return walk(parts, candidates, temperature=temperature, noise=noise), candidates

    def _logits(self, trunk: Trunk) -> Float[Tensor, "row draft_slot draft_vocab"]:
        return F.linear(trunk.hidden[:, 1:], self.draft.head)
