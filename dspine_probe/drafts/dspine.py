"""DSpine: a causal parallel draft that passes each slot's forming prediction to its successor after every layer.

After layer l, slot t reads a compact feature f of its predecessor (for slot 1 the anchor's true transfer code), gates
it against its own feature, and adds a message scaled to its own RMS (arXiv 2609.36173, adjacent causal injection). The
last injection is re-evaluated with true candidate codes in place of the feature (last-write refinement), which gives
the transition cache. Writes start at zero, so a fresh DSpine is exactly its causal backbone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import DraftConfig, DSpineConfig
from dspine_probe.drafts.backbone import Backbone, BlockStates, Context
from dspine_probe.drafts.transition import TransitionCache
from dspine_probe.errors import UsageError
from dspine_probe.transfer import TransferSpace


def require_dspine(config: DraftConfig) -> DSpineConfig:
    """The DSpine part of a config, or a refusal."""
    if config.dspine is None:
        raise UsageError(f"{config.architecture} has no dspine_config; DSpine cannot be built from it.")
    return config.dspine


@dataclass(frozen=True)
class TruePredecessors:
    """Training-time replacement: blocks in `replaced` are fed the true predecessor's code in the shallow layers."""

    tokens: Int[Tensor, "block slot"]
    replaced: Bool[Tensor, "block"]


@dataclass(frozen=True)
class SpineStates(BlockStates):
    """What a pass leaves behind: final-normed states, the last layer before its injection, features after each one."""

    pre_write: Float[Tensor, "block slot d_model"]
    features: tuple[Float[Tensor, "block slot rank"], ...]


class InjectionSeams(nn.Module):
    """Observation points of one layer's injection (predecessor feature, gate, write, residual stream after it)."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_pred, self.hook_gate = nn.Identity(), nn.Identity()
        self.hook_out, self.hook_resid = nn.Identity(), nn.Identity()


class LastWriteSeams(nn.Module):
    """Observation points of the last write repeated: known predecessor's code, gate, write; idle in the full pass."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_pred, self.hook_gate, self.hook_out = nn.Identity(), nn.Identity(), nn.Identity()


