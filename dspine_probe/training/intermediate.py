"""Supervision of a draft's intermediate layers: targets for the layers before the last.

The arms of the supervision ablation (arXiv 2609.36173, token cross-entropy against cosine on codes). Each reads the
residual stream after layers 1…L−1, raw and after no norm; layer L has the draft's own cross-entropy. Code arms read it
through a linear map per layer that only training knows; the draft itself stays as it was. Entry point: `Intermediate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.drafts import DFlash
from dspine_probe.errors import UsageError
from dspine_probe.training.anchors import Batch
from dspine_probe.training.losses import head_loss
from dspine_probe.transfer import TransferSpace, codes_from_projection

NONE, TOKEN_CE = "none", "token-ce"
CODE_ARMS = ("cosine", "expected-code", "code-mse", "cosine-unwhitened")
ARMS = (NONE, TOKEN_CE, *CODE_ARMS)
READOUTS = "readouts.safetensors"
_CHUNK = 256


@dataclass(frozen=True)
class Supervision:
    """One arm: the loss on intermediate layers, and its weight.

    `cosine`: 1 − cos(R_l h_l, e_label). `expected-code`: the same with Σ_v p^t(v) e_v, over the draft's vocabulary, in
    place of the label's code. `code-mse`: mean squared error per coordinate against √r · e_label. `cosine-unwhitened`:
    codes without Λ^(−1/2). `token-ce`: cross-entropy through the draft's final norm and the frozen head.

    `weight` multiplies the sum over layers, times the batch's mean cross-entropy, in code arms (as DSpine's alignment);
    for `token-ce` it multiplies the mean over layers, beside a final cross-entropy of weight 1. It rises linearly over
    `warmup_steps`. `rank` is the size of a code (None: a third of the hidden size, as DSpine's).
    """

    arm: str = NONE
    weight: float = 0.5
    warmup_steps: int = 146
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise UsageError(f"supervision {self.arm!r} is unknown; use one of {', '.join(ARMS)}.")
        if self.weight <= 0:
            raise UsageError(f"supervision weight {self.weight} must be positive; for no supervision use {NONE!r}.")


class Intermediate(nn.Module):
    """The losses of one arm, with the readouts they train. Nothing here draws a random number."""

    codes: Tensor

    def __init__(self, supervision: Supervision, head: Float[Tensor, "vocab d_model"], layers: int) -> None:
        """`head` is the target's whole output matrix, `layers` the depth L of the draft."""
        super().__init__()
        if supervision.arm == NONE:
            raise UsageError(f"supervision {NONE!r} has no losses; train without it.")
        if layers < 2:
            raise UsageError(f"a draft of {layers} layer has no intermediate one to supervise; use at least 2.")
        self.supervision, self.layers = supervision, layers - 1
        self.readouts = nn.ParameterList()
        if supervision.arm in CODE_ARMS:
            space = TransferSpace.fit(head, supervision.rank or head.shape[1] // 3)
            self.readouts.extend(
                nn.Parameter(space.basis.T.clone(memory_format=torch.contiguous_format)) for _ in range(self.layers)
            )
            whitened = supervision.arm != "cosine-unwhitened"
            map_ = space.projection if whitened else space.basis
            self.register_buffer("codes", codes_from_projection(head, space.mean, map_), persistent=False)

    def forward(
        self,
        draft: DFlash,
        residuals: tuple[Float[Tensor, "block slot d_model"], ...],
        batch: Batch,
        labels: Int[Tensor, "block draft_slot"],
        weight: Float[Tensor, "block draft_slot"],
    ) -> Float[Tensor, "layer"]:
        """Σ w · loss of each intermediate layer. `residuals` holds all L; `labels` index the draft's vocabulary."""
        streams = [h[:, 1:] for h in residuals[:-1]]
        if self.supervision.arm == TOKEN_CE:
            losses = [_token_ce(draft, h, labels, weight) for h in streams]
        else:
            codes = self._wanted(draft, batch)
            pairs = zip(self.readouts, streams, strict=True)
            losses = [(weight * self._code_loss(readout, h, codes)).sum() for readout, h in pairs]
        return torch.stack(losses)

    def strength(self, warmed: float, mean_ce: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Factor of the sum over layers; code arms fade with the mean cross-entropy, which is detached.

        `warmed` is the share of the warm-up that is done, 0…1.
        """
        now = self.supervision.weight * warmed
        if self.supervision.arm == TOKEN_CE:
            return torch.full_like(mean_ce, now / self.layers)
        return now * mean_ce.detach()

    def _wanted(self, draft: DFlash, batch: Batch) -> Float[Tensor, "block draft_slot rank"]:
        if self.supervision.arm != "expected-code":
            return F.embedding(batch.tokens[:, 1:], self.codes)
        table = self.codes if draft.vocabulary is None else self.codes[draft.vocabulary]
        return expected_codes(batch.teacher.flatten(0, 1), draft.head, table).view(*batch.teacher.shape[:2], -1)

    def _code_loss(
        self,
        readout: Float[Tensor, "rank d_model"],
        h: Float[Tensor, "block draft_slot d_model"],
        codes: Float[Tensor, "block draft_slot rank"],
    ) -> Float[Tensor, "block draft_slot"]:
        if self.supervision.arm == "code-mse":
            # A residual stream has no scale of its own, so it is brought to unit RMS first; codes enter at unit RMS.
            read = F.linear(F.rms_norm(h.float(), h.shape[-1:]), readout).float()
            return (read - codes * codes.shape[-1] ** 0.5).square().mean(-1)
        return 1 - F.cosine_similarity(F.linear(h, readout.to(h.dtype)).float(), codes, dim=-1)


def _token_ce(draft: DFlash, h: Tensor, labels: Tensor, weight: Tensor) -> Float[Tensor, ""]:
    rows = draft.ln_final.normalize(h).flatten(0, 1)
    return head_loss(rows, draft.head, labels.flatten(), weight.flatten()).loss


@torch.no_grad()
def expected_codes(
    teacher: Float[Tensor, "rows d_model"],
    head: Float[Tensor, "draft_vocab d_model"],
    codes: Float[Tensor, "draft_vocab rank"],
) -> Float[Tensor, "rows rank"]:
    """Σ_v p^t(v) e_v, p^t the target's distribution over the draft's vocabulary; in chunks, no logits kept."""
    matrix = head.to(teacher.dtype)
    parts = [(rows @ matrix.T).softmax(dim=-1, dtype=torch.float32) @ codes for rows in teacher.split(_CHUNK)]
    return torch.cat(parts).float()


def load_readouts(run: Path) -> tuple[Float[Tensor, "rank d_model"], ...]:
    """Readouts of layers 1…L−1 that a code arm trained in the folder `run`; none for the other arms."""
    path = run / READOUTS
    if not path.exists():
        return ()
    tensors = load_file(path)
    return tuple(tensors[name] for name in sorted(tensors, key=lambda name: int(name.rsplit(".", 1)[1])))
