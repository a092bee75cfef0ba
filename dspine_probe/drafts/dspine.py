"""DSpine: a causal parallel draft that passes each slot's forming prediction to its successor after every layer.

After layer l, slot t reads a compact feature f of its predecessor (for slot 1 the anchor's true transfer code), gates
it against its own feature, and adds a message scaled to its own RMS (arXiv 2609.36173, adjacent causal injection). The
last injection is re-evaluated with true candidate codes in place of the feature (last-write refinement), which gives
the transition cache. Writes start at zero, so a fresh DSpine is exactly its causal backbone.
"""

from __future__ import annotations

from typing import Self, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.config import DSPINE, DraftConfig
from dspine_probe.drafts.backbone import Backbone
from dspine_probe.drafts.block import BlockInputs, BlockStates, TruePredecessors
from dspine_probe.drafts.injection import DSpineConfig, Injection, InjectionSeams, LastWriteSeams
from dspine_probe.drafts.layout import check_shape, refuse_names
from dspine_probe.drafts.proposal import Proposal
from dspine_probe.drafts.registry import register
from dspine_probe.drafts.transition import TransitionCache
from dspine_probe.errors import UsageError
from dspine_probe.transfer import TransferSpace, codes_from_projection

CODES, READY, MEAN, PROJECTION = "transfer_codes", "transfer_ready", "transfer_mean", "transfer_projection"
"""Public names of the table of codes and its flag, and of the small map that makes the codes from the target's head."""
_PAIR = "block draft_slot candidate"