class Injection(nn.Module):
    """Readout and write of each layer, with the message and gates that all layers share."""

    bias: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        spine, layers = require_dspine(config), config.num_hidden_layers
        rank, message = spine.transfer_rank, spine.message_size
        self.readouts = nn.ModuleList(nn.Linear(config.hidden_size, rank, bias=False) for _ in range(layers))
        self.writes = nn.ModuleList(nn.Linear(message, config.hidden_size, bias=False) for _ in range(layers))
        self.message = nn.Linear(rank, message, bias=False)
        self.receiver_gate = nn.Linear(rank, message, bias=False)
        self.predecessor_gate = nn.Linear(rank, message, bias=False)
        self.bias = nn.Parameter(torch.zeros(message))

    def reset(self, basis: Float[Tensor, "d_model rank"]) -> None:
        """Identity start: readouts look along the principal directions, writes and the predecessor gate are zero."""
        with torch.no_grad():
            for readout, write in zip(self.readouts, self.writes, strict=True):
                readout.weight.copy_(basis.T)
                write.weight.zero_()
            self.predecessor_gate.weight.zero_()
            self.bias.zero_()

    def feature(self, layer: int, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch rank"]:
        """f_l(h) = √r · R_l h / ‖R_l h‖, unit RMS per coordinate."""
        read = self.readouts[layer](h).float()
        return (F.normalize(read, dim=-1) * read.shape[-1] ** 0.5).to(h.dtype)

    def gate(
        self, feature: Float[Tensor, "*batch rank"], pred: Float[Tensor, "*batch rank"]
    ) -> Float[Tensor, "*batch message"]:
        """g = σ(G_r f + G_p m + b), one value per message channel."""
        return torch.sigmoid(
            self.receiver_gate(feature) + self.predecessor_gate(pred) + self.bias.to(feature.dtype)
        )

    def write(
        self, layer: int, h: Float[Tensor, "*batch d_model"], gated: Float[Tensor, "*batch message"]
    ) -> Float[Tensor, "*batch d_model"]:
        """The update ‖h‖/√D · W_l(g ⊙ M m), scaled by the receiver's own RMS."""
        rms = h.float().square().mean(dim=-1, keepdim=True).sqrt().to(h.dtype)
        return rms * self.writes[layer](gated)


class DSpine(Backbone):
    """The full model: causal backbone, injection after every layer, last-write refinement, transition cache."""

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
        self.spine = require_dspine(config)
        self.injection = Injection(config)
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

    def scaled_codes(self, tokens: Int[Tensor, "*batch"], dtype: torch.dtype) -> Float[Tensor, "*batch rank"]:
        """√r · e_v, the form in which a code enters the injection."""
        return (F.embedding(tokens, self.codes) * self.codes.shape[1] ** 0.5).to(dtype)

    def run(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
        visible: Int[Tensor, "block draft_slot"] | None = None,
        true_predecessors: TruePredecessors | None = None,
        keep_features: bool = False,
    ) -> SpineStates:
        """One parallel pass over all blocks; `keep_features` also reads each layer out after its injection.

        Slots that show a `visible` token (−1: the mask) send their feature on like any other, not that token's code.
        """
        width = width or self.config.block_size
        rotary, bias = self.block_inputs(context, anchors, width)
        x = self.embed_block(anchor_tokens, width, visible)
        anchor_code = self.scaled_codes(anchor_tokens.flatten(), x.dtype)[:, None]
        features = []
        pre_write = x
        for layer, (block, keys, values) in enumerate(
            zip(self.blocks, context.keys, context.values, strict=True)
        ):
            pre_write = block(x, keys, values, rotary, bias)
            x = self.inject(layer, pre_write, anchor_code, true_predecessors)
            if keep_features:
                features.append(self.injection.feature(layer, x))
        return SpineStates(self.ln_final(x), pre_write, tuple(features))

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
            true_code = self.scaled_codes(truth.tokens[:, :-1], h.dtype)
            pred = torch.where(truth.replaced[:, None, None], true_code, pred)
        pred = seams.hook_pred(pred)
        gate = seams.hook_gate(self.injection.gate(feature[:, 1:], pred))
        write = seams.hook_out(self.injection.write(layer, h[:, 1:], gate * self.injection.message(pred)))
        return seams.hook_resid(torch.cat([h[:, :1], h[:, 1:] + write], dim=1))

    def refine(
        self,
        pre_write: Float[Tensor, "block draft_slot d_model"],
        predecessors: Int[Tensor, "block draft_slot k"],
    ) -> Float[Tensor, "block draft_slot k d_model"]:
        """Last write repeated with the true code of each known predecessor; final-normed states ρ_t(a)."""
        last, seams = len(self.blocks) - 1, self.last_write
        code = seams.hook_pred(self.scaled_codes(predecessors, pre_write.dtype))
        receiver = pre_write[:, :, None]
        gate = seams.hook_gate(self.injection.gate(self.injection.feature(last, receiver), code))
        write = seams.hook_out(self.injection.write(last, receiver, gate * self.injection.message(code)))
        return self.ln_final.normalize(receiver + write)

    def transition_cache(
        self, states: SpineStates, anchor_tokens: Int[Tensor, "batch anchor"], *, top_k: int | None = None
    ) -> TransitionCache:
        """Top-K candidates of every slot by unary score, and the refined score of each adjacent pair."""
        k = top_k or self.spine.top_k
        index = self.logits(states.hidden[:, 1:]).topk(k, dim=-1).indices
        candidates = self.to_tokens(index)
        anchor = anchor_tokens.flatten()[:, None, None].expand(-1, 1, k)
        refined = self.refine(states.pre_write[:, 1:], torch.cat([anchor, candidates[:, :-1]], dim=1))
        scores = refined @ F.embedding(index, self.head).transpose(-1, -2)
        return TransitionCache(candidates, scores)

    def draft_greedy(
        self,
        context: Context,
        anchor_tokens: Int[Tensor, "batch anchor"],
        anchors: Int[Tensor, "batch anchor"],
        *,
        width: int | None = None,
    ) -> Int[Tensor, "block draft_slot"]:
        """Tokens of slots 1…T by a greedy walk over the transition cache."""
        states = self.run(context, anchor_tokens, anchors, width=width)
        return self.transition_cache(states, anchor_tokens).walk_greedy()
