"""From a number per block and slot to an estimate: means over slots and sets, paired differences, intervals.

Scores are [block, draft_slot], the blocks in the order of an arena, NaN where nothing was measured. A slot's mean in a
set pools that set's blocks; slots are then averaged unweighted, and sets after them. Intervals come from drawing
prompts with replacement within every set, the same draws for every condition, so differences are paired. Entry
points: `Draws.of`, `macro`, `difference`, `per_slot`, `per_set`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.errors import UsageError
from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.stats import RESAMPLES, Estimate, draw_counts, estimate, ratio_samples

Scores = Float[Tensor, "block draft_slot"]


@dataclass(frozen=True)
class Draws:
    """Which prompt and set every block belongs to, and how often each resample draws every prompt.

    weights: first row all ones, for the measured value; then one row a resample.
    """

    prompt: Int[Tensor, "block"]
    set_index: Int[Tensor, "block"]
    set_names: tuple[str, ...]
    weights: Float[Tensor, "one_and_resample prompt"]

    @classmethod
    def of(cls, arena: Arena, *, seed: int = 0, resamples: int = RESAMPLES) -> Draws:
        """Draws for an arena; the same seed gives the same ones."""
        generator = torch.Generator().manual_seed(seed)
        weights = torch.zeros(1 + resamples, len(arena.answers), dtype=torch.float64)
        weights[0] = 1
        for name in arena.set_names:
            members = torch.tensor([i for i, of in enumerate(arena.sets) if of == name])
            weights[1:, members] = draw_counts(len(members), generator=generator, resamples=resamples)
        return cls(arena.prompt, arena.set_index, arena.set_names, weights)

    def means(self, scores: Scores) -> Float[Tensor, "one_and_resample set draft_slot"]:
        """Mean by set and slot, as measured (row 0) and in every resample; NaN where nothing was measured."""
        if len(scores) != len(self.prompt):
            raise UsageError(
                f"scores have {len(scores)} blocks and the arena {len(self.prompt)}; give each block a row."
            )
        measured = ~scores.isnan()
        sums = self._by_prompt(scores.nan_to_num(0.0))
        counts = self._by_prompt(measured)
        found = []
        for index in range(len(self.set_names)):
            members = self.prompt[self.set_index == index].unique()
            found.append(ratio_samples(sums[members], counts[members], self.weights[:, members]))
        return torch.stack(found, dim=1)

    def _by_prompt(self, values: Tensor) -> Float[Tensor, "prompt draft_slot"]:
        sums = torch.zeros(self.weights.shape[1], values.shape[1], dtype=torch.float64)
        return sums.index_add_(0, self.prompt, values.double().cpu())


def macro(scores: Scores, draws: Draws, slots: Sequence[int] | None = None) -> Estimate:
    """Mean over slots (1…T, or those named), then over sets."""
    return _reduced(scores, draws, slots, lambda means: means.nanmean(-1).nanmean(-1))


def difference(a: Scores, b: Scores, draws: Draws, slots: Sequence[int] | None = None) -> Estimate:
    """`macro` of a − b, over what was measured in both."""
    return macro(a - b, draws, slots)


def per_slot(scores: Scores, draws: Draws) -> Estimate:
    """Mean over sets of every slot 1…T."""
    return _reduced(scores, draws, None, lambda means: means.nanmean(1))


def per_set(scores: Scores, draws: Draws, slots: Sequence[int] | None = None) -> Estimate:
    """Mean over slots of every set, in the order of `draws.set_names`."""
    return _reduced(scores, draws, slots, lambda means: means.nanmean(-1))


def _reduced(
    scores: Scores, draws: Draws, slots: Sequence[int] | None, reduce: Callable[[Tensor], Tensor]
) -> Estimate:
    if slots is not None:
        bad = [slot for slot in slots if not 1 <= slot <= scores.shape[1]]
        if bad or not slots:
            raise UsageError(f"slots {list(slots)} were asked for; name some of 1…{scores.shape[1]}.")
        scores = scores[:, torch.tensor(slots) - 1]
    values = reduce(draws.means(scores))
    return estimate(values[0], values[1:])