@register(
    "dspine",
    architecture=DSPINE,
    objective="dspine_probe.training.objectives.dspine:DSpineObjective",
    part=DSpineConfig,
    causal=True,
)
class DSpine(Backbone):
    """The full model: causal backbone, injection after every layer, last-write refinement, transition cache."""

    after_seams = ("inject.hook_out", "inject.hook_resid")
    code_seams = ("inject.hook_pred", "last_write.hook_pred")
    late_seams = ("last_write.",)
    side_files = {"transfer.safetensors": ("codes", CODES)}
    hook_axes = {
        "inject.hook_pred": (
            "block draft_slot rank",
            "predecessor's feature; for slot 1 the anchor's code, √rank long",
        ),
        "inject.hook_gate": ("block draft_slot message", "gate, one value per message channel, 0…1"),
        "inject.hook_out": ("block draft_slot d_model", "what the injection adds to the residual stream"),
        "inject.hook_resid": ("block slot d_model", "residual stream after the layer and its injection"),
        "last_write.hook_pred": (f"{_PAIR} rank", "code of every known predecessor, √rank long"),
        "last_write.hook_gate": (f"{_PAIR} message", "gate of the last write given that predecessor, 0…1"),
        "last_write.hook_out": (f"{_PAIR} d_model", "what the last write adds given that predecessor"),
    }

    codes: Tensor
    transfer_mean: Tensor | None
    transfer_projection: Tensor | None

    def __init__(
        self,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        *,
        vocabulary: Int[Tensor, "draft_vocab"] | None = None,
        space: TransferSpace | None = None,
        codes: Float[Tensor, "vocab rank"] | None = None,
    ) -> None:
        """`space` defaults to the one fitted on `head`; with `codes`, a checkpoint's table, there is none."""
        super().__init__(config, embedding, head, vocabulary=vocabulary)
        self.spine = cast(DSpineConfig, config.part)
        self.injection = Injection(config, self.spine)
        for block in self.blocks:
            block.inject = InjectionSeams()
        self.last_write = LastWriteSeams()
        if codes is None:
            space = space or TransferSpace.fit(head, self.spine.transfer_rank)
            codes = space.codes(head)
            self.injection.reset(space.basis)
        self.register_buffer("transfer_mean", None if space is None else space.mean)
        self.register_buffer("transfer_projection", None if space is None else space.projection)
        self.register_buffer("codes", codes, persistent=False)

    @classmethod
    def build(
        cls,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        vocabulary: Int[Tensor, "draft_vocab"] | None,
        tensors: dict[str, Tensor],
    ) -> Self:
        """As the backbone's, with the stored table of codes, or the codes that the stored map gives."""
        cls.kind.check(config)
        codes, mean, projection = _take_codes(tensors, config, head)
        with torch.device("meta"):
            draft = cls(config, embedding, head, vocabulary=vocabulary, codes=codes)
        draft.transfer_mean, draft.transfer_projection = mean, projection
        return draft

    def own_tensors(self, *, full: bool) -> dict[str, Tensor]:
        """The map that makes the codes; the codes of every token if `full`, or if they were loaded without a map."""
        if full or self.transfer_mean is None or self.transfer_projection is None:
            return {CODES: self.codes.float().cpu(), READY: torch.tensor(True)}
        return {MEAN: self.transfer_mean.float().cpu(), PROJECTION: self.transfer_projection.float().cpu()}

    @property
    def candidate_count(self) -> int:
        """K."""
        return self.spine.top_k

    @property
    def code_sizes(self) -> tuple[int, int]:
        """Transfer rank and message size."""
        return self.spine.transfer_rank, self.spine.message_size

    def prediction_feature(self, layer: int, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch rank"]:
        """f_l(h), the readout that a slot sends on."""
        return self.injection.feature(layer, h)

    def zero_writes(self) -> None:
        """Zero the writes and the gate's bias, so that the draft is exactly its causal backbone."""
        with torch.no_grad():
            self.injection.bias.zero_()
            for parameter in self.injection.writes.parameters():
                parameter.zero_()

    def after_layer(
        self, layer: int, x: Float[Tensor, "block slot d_model"], inputs: BlockInputs
    ) -> Float[Tensor, "block slot d_model"]:
        """`inject`, with what the pass has been given."""
        assert inputs.anchor_code is not None
        return self.inject(layer, x, inputs.anchor_code, inputs.true_predecessors)

    def inject(
        self,
        layer: int,
        h: Float[Tensor, "block slot d_model"],
        anchor_code: Float[Tensor, "block 1 rank"],
        truth: TruePredecessors | None = None,
    ) -> Float[Tensor, "block slot d_model"]:
        """Slots 1…T receive their predecessor's feature as it stood before this update; the anchor is left alone."""
        seams = self.blocks[layer].inject
        feature = self.injection.feature(layer, h)
        pred = torch.cat([anchor_code, feature[:, 1:-1]], dim=1)
        if truth is not None and layer < self.spine.replacement_layers:
            true_code = cast(Tensor, self.message_codes(truth.tokens[:, :-1], h.dtype))
            pred = torch.where(truth.replaced[:, None, None], true_code, pred)
        pred = seams.hook_pred(pred)
        gate = seams.hook_gate(self.injection.gate(feature[:, 1:], pred))
        write = seams.hook_out(self.injection.write(layer, h[:, 1:], gate * self.injection.message(pred)))
        return seams.hook_resid(torch.cat([h[:, :1], h[:, 1:] + write], dim=1))

    def refine(
        self, last_layer: Float[Tensor, "block draft_slot d_model"], predecessors: Int[Tensor, "block draft_slot k"]
    ) -> Float[Tensor, "block draft_slot k d_model"]:
        """Last write repeated with the true code of each known predecessor; final-normed states ρ_t(a)."""
        last, seams = len(self.blocks) - 1, self.last_write
        code = seams.hook_pred(self.message_codes(predecessors, last_layer.dtype))
        receiver = last_layer[:, :, None]
        gate = seams.hook_gate(self.injection.gate(self.injection.feature(last, receiver), code))
        write = seams.hook_out(self.injection.write(last, receiver, gate * self.injection.message(code)))
        return self.ln_final.normalize(receiver + write)

    def transition_cache(
        self, states: BlockStates, anchor_tokens: Int[Tensor, "batch anchor"], *, top_k: int | None = None
    ) -> TransitionCache:
        """Top-K candidates of every slot by unary score, and the refined score of each adjacent pair."""
        k = top_k or self.spine.top_k
        index = self.logits(states.hidden[:, 1:]).topk(k, dim=-1).indices
        candidates = self.to_tokens(index)
        anchor = anchor_tokens.flatten()[:, None, None].expand(-1, 1, k)
        refined = self.refine(states.last_layer[:, 1:], torch.cat([anchor, candidates[:, :-1]], dim=1))
        scores = refined @ F.embedding(index, self.head).transpose(-1, -2)
        return TransitionCache(candidates, scores)

    def propose(
        self,
        states: BlockStates,
        anchor_tokens: Int[Tensor, "batch anchor"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "block draft_slot"] | None = None,
    ) -> Proposal:
        """Tokens of slots 1…T by a walk over the transition cache, greedy or (with `noise`) drawn."""
        return self.transition_cache(states, anchor_tokens).propose(temperature, noise)


def _take_codes(
    tensors: dict[str, Tensor], config: DraftConfig, head: Float[Tensor, "vocab d_model"]
) -> tuple[Float[Tensor, "vocab rank"], Float[Tensor, "d_model"] | None, Float[Tensor, "d_model rank"] | None]:
    """Codes of every token, with the map that makes them if that is what the checkpoint stores."""
    rank = cast(DSpineConfig, config.part).transfer_rank
    if CODES in tensors:
        codes, ready = tensors.pop(CODES).float(), tensors.pop(READY, None)
        check_shape(CODES, codes, (config.vocab_size, rank), config)
        if ready is not None and not bool(ready):
            raise UsageError(
                "transfer_ready is false, so the transfer codes were never filled in; save the draft again"
            )
        return codes, None, None
    refuse_names("no tensors", {MEAN, PROJECTION} - tensors.keys(), config)
    mean, projection = tensors.pop(MEAN).float(), tensors.pop(PROJECTION).float()
    check_shape(MEAN, mean, (config.hidden_size,), config)
    check_shape(PROJECTION, projection, (config.hidden_size, rank), config)
    return codes_from_projection(head, mean, projection), mean, projection
