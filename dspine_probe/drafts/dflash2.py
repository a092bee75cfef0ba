"""DFlash2: DFlash with a two-tap dynamic convolution around every sublayer and a low-rank selector of candidates.

Each slot mixes in its predecessor before and after attention and MLP, by kernels made from the sublayer's own input. Of
every slot's top-K tokens the selector scores each pair with the candidates before it; a walk then chooses. Convolutions
start as the identity and the successor codebook at zero, so a fresh DFlash2 proposes what its backbone does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import SHARED_KEY, ConfigPart, DraftConfig
from dspine_probe.drafts.backbone import Backbone
from dspine_probe.drafts.block import BlockStates
from dspine_probe.drafts.layers import BlockBias, DraftLayer, Rotary
from dspine_probe.drafts.proposal import Proposal
from dspine_probe.drafts.registry import register
from dspine_probe.drafts.transition import TransitionCache
from dspine_probe.errors import UsageError


@dataclass(frozen=True)
class DFlash2Config(ConfigPart):
    """Convolution (two taps; channels of a group share a kernel) and selector."""

    KEY: ClassVar[str] = SHARED_KEY

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        if self.conv_kernel_size != 2:
            raise UsageError(f"conv_kernel_size is {self.conv_kernel_size}; only two taps are computed, give 2.")
        for name in ("conv_group_size", "selector_rank", "selector_top_k"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    @classmethod
    def for_target(cls, hidden_size: int) -> Self:
        """A sixth of the hidden size as the selector's rank, at most the published 256."""
        return cls(selector_rank=max(1, min(256, hidden_size // 6)))


class DynamicConv(nn.Module):
    """y_t = Σ_τ (base[side, τ] + dynamic_t[side, τ]) ⊙ x_{t−τ} for τ = 0, 1; nothing stands before slot 0."""

    def __init__(self, width: int, group: int) -> None:
        super().__init__()
        if width % group:
            raise UsageError(f"groups of {group} channels do not divide a width of {width}; give a conv_group_size.")
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, 2, width))
        self.kernel_projection = nn.Linear(width, 4 * (width // group), bias=False)
        self.hook_in, self.hook_out = nn.Identity(), nn.Identity()
        self.reset()

    def reset(self) -> None:
        """The identity."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def wrap(
        self, x: Float[Tensor, "block slot d_model"]
    ) -> tuple[Float[Tensor, "block slot d_model"], Float[Tensor, "block slot 2 2 d_model"]]:
        """The convolved input of a sublayer, and the kernels for `close`."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, 2, -1)).repeat_interleave(self.group, dim=-1)
        kernel = self.base_kernel.to(dynamic.dtype) + dynamic
        return self.hook_in(_two_taps(x, kernel[..., 0, :, :])), kernel

    def close(
        self, z: Float[Tensor, "block slot d_model"], kernel: Float[Tensor, "block slot 2 2 d_model"]
    ) -> Float[Tensor, "block slot d_model"]:
        """The convolved output of the sublayer."""
        return self.hook_out(_two_taps(z, kernel[..., 1, :, :]))


def _two_taps(
    x: Float[Tensor, "block slot d_model"], kernel: Float[Tensor, "block slot 2 d_model"]
) -> Float[Tensor, "block slot d_model"]:
    return kernel[..., 0, :] * x + kernel[..., 1, :] * F.pad(x[:, :-1], (0, 0, 1, 0))


class ConvLayer(DraftLayer):
    """A layer whose sublayers stand between convolutions over the block's slots."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        group = cast(DFlash2Config, config.part).conv_group_size
        self.attention_conv = DynamicConv(config.hidden_size, group)
        self.mlp_conv = DynamicConv(config.hidden_size, group)

    def attend(
        self,
        x: Float[Tensor, "block slot d_model"],
        context_k: Tensor,
        context_v: Tensor,
        rotary: Rotary,
        bias: BlockBias,
    ) -> Float[Tensor, "block slot d_model"]:
        """The stream after attention; context rows are not convolved."""
        x = self.hook_resid_pre(x)
        entering, kernel = self.attention_conv.wrap(self.ln1(x))
        attended = self.attention_conv.close(self.attn(entering, context_k, context_v, rotary, bias), kernel)
        return self.hook_resid_mid(x + self.hook_attn_out(attended))

    def feed(self, x: Float[Tensor, "block slot d_model"]) -> Float[Tensor, "block slot d_model"]:
        """The stream after the MLP."""
        entering, kernel = self.mlp_conv.wrap(self.ln2(x))
        return self.hook_resid_post(x + self.hook_mlp_out(self.mlp_conv.close(self.mlp(entering), kernel)))


class CandidateSelector(nn.Module):
    """⟨A[a] ⊙ H h_t, B[b]⟩, what candidate b of slot t gains after predecessor a."""

    def __init__(self, vocab: int, draft_vocab: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(draft_vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self.hook_gain = nn.Identity()

    def forward(
        self,
        hidden: Float[Tensor, "block draft_slot d_model"],
        predecessors: Int[Tensor, "block draft_slot a"],
        index: Int[Tensor, "block draft_slot k"],
    ) -> Float[Tensor, "block draft_slot a k"]:
        """Gains of candidates `index` (of the draft's vocabulary) after tokens `predecessors`."""
        read = F.embedding(predecessors, self.predecessor_codebook) * self.hidden_projection(hidden)[:, :, None]
        return self.hook_gain(read @ F.embedding(index, self.successor_codebook).to(read.dtype).transpose(-1, -2))


@register(
    "dflash2",
    architecture="DFlash2DraftModel",
    objective="dspine_probe.training.objectives.dflash2:DFlash2Objective",
    part=DFlash2Config,
)
class DFlash2(Backbone):
    """The backbone with convolutions, and the selector's walk over top-K candidates."""

    layer = ConvLayer
    late_seams = ("candidate_selector.",)
    hook_axes = {
        "attention_conv.hook_in": ("block slot d_model", "convolved input of attention"),
        "attention_conv.hook_out": ("block slot d_model", "convolved output of attention"),
        "mlp_conv.hook_in": ("block slot d_model", "convolved input of the MLP"),
        "mlp_conv.hook_out": ("block slot d_model", "convolved output of the MLP"),
        "candidate_selector.hook_gain": (
            "block draft_slot candidate candidate",
            "what each candidate gains after each candidate of the slot before",
        ),
    }

    def __init__(
        self,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        *,
        vocabulary: Int[Tensor, "draft_vocab"] | None = None,
    ) -> None:
        super().__init__(config, embedding, head, vocabulary=vocabulary)
        rank = cast(DFlash2Config, config.part).selector_rank
        self.candidate_selector = CandidateSelector(config.vocab_size, len(self.head), config.hidden_size, rank)

    @classmethod
    def build(
        cls,
        config: DraftConfig,
        embedding: Float[Tensor, "vocab d_model"],
        head: Float[Tensor, "vocab d_model"],
        vocabulary: Int[Tensor, "draft_vocab"] | None,
        tensors: dict[str, Tensor],
    ) -> Self:
        """Some exports call the codebooks `….weight`."""
        for name in ("predecessor_codebook", "successor_codebook"):
            public = f"candidate_selector.{name}"
            if public not in tensors and f"{public}.weight" in tensors:
                tensors[public] = tensors.pop(f"{public}.weight")
        return super().build(config, embedding, head, vocabulary, tensors)

    @property
    def candidate_count(self) -> int:
        """K, at most the draft's vocabulary."""
        return min(cast(DFlash2Config, self.config.part).selector_top_k, len(self.head))

    def zero_writes(self) -> None:
        """Identity convolutions and no gains."""
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, DynamicConv):
                    module.reset()
            self.candidate_selector.successor_codebook.zero_()

    def transition_cache(self, states: BlockStates, anchor_tokens: Int[Tensor, "batch anchor"]) -> TransitionCache:
        """Top-K candidates of every slot by unary score, and the score of each adjacent pair."""
        hidden = self.drafting(states.hidden)
        unary, index = self.logits(hidden).topk(self.candidate_count, dim=-1)
        candidates = self.to_tokens(index)
        anchor = anchor_tokens.flatten()[:, None, None].expand(-1, 1, index.shape[-1])
        gains = self.candidate_selector(hidden, torch.cat([anchor, candidates[:, :-1]], dim=1), index)
        return TransitionCache(candidates, unary[:, :, None] + gains)

    def propose(
        self,
        states: BlockStates,
        anchor_tokens: Int[Tensor, "batch anchor"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "block draft_slot"] | None = None,
    ) -> Proposal:
        """Tokens of slots 1…T by a walk over the candidates, greedy or (with `noise`) drawn."""
        return self.transition_cache(states, anchor_tokens).propose(temperature, noise)
