"""The transfer space: a compact, whitened code for every token of the target's vocabulary.

DSpine passes a forming prediction from slot to slot as a direction among these codes (arXiv 2609.36173, transfer
space). The space is computed once from the target's output matrix and never trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from dspine_probe.errors import UsageError


@dataclass(frozen=True)
class TransferSpace:
    """Mean and whitened principal directions of the unit-norm rows of an output matrix.

    `basis` holds the leading eigenvectors P, `eigenvalues` their scatter λ (sum over the vocabulary, largest first).
    """

    mean: Float[Tensor, "d_model"]
    basis: Float[Tensor, "d_model rank"]
    eigenvalues: Float[Tensor, "rank"]

    @classmethod
    def fit(cls, head: Float[Tensor, "vocab d_model"], rank: int) -> TransferSpace:
        """Whitening of the unit-norm rows ŵ of `head`: Σ = Σ_v ŵŵᵀ − V μμᵀ, the `rank` largest eigenpairs.

        All rows take part, padded ones included. Eigenvector signs are fixed so that the entry of largest magnitude
        is positive, which makes the space reproducible across linear-algebra libraries.
        """
        vocab, d_model = head.shape
        if not 1 <= rank <= min(d_model, vocab - 1):
            raise UsageError(
                f"transfer rank {rank} does not fit a {vocab} × {d_model} head; use 1…{min(d_model, vocab - 1)}."
            )
        rows = _unit_rows(head)
        mean = rows.mean(0)
        centred = rows - mean
        scatter = centred.T @ centred
        values, vectors = torch.linalg.eigh(scatter.double())
        values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
        if values[-1] <= 1e-7 * vocab:  # rounding noise of the fp32 scatter
            raise UsageError(f"the head has fewer than {rank} independent directions; choose a smaller transfer rank.")
        peak = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        vectors = vectors * peak.sign()
        return cls(mean, vectors.float(), values.float())

    @property
    def rank(self) -> int:
        """Number of kept directions r."""
        return self.basis.shape[1]

    @property
    def projection(self) -> Float[Tensor, "d_model rank"]:
        """P Λ^(−1/2), which takes a centred unit row to its whitened coordinates."""
        # Row-major as a file stores it: another layout gives codes that differ in the last bit.
        return (self.basis * self.eigenvalues.rsqrt()).contiguous()

    def codes(self, head: Float[Tensor, "vocab d_model"]) -> Float[Tensor, "vocab rank"]:
        """Unit-norm transfer code e_v of every row of `head`."""
        return codes_from_projection(head, self.mean, self.projection)


def codes_from_projection(
    head: Float[Tensor, "vocab d_model"], mean: Float[Tensor, "d_model"], projection: Float[Tensor, "d_model rank"]
) -> Float[Tensor, "vocab rank"]:
    """e_v = normalize((ŵ_v − μ) · P Λ^(−1/2)), fp32."""
    return normalize((_unit_rows(head) - mean.float()) @ projection.float(), dim=-1)


def _unit_rows(head: Float[Tensor, "vocab d_model"]) -> Float[Tensor, "vocab d_model"]:
    return normalize(head.detach().float(), dim=-1)
