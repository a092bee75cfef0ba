"""What the engines ask of whoever multiplies: a handful of operations on few rows of float states.

States are float32 rows; weights, caches and operands are of the compute's `dtype`; sums are float32. `NativeCompute`
does it in C, `TorchCompute` with torch. Packed things belong to the compute that packed them. `Layer` and `Spine` here
are plain weights, as the models hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

MAX_ROWS = 128
"""Most rows of one call; longer prompts are read in pieces."""


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer; `norm_q` and `norm_k` are None where heads are not normed."""

    q: Float[Tensor, "heads_d_head d_model"]
    k: Float[Tensor, "kv_heads_d_head d_model"]
    v: Float[Tensor, "kv_heads_d_head d_model"]
    out: Float[Tensor, "d_model heads_d_head"]
    gate: Float[Tensor, "d_mlp d_model"]
    up: Float[Tensor, "d_mlp d_model"]
    down: Float[Tensor, "d_model d_mlp"]
    norm_in: Float[Tensor, "d_model"]
    norm_mlp: Float[Tensor, "d_model"]
    norm_q: Float[Tensor, "d_head"] | None
    norm_k: Float[Tensor, "d_head"] | None


@dataclass(frozen=True)
class Geometry:
    """Sizes that the layers of a stack share. `causal`: whether a token of a pass sees the later ones of the pass."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    causal: bool


@dataclass(frozen=True)
class Rotary:
    """Rotary tables of absolute positions 0, 1, … (half-split convention)."""

    cos: Float[Tensor, "position d_head"]
    sin: Float[Tensor, "position d_head"]


@dataclass(frozen=True)
class Span:
    """Where the rows of a pass belong: `width` tokens for each of some cache slots, from position `starts[i]` on."""

    slots: Sequence[int]
    starts: Sequence[int]
    width: int


@dataclass(frozen=True)
class Spine:
    """Weights of DSpine beside its layers.

    readouts, writes: one per layer. mix: receiver's gate, predecessor's gate and message, one under the other.
    norm: gain of the final norm. head: that of the draft's vocabulary. sent: G_p √r e and M √r e of every token in it.
    """

    readouts: Sequence[Float[Tensor, "rank d_model"]]
    writes: Sequence[Float[Tensor, "d_model message"]]
    mix: Float[Tensor, "message3 rank"]
    bias: Float[Tensor, "message"]
    norm: Float[Tensor, "d_model"]
    eps: float
    head: Float[Tensor, "draft_vocab d_model"]
    sent: Float[Tensor, "draft_vocab message2"]


class Stack(Protocol):
    """Layers with a cache of keys and values for every slot."""

    def layer(self, number: int, x: Float[Tensor, "row d_model"], span: Span) -> None:
        """Run one layer in place; its keys and values are stored, and each row sees what lies before it."""

    def context(
        self, number: int, x: Float[Tensor, "row d_model"], gain: Float[Tensor, "d_model"], span: Span
    ) -> None:
        """Store keys and values of normed rows, and nothing else."""


class SpineOps(Protocol):
    """Injection and last write of a DSpine."""

    def inject(
        self, layer: int, x: Float[Tensor, "row d_model"], anchor_codes: Float[Tensor, "block rank"]
    ) -> Float[Tensor, "row mixed"]:
        """Inject in place; what each slot reads and sends, of use to `transitions` alone. Rows are whole blocks."""

    def transitions(
        self,
        states: Float[Tensor, "row d_model"],
        mixed: Float[Tensor, "row mixed"],
        candidates: Int[Tensor, "block draft_slot k"],
    ) -> Float[Tensor, "block draft_slot k k"]:
        """Refined scores of all pairs of adjacent candidates (indices of the draft's vocabulary).

        Args:
            states: rows before the last injection, slot 0 included.
            mixed: what that injection returned.
            candidates: best first or in any order.
        """


class Compute(Protocol):
    """Few rows times many weights."""

    dtype: torch.dtype

    @property
    def about(self) -> dict[str, Any]:
        """What computes, for the record of a measurement."""

    def matrix(self, weight: Float[Tensor, "out in"]) -> Any:
        """A packed matrix."""

    def product(
        self, x: Float[Tensor, "row in"], matrix: Any, *, gain: Tensor | None = None, eps: float = 0.0
    ) -> Float[Tensor, "row out"]:
        """x wᵀ, of RMS-normed rows where there is a gain."""

    def best(
        self, x: Float[Tensor, "row in"], matrix: Any, k: int, *, gain: Tensor, eps: float
    ) -> Int[Tensor, "row k"]:
        """The k outputs with the largest scores of every normed row, best first; the lowest of equals if k is 1."""

    def walk(
        self, scores: Float[Tensor, "block draft_slot k k"], candidates: Int[Tensor, "block draft_slot k"]
    ) -> Int[Tensor, "block draft_slot"]:
        """The greedy walk over a transition cache."""

    def layers(self, layers: Sequence[Layer]) -> Any:
        """Packed layers."""

    def stack(self, geometry: Geometry, layers: Any, rotary: Rotary, *, slots: int, capacity: int) -> Stack:
        """Packed layers with fresh caches for `slots` sequences of up to `capacity` positions."""

    def spine(self, spine: Spine) -> SpineOps:
        """DSpine's own part."""
