"""Adjacent causal injection: the config and the weights by which a DSpine passes predictions on (arXiv 2609.36173)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.config import ConfigPart, DraftConfig
from dspine_probe.errors import UsageError


@dataclass(frozen=True)
class DSpineConfig(ConfigPart):
    """Transfer space, injection and recipe of DSpine (arXiv 2609.36173)."""

    KEY = "dspine_config"

    transfer_rank: int = 1024
    message_size: int = 512
    top_k: int = 16
    ce_weight: float = 0.1
    alignment_weight: float = 0.5
    alignment_warmup_steps: int = 146
    replacement_layers: int = 3
    replacement_probability: float = 0.5
    replacement_hold_ratio: float = 1 / 6
    replacement_end_ratio: float = 1 / 3
    candidate_mass_threshold: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("transfer_rank", "message_size", "top_k"):
            if getattr(self, name) < 1:
                raise UsageError(f"{self.KEY}.{name} is {getattr(self, name)}; it must be at least 1.")

    @classmethod
    def for_target(cls, hidden_size: int) -> Self:
        """A third of the hidden size as transfer rank and two ninths as message: at width 576, 192 and 128."""
        return cls(transfer_rank=hidden_size // 3, message_size=hidden_size * 2 // 9)


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

    def __init__(self, config: DraftConfig, spine: DSpineConfig) -> None:
        super().__init__()
        layers = config.num_hidden_layers
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
        return torch.sigmoid(self.receiver_gate(feature) + self.predecessor_gate(pred) + self.bias.to(feature.dtype))

    def write(
        self, layer: int, h: Float[Tensor, "*batch d_model"], gated: Float[Tensor, "*batch message"]
    ) -> Float[Tensor, "*batch d_model"]:
        """The update ‖h‖/√D · W_l(g ⊙ M m), scaled by the receiver's own RMS."""
        rms = h.float().square().mean(dim=-1, keepdim=True).sqrt().to(h.dtype)
        return rms * self.writes[layer](gated)
