"""Trainable parts of the injection experiment: the injector, and what competes with it behind the last layer.

`CodeInjector` has DSpine's form (arXiv 2609.36173): h ← h + ‖h‖/√D · W(σ(G_r f + G_p m + b) ⊙ M m), where m = √r · e is
the code of the predecessor and f the receiver's own feature. Its write starts at zero, so an untrained injector changes
nothing; gates start near one half. `ExtraMLP` and `ExtraLayers` give late injection the compute that it skips,
`MarkovHead` adds a low-rank bigram bias to the scores (DSpark, arXiv 2607.05147). All three start as no change, too.
`Codes` holds the vectors that are injected.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.drafts import Draft
from dspine_probe.drafts.layers import DraftLayer, RMSNorm, rotary_tables
from dspine_probe.experiments.injection_depth.blocks import BlockPass, Sites
from dspine_probe.transfer import TransferSpace

TRANSFER, RANDOM, NOISE = "transfer", "random", "noise"


@dataclass(frozen=True)
class Codes:
    """What can be injected for a token, each √r long.

    transfer: the whitened transfer codes. random: a fixed random direction for every token, so that only the geometry
    is lost. Noise is drawn anew for every site and knows nothing of the token.
    """

    basis: Float[Tensor, "d_model rank"]
    transfer: Float[Tensor, "vocab rank"]
    random: Float[Tensor, "vocab rank"]

    @classmethod
    def of(cls, head: Float[Tensor, "vocab d_model"], rank: int, seed: int) -> Codes:
        """The codes of a target's head; `seed` draws the random table."""
        space = TransferSpace.fit(head, rank)
        drawn = torch.randn(len(head), rank, generator=derive_generator(seed, "random codes"))
        return cls(space.basis, space.codes(head), F.normalize(drawn, dim=-1).to(head.device))

    @property
    def rank(self) -> int:
        """Length r of a code."""
        return self.transfer.shape[1]

    def message(self, kind: str, tokens: Int[Tensor, "site"], generator: torch.Generator) -> Float[Tensor, "site rank"]:
        """m of every site; `generator` draws the noise."""
        if kind == NOISE:
            drawn = torch.randn(len(tokens), self.rank, generator=generator).to(tokens.device)
            return F.normalize(drawn, dim=-1) * self.rank**0.5
        table = self.transfer if kind == TRANSFER else self.random
        return F.embedding(tokens, table) * self.rank**0.5


class CodeInjector(nn.Module):
    """Readout, gate, message and write of one place; the same size wherever it stands."""

    def __init__(self, basis: Float[Tensor, "d_model rank"], message: int) -> None:
        super().__init__()
        d_model, rank = basis.shape
        self.readout = nn.Linear(d_model, rank, bias=False)
        self.receiver_gate = nn.Linear(rank, message, bias=False)
        self.predecessor_gate = nn.Linear(rank, message, bias=False)
        self.bias = nn.Parameter(torch.zeros(message))
        self.message = nn.Linear(rank, message, bias=False)
        self.write = nn.Linear(message, d_model, bias=False)
        with torch.no_grad():
            self.readout.weight.copy_(basis.T)
            self.predecessor_gate.weight.zero_()
            self.write.weight.zero_()

    def forward(
        self, h: Float[Tensor, "site d_model"], code: Float[Tensor, "site rank"]
    ) -> Float[Tensor, "site d_model"]:
        read = self.readout(h).float()
        feature = (F.normalize(read, dim=-1) * read.shape[-1] ** 0.5).to(h.dtype)
        code = code.to(h.dtype)
        gate = torch.sigmoid(self.receiver_gate(feature) + self.predecessor_gate(code) + self.bias.to(h.dtype))
        rms = h.float().square().mean(dim=-1, keepdim=True).sqrt()
        return h + (rms * self.write(gate * self.message(code))).to(h.dtype)


class ExtraMLP(nn.Module):
    """A two-layer MLP behind the last layer, of about as many multiplications a slot as `layers` draft layers."""

    def __init__(self, draft: Draft, layers: int) -> None:
        super().__init__()
        d_model = draft.config.hidden_size
        width = layers * sum(p.numel() for p in draft.blocks[-1].parameters() if p.ndim == 2) // (2 * d_model)
        self.norm = RMSNorm(d_model, draft.config.rms_norm_eps)
        self.up = nn.Linear(d_model, width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(
        self, x: Float[Tensor, "block slot d_model"], blocks: BlockPass, sites: Sites
    ) -> Float[Tensor, "block slot d_model"]:
        h = sites.of(x)
        return sites.put(x, h + self.down(F.silu(self.up(self.norm(h)))).to(h.dtype))


class ExtraLayers(nn.Module):
    """Copies of the draft's last layer behind it, each faded in by a learned scalar from zero.

    A plain copy would first spoil what the frozen layers made; faded in, training starts from late injection alone.
    """

    def __init__(self, draft: Draft, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy(draft.blocks[-1]).float() for _ in range(layers))
        self.fade = nn.Parameter(torch.zeros(layers))
        self.requires_grad_(True)

    def forward(
        self, x: Float[Tensor, "block slot d_model"], blocks: BlockPass, sites: Sites
    ) -> Float[Tensor, "block slot d_model"]:
        draft, inputs = blocks.draft, blocks.inputs
        feature = draft.hidden_norm(draft.fc(blocks.batch.taps.to(draft.fc.weight.dtype)))
        positions = torch.arange(feature.shape[1], device=feature.device)
        tables = rotary_tables(positions, draft.config.head_dim, draft.config.rope_theta, feature.dtype)
        for layer, fade in zip(self.layers, self.fade, strict=True):
            keys, values = cast(DraftLayer, layer).attn.context_kv(feature, tables)
            after = layer(x, keys, values, inputs.rotary, inputs.bias)
            x = x + fade.to(x.dtype) * (after - x)
        return x


class MarkovHead(nn.Module):
    """A bias W₂ W₁[predecessor] on the scores, over the full vocabularies of target and draft.

    W₁ starts at the transfer codes rather than at random: seen by this head before training, tokens are as alike as
    they are to the injectors, which makes it the stronger rival at a small budget.
    """

    def __init__(self, codes: Codes, draft_vocab: int) -> None:
        super().__init__()
        self.first = nn.Embedding.from_pretrained(codes.transfer * codes.rank**0.5, freeze=False)
        self.second = nn.Linear(codes.rank, draft_vocab, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, predecessors: Int[Tensor, "site"]) -> Float[Tensor, "site draft_vocab"]:
        return self.second(self.first(predecessors))
