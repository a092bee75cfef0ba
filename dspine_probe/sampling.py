"""Drawing tokens: tempered distributions, the nucleus, and the draw itself.

Draws take uniform numbers, not a generator: the caller decides where these come from, and a draw is a pure function
that runs unchanged in a batch or on another device. Used by drafts and by verification. Entry points: `Sampling`,
`generators`, `tempered`, `nucleus`, `pick`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; the default is greedy.

    temperature: divides the target's scores; 0 takes the likeliest token.
    top_p: mass of the nucleus that the target's tokens are drawn from; 1 allows every token.
    draft_temperature: the same for what the draft proposes, by default `temperature`. 0 proposes the likeliest tokens.
        No value changes the distribution of the answers, only how many proposals are accepted.

    Raises:
        UsageError: a number lies outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "draft_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name} is {value}; give 0 for the likeliest token or a number above it")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; give a mass above 0, and 1 to allow every token")
        if self.greedy and self.draft_temperature:
            raise UsageError(
                f"draft_temperature is {self.draft_temperature} but the answer is greedy; give a temperature above 0, "
                "or leave draft_temperature out"
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, and nothing is drawn."""
        return self.temperature == 0

    @property
    def drafting(self) -> float:
        """Temperature of the proposals."""
        return self.temperature if self.draft_temperature is None else self.draft_temperature

    @property
    def label(self) -> str:
        """Short name for tables and figures."""
        parts = [f"T = {self.temperature:g}"]
        if self.top_p < 1:
            parts.append(f"top-p {self.top_p:g}")
        if self.drafting != self.temperature:
            parts.append(f"proposals at T = {self.drafting:g}")
        return ", ".join(parts)


GREEDY = Sampling()


def generators(seed: int, count: int) -> list[torch.Generator]:
    """Unrelated generators, one for each of `count` rows; row r's is the same whatever the count.

    Their seeds are drawn, since the first numbers of generators seeded with neighbouring small integers are not
    independent enough to pool rows over them.
    """
    source = torch.Generator().manual_seed(seed)
    drawn = [int(torch.randint(2**62, (), generator=source)) for _ in range(count)]
    return [torch.Generator().manual_seed(each) for each in drawn]


def tempered(scores: Float[Tensor, "*rows vocab"], temperature: float) -> Float[Tensor, "*rows vocab"]:
    """softmax(scores / temperature) in fp32, sound down to the smallest temperatures."""
    scores = scores.float()
    return ((scores - scores.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)


def nucleus(probs: Float[Tensor, "*rows vocab"], top_p: float) -> Float[Tensor, "*rows vocab"]:
    """The distribution on the fewest tokens that hold mass `top_p`; of equals the lower id comes first."""
    if top_p == 1:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= top_p, 0.0)
    return torch.zeros_like(probs).scatter_(-1, ids, kept / kept.sum(dim=-1, keepdim=True))


def pick(weights: Float[Tensor, "*rows vocab"], noise: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """The index at which the running share of the weights passes `noise`.

    With noise uniform in [0, 1) index i comes with probability weights[i] / Σ weights, never one of weight 0.
    """
    running = weights.double().cumsum(dim=-1)
    at = noise[..., None].to(running.device, torch.float64) * running[..., -1:]
    found = torch.searchsorted(running, at, right=True).squeeze(-1)
    return found.clamp(max=weights.shape[-1] - 1)
