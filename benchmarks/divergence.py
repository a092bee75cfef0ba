"""Where the answers of two decoding methods diverge, and whether rounding explains it.

In bfloat16 sums are rounded, and where the target's two best tokens score almost the same, another order of rounding
can turn them round; from there on the answers differ. `first_divergences` finds these places and measures, with an
engine that is asked as a judge (in float32, say), how far the two tokens' scores lie apart there. A gap of few
steps of bfloat16 at the size of the scores is a near-tie; a larger one is a fault in one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.decoding.engine import Engines
from dspine_probe.target import Target

NEAR = 2.0
"""Most steps of bfloat16 between two scores that rounding may turn round."""


@dataclass(frozen=True)
class Divergence:
    """The first place where two answers to one prompt differ.

    prompt: index of the prompt. at: tokens of the answer before that place.
    expected, found: the two tokens.
    margin: the judge's score of `expected` less that of `found`; negative where the judge sides with `found`.
    step: spacing of bfloat16 numbers at the size of the larger of the two scores.
    """

    prompt: int
    at: int
    expected: int
    found: int
    margin: float
    step: float

    @property
    def steps(self) -> float:
        """Size of the margin in steps of bfloat16."""
        return abs(self.margin) / self.step

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.steps <= NEAR


def divergence_at(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Tokens before the first difference of two answers that were given the same room; None if they are equal."""
    pairs = zip(expected, found, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None)


@torch.inference_mode()
def first_divergences(
    target: Target,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    *,
    judge: Engines,
) -> list[Divergence]:
    """Compare answers prompt by prompt.

    Args:
        target: what wrote both answers.
        prompts: token ids.
        expected: greedy answers one way, such as plain decoding.
        found: greedy answers the other way, with the same length limit and stop ids. An answer ends at a stop id or the
            limit, so of two different ones neither is the beginning of the other.
        judge: scores the two tokens at the place where they diverge.
    """
    parted = []
    for number, (prompt, one, other) in enumerate(zip(prompts, expected, found, strict=True)):
        at = divergence_at(one, other)
        if at is not None:
            scores = _scores(target, [*prompt, *one[:at]], judge)
            parted.append(_divergence(number, at, one[at], other[at], scores))
    return parted


def _scores(target: Target, ids: Sequence[int], judge: Engines) -> Float[Tensor, "vocab"]:
    engine = judge.open_target(target, taps=(), rows=1, capacity=len(ids), width=1)
    return engine.prefill([ids])[0].float()


def _divergence(prompt: int, at: int, expected: int, found: int, scores: Tensor) -> Divergence:
    one, other = float(scores[expected]), float(scores[found])
    step = 2.0 ** (math.floor(math.log2(max(abs(one), abs(other), 1e-6))) - 7)
    return Divergence(prompt, at, expected, found, one - other, step)
