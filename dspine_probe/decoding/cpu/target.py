"""The target engine: embedding, layers with their taps, and the head, over one compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cpu.compute import Compute, Geometry
from dspine_probe.decoding.cpu.rows import Rows
from dspine_probe.decoding.cpu.weights import target_geometry, target_layers, target_rotary
from dspine_probe.target import Target


@dataclass(frozen=True)
class PackedTarget:
    """A target's weights as a compute wants them; made once, used by any number of engines."""

    compute: Compute
    geometry: Geometry
    layers: Any
    embedding: Float[Tensor, "vocab d_model"]
    head: Any
    norm: Float[Tensor, "d_model"]

    @classmethod
    def pack(cls, target: Target, compute: Compute) -> PackedTarget:
        """Pack a target.

        Raises:
            UsageError: it is built in a way that is not reproduced.
        """
        geometry = target_geometry(target)
        return cls(
            compute,
            geometry,
            layers=compute.layers(target_layers(target)),
            embedding=target.embedding.detach(),
            head=compute.matrix(target.head),
            norm=target.model.base_model.norm.weight.detach().float(),
        )


class CpuTarget:
    """`TargetEngine` over a packed target. States and taps are float32."""

    def __init__(
        self, target: Target, packed: PackedTarget, taps: Sequence[int], rows: int, capacity: int
    ) -> None:
        self.packed, self.compute = packed, packed.compute
        width = packed.geometry.width
        self.columns = {tap: slice(n * width, (n + 1) * width) for n, tap in enumerate(taps)}
        self.depth = target.num_layers
        self.rows = Rows(rows, capacity)
        self.stack = packed.compute.stack(
            packed.geometry, packed.layers, target_rotary(target, capacity), slots=rows, capacity=capacity
        )
        self.taps: Float[Tensor, "row width taps_d_model"] = torch.empty(0, 0, 0)
        """See `TargetEngine.taps`."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "row vocab"]:
        """See `TargetEngine.start`."""
        self.rows.open(len(prompts))
        longest, width = max(map(len, prompts)), self.packed.geometry.width
        taps = torch.zeros(len(prompts), longest, len(self.columns) * width)
        last = torch.empty(len(prompts), width)
        for row, prompt in enumerate(prompts):
            last[row] = self._pass(torch.tensor([prompt]), range(row, row + 1))[-1]
            taps[row, : len(prompt)] = self.taps[0]
        self.rows.grow([len(prompt) for prompt in prompts])
        self.taps = taps
        return self._scores(last)

    def read(self, tokens: Int[Tensor, "row width"]) -> Float[Tensor, "row width vocab"]:
        """See `TargetEngine.read`."""
        return self._scores(self._pass(tokens)).unflatten(0, tokens.shape)

    def greedy(self, tokens: Int[Tensor, "row width"]) -> Int[Tensor, "row width"]:
        """See `TargetEngine.greedy`."""
        x, packed = self._pass(tokens), self.packed
        found = self.compute.best(x, packed.head, 1, gain=packed.norm, eps=packed.geometry.eps)
        return found.view(tokens.shape)

    def keep(self, counts: Sequence[int]) -> None:
        """See `TargetEngine.keep`."""
        self.rows.grow(counts)

    def select(self, rows: Sequence[int]) -> None:
        """See `TargetEngine.select`."""
        self.rows.select(rows)

    def _pass(
        self, tokens: Int[Tensor, "row width"], rows: range | None = None
    ) -> Float[Tensor, "row_width d_model"]:
        """States after the last layer, before the final norm; leaves the taps behind."""
        d_model = self.packed.geometry.width
        states = F.embedding(tokens, self.packed.embedding).float()
        self.taps = states.new_empty(*tokens.shape, len(self.columns) * d_model)
        for piece in self.rows.pieces(tokens.shape[1], rows):
            x, taps = (
                states[piece.at].flatten(0, 1),
                self.taps[piece.at].flatten(0, 1),
            )  # views, being contiguous
            for number in range(self.depth):
                self.stack.layer(number, x, piece.span)
                if number in self.columns:
                    taps[:, self.columns[number]] = x
        return states.flatten(0, 1)

    def _scores(self, x: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        packed = self.packed
        return self.compute.product(x, packed.head, gain=packed.norm, eps=packed.geometry.eps)
