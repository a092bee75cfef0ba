"""The target engine on a GPU: one step of fixed width, captured for every number of rows it meets.

A prompt is read through the same layers in pieces. Positions behind a row's end may be written by padding or by tokens
that were not kept: nothing sees them before the row's own tokens have taken their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dspine_probe.decoding.cache import padded_prompts, require_room
from dspine_probe.decoding.gpu.layers import FusedLayer, FusedStack
from dspine_probe.decoding.graphs import Capturing, Outputs
from dspine_probe.decoding.kernels.block_attention import PIECE
from dspine_probe.decoding.weights import StackSizes, target_layers, target_rotary, target_sizes
from dspine_probe.target import Target


@dataclass(frozen=True)
class FusedTarget:
    """A target's weights with fused products; made once, used by any number of engines."""

    sizes: StackSizes
    layers: list[FusedLayer]

    @classmethod
    def fuse(cls, target: Target) -> FusedTarget:
        """Fuse a target's weights.

        Raises:
            UsageError: it is built in a way that the fast engines do not compute.
        """
        sizes = target_sizes(target)
        return cls(sizes, [FusedLayer.fuse(layer, sizes) for layer in target_layers(target)])


class GpuTarget(FusedStack):
    """`TargetEngine` over fused weights. Scores and taps are overwritten by the next pass."""

    admits = False

    def __init__(
        self, target: Target, fused: FusedTarget, taps: Sequence[int], *, rows: int, capacity: int, how: Capturing
    ) -> None:
        rotary = target_rotary(target, capacity)
        super().__init__(fused.layers, fused.sizes, rotary, rows=rows, capacity=capacity, how=how)
        self.target, self.tapped = target, tuple(taps)
        self.gain = target.model.base_model.norm.weight.detach()
        self.taps: Float[Tensor, "row width taps_d_model"] = self.gain.new_empty(0, 0, 0)
        """See `TargetEngine.taps`."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "row vocab"]:
        """See `TargetEngine.prefill`."""
        ids, last = padded_prompts(prompts, self.gain.device)
        require_room(0, ids.shape[1], self.capacity)
        finals = self.gain.new_empty(len(prompts), len(self.gain))
        taps = []
        for at in range(0, ids.shape[1], PIECE):
            piece = ids[:, at : at + PIECE]
            states, tapped = self._pass(piece, torch.full_like(last, at))
            taps.append(tapped)
            ends_here = ((at <= last) & (last < at + PIECE))[:, None]
            place = (last - at).clamp(0, piece.shape[1] - 1)
            finals = torch.where(ends_here, states[torch.arange(len(last), device=last.device), place], finals)
        self.taps = torch.cat(taps, dim=1)
        self.set_lengths([len(prompt) for prompt in prompts])
        return self._logits(finals)

    def forward(self, tokens: Int[Tensor, "row width"]) -> Float[Tensor, "row width vocab"]:
        """See `TargetEngine.forward`."""
        return self._step(tokens)[0][: len(tokens)]

    def greedy(self, tokens: Int[Tensor, "row width"]) -> Int[Tensor, "row width"]:
        """See `TargetEngine.greedy`."""
        return self._step(tokens)[1][: len(tokens)]

    def _step(self, tokens: Int[Tensor, "row width"]) -> Outputs:
        width = tokens.shape[1]
        outputs = self.step(width, self._verify)(**self.inputs(width, tokens=tokens))
        self.taps = outputs[2][: len(tokens)]
        return outputs

    def _verify(self, tokens: Int[Tensor, "row width"], starts: Int[Tensor, "row"]) -> Outputs:
        """Scores, likeliest tokens and taps."""
        states, taps = self._pass(tokens, starts)
        scores = self._logits(states)
        return scores, scores.max(dim=-1).indices, taps

    def _pass(
        self, tokens: Int[Tensor, "row width"], starts: Int[Tensor, "row"]
    ) -> tuple[Float[Tensor, "row width d_model"], Float[Tensor, "row width taps_d_model"]]:
        """States after the last layer, and the taps."""
        x = F.embedding(tokens, self.target.embedding).flatten(0, 1)
        caught: dict[int, Tensor] = {}
        for number in range(len(self.layers)):
            x = self.layer(number, x, starts)
            if number in self.tapped:
                caught[number] = x
        tapped = [x[:, :0], *(caught[tap] for tap in self.tapped)]
        return x.view(*tokens.shape, -1), torch.cat(tapped, dim=-1).view(*tokens.shape, -1)

    def _logits(self, states: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        return self.target.logits(self.norm(states, self.gain))
