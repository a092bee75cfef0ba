"""What a pass over blocks takes and leaves: context rows, what the layers need, the stream after each layer.

Axes are those of `backbone`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.drafts.layers import BlockBias, Rotary

Stream = Float[Tensor, "block slot d_model"]


@dataclass(frozen=True)
class Context:
    """Per layer, the keys (normed, rotated) and values of the committed context rows 0…length−1.

    features: what rows hold besides, in drafts that begin a chain with it.
    """

    keys: tuple[Float[Tensor, "batch ctx kv_head d_head"], ...]
    values: tuple[Float[Tensor, "batch ctx kv_head d_head"], ...]
    features: Float[Tensor, "batch ctx d_model"] | None = None

    @property
    def length(self) -> int:
        """Number of context rows."""
        return self.keys[0].shape[1]

    def select(self, rows: Tensor) -> Context:
        """The sequences that `rows` names or marks, each as often as it is named."""
        features = None if self.features is None else self.features[rows]
        return Context(tuple(k[rows] for k in self.keys), tuple(v[rows] for v in self.values), features)


@dataclass(frozen=True)
class TruePredecessors:
    """Training-time replacement: blocks in `replaced` are fed the true predecessor's code in the shallow layers."""

    tokens: Int[Tensor, "block slot"]
    replaced: Bool[Tensor, "block"]


@dataclass(frozen=True)
class BlockInputs:
    """What the layers of a pass need beside the stream.

    rotary: tables at the slots' absolute positions (anchor + slot).
    bias: which context rows and slots a slot sees.
    anchor_code: what slot 1 receives from its anchor, in drafts whose slots receive codes.
    true_predecessors: what slots receive in place of forming predictions, in training.
    """

    context: Context
    rotary: Rotary
    bias: BlockBias
    anchor_code: Float[Tensor, "block 1 rank"] | None = None
    true_predecessors: TruePredecessors | None = None


@dataclass(frozen=True)
class LayerStreams:
    """What some layers leave: the stream after each, and that of the last before whatever follows a layer."""

    residuals: tuple[Float[Tensor, "block slot d_model"], ...]
    last_layer: Float[Tensor, "block slot d_model"]


@dataclass(frozen=True)
class BlockStates(LayerStreams):
    """What a whole pass leaves: the streams, and final-normed states of every slot, the anchor's included."""

    hidden: Float[Tensor, "block slot d_model"]


class Stage(NamedTuple):
    """One addition to the stream: the hook points of what is added and of the stream after it, and the step."""

    added: str
    after: str
    step: Callable[[Stream, BlockInputs], Stream]
