"""The target engine on a CPU: embedding, layers with their taps, and the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cpu.kernels import FLOAT, LONG, Kernels, PackedMatrix
from dspine_probe.decoding.cpu.stack import LayerStack, PackedLayer, check_even, floats
from dspine_probe.decoding.weights import StackSizes, target_layers, target_rotary, target_sizes
from dspine_probe.errors import UsageError
from dspine_probe.target import Target


@dataclass(frozen=True)
class PackedTarget:
    """A target's weights as the kernels want them; made once, used by any number of engines."""

    kernels: Kernels
    sizes: StackSizes
    layers: list[PackedLayer]
    embedding: Float[Tensor, "vocab d_model"]
    head: PackedMatrix
    norm: Float[Tensor, "d_model"]

    @classmethod
    def pack(cls, target: Target, kernels: Kernels) -> PackedTarget:
        """Pack a target.

        Raises:
            UsageError: it is built in a way that the fast engines do not compute, or lies elsewhere.
        """
        sizes = target_sizes(target)
        if target.device.type != "cpu":
            raise UsageError(f"target '{target.name}' lies on {target.device}; fast CPU decoding needs it on the CPU")
        check_even(**{"hidden size": sizes.width, "head size": sizes.head_dim})
        return cls(
            kernels,
            sizes,
            layers=[PackedLayer(kernels, layer) for layer in target_layers(target)],
            embedding=target.embedding.detach(),
            head=kernels.matrix(target.head),
            norm=floats(target.model.base_model.norm.weight),
        )


class CpuTarget(LayerStack):
    """`TargetEngine` over a packed target. States and taps are float32."""

    admits = True

    def __init__(self, target: Target, packed: PackedTarget, taps: Sequence[int], rows: int, capacity: int) -> None:
        rotary = target_rotary(target, capacity)
        super().__init__(packed.kernels, packed.sizes, packed.layers, rotary, rows=rows, capacity=capacity)
        self.packed, width = packed, packed.sizes.width
        self.columns = {tap: slice(n * width, (n + 1) * width) for n, tap in enumerate(taps)}
        self.taps: Float[Tensor, "row width taps_d_model"] = self._empty_taps(0, 0)
        """See `TargetEngine.taps`."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "row vocab"]:
        """See `TargetEngine.prefill`."""
        new = self.add(len(prompts))
        taps = self._empty_taps(len(prompts), max(map(len, prompts))).zero_()
        last = torch.empty(len(prompts), self.packed.sizes.width, dtype=FLOAT, device="cpu")
        for row, prompt in enumerate(prompts):
            tokens = torch.tensor([prompt], dtype=LONG, device="cpu")
            last[row] = self._pass(tokens, new[row : row + 1])[-1]
            taps[row, : len(prompt)] = self.taps[0]
        self.commit([0] * new.start + [len(prompt) for prompt in prompts])
        self.taps = taps
        return self._scores(last)

    def forward(self, tokens: Int[Tensor, "row width"]) -> Float[Tensor, "row width vocab"]:
        """See `TargetEngine.forward`."""
        return self._scores(self._pass(tokens)).unflatten(0, tokens.shape)

    def greedy(self, tokens: Int[Tensor, "row width"]) -> Int[Tensor, "row width"]:
        """See `TargetEngine.greedy`."""
        x, packed = self._pass(tokens), self.packed
        found = self.kernels.best(x, packed.head, 1, gain=packed.norm, eps=packed.sizes.eps)
        return found.view(tokens.shape)

    def _pass(self, tokens: Int[Tensor, "row width"], rows: range | None = None) -> Float[Tensor, "row_width d_model"]:
        """States after the last layer, before the final norm; leaves the taps behind."""
        states = F.embedding(tokens, self.packed.embedding).to(FLOAT)
        self.taps = self._empty_taps(*tokens.shape)
        for here, place in self.pieces(tokens.shape[1], rows):
            x, taps = states[here].flatten(0, 1), self.taps[here].flatten(0, 1)  # views
            for number in range(len(self.layers)):
                self.layer(number, x, place)
                if number in self.columns:
                    taps[:, self.columns[number]] = x
        return states.flatten(0, 1)

    def _empty_taps(self, rows: int, width: int) -> Float[Tensor, "row width taps_d_model"]:
        size = len(self.columns) * self.packed.sizes.width
        return torch.empty(rows, width, size, dtype=FLOAT, device="cpu")

    def _scores(self, x: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        packed = self.packed
        return self.kernels.product(x, packed.head, gain=packed.norm, eps=packed.sizes.eps)
