"""The table of the supervision experiment, from what was measured of every draft.

The column `draft` holds the arm, or "a − none" for its gain over no supervision on the same seeds and prompts. Factors:
`seed` ("all" is the mean over seeds, its interval over prompts alone; "t over seeds" has the t-interval of the seeds'
gains in place of it) and `blocks` trained (of the curves). `n` counts prompts; of curves, anchors or logged steps.

Metrics: al (tokens per round), survival (slot k and all before it kept), top1 (by slot, or without one the mean over
slots), cosine by reader ("cosine, <reader>"), effective_rank and effective_rank_raw (no interval), and the curves of
`runs.curve`. Entry point: `tabulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import t as student
from torch import Tensor

from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import (
    LEVEL,
    Draws,
    Estimate,
    Scores,
    estimate,
    macro,
    per_slot,
    ratio_samples,
)
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.schema import MEAN, MINUS
from dspine_probe.experiments.supervision.readings import READERS, ArmReadings, RoundCounts
from dspine_probe.experiments.supervision.runs import CurvePoint

BASE, ALL, OVER_SEEDS = "none", "all", "t over seeds"
FACTORS = ("seed", "blocks")
Samples = Float[Tensor, "one_and_resample *stat"]
"""A value as measured, then in every resample."""


@dataclass(frozen=True)
class Measured:
    """Everything about one draft, before any statistics."""

    arm: str
    seed: int
    rounds: RoundCounts
    readings: ArmReadings
    curve: tuple[CurvePoint, ...]


def over_base(arm: str) -> str:
    """The label of an arm's gain over no supervision."""
    return arm + MINUS + BASE


def tabulate(measured: Sequence[Measured], arena: Arena, draws: Draws) -> pd.DataFrame:
    """All rows; every draft is measured on the same prompts and sees the same draws, so gains are paired."""
    table = _ArmRows(measured, arena, draws)
    for arm in table.of:
        table.acceptance(arm)
        table.accuracy(arm)
        table.stream(arm)
        table.curves(arm)
    return table.rows.table()


class _ArmRows:
    """Adds the rows of one arm at a time."""

    def __init__(self, measured: Sequence[Measured], arena: Arena, draws: Draws) -> None:
        self.of: dict[str, dict[int, Measured]] = {}
        for one in measured:
            self.of.setdefault(one.arm, {})[one.seed] = one
        self.arena, self.draws, self.rows = arena, draws, RowBuilder(FACTORS)

    def acceptance(self, arm: str) -> None:
        """al, its gain, and survival."""
        lengths, base = (self._by_seed(of, lambda one: self._lengths(one.rounds)) for of in (arm, BASE))
        self._lengths_of(arm, lengths)
        if arm != BASE:
            gains = {seed: found - base[seed] for seed, found in lengths.items() if seed in base}
            self._lengths_of(over_base(arm), gains)
            over = _t_interval([float(gain[0, -1]) for gain in gains.values()])
            self._add(over, over_base(arm), "al", OVER_SEEDS)
        survival = _pooled(self._by_seed(arm, lambda one: self._survival(one.rounds)))
        self._add_slots(estimate(survival[0], survival[1:]), arm, "survival")

    def accuracy(self, arm: str) -> None:
        """top1 and its gain, by slot and over all slots."""
        hits, base = (self._by_seed(of, lambda one: one.readings.correct) for of in (arm, BASE))
        self._hits_of(arm, _pooled(hits))
        if arm == BASE:
            return
        gains = {seed: hits[seed] - base[seed] for seed in hits if seed in base}
        self._hits_of(over_base(arm), _pooled(hits, base) - _pooled(base, hits))
        for seed, gain in gains.items():
            self._add(macro(gain, self.draws), over_base(arm), "top1", seed)

    def stream(self, arm: str) -> None:
        """Cosines and effective ranks by layer."""
        for reader in READERS:
            cosines = {seed: one.readings.cosine[reader] for seed, one in self.of[arm].items()}
            for seed, cosine in _and_pooled(cosines).items():
                for layer, scores in enumerate(cosine, start=1):
                    if not scores.isnan().all():
                        self._add(macro(scores, self.draws), arm, f"cosine, {reader}", seed, depth=layer)
        for metric in ("effective_rank", "effective_rank_raw"):
            ranks = {seed: getattr(one.readings, metric) for seed, one in self.of[arm].items()}
            for seed, found in _and_pooled(ranks).items():
                for layer, value in enumerate(found.tolist(), start=1):
                    self._add(value, arm, metric, seed, depth=layer)

    def curves(self, arm: str) -> None:
        """What the runs' own files say; their held-out sequences are not the arena's."""
        for seed, one in self.of[arm].items():
            for point in one.curve:
                self.rows.add(
                    point.value,
                    draft=arm,
                    metric=point.metric,
                    depth=point.layer,
                    set="training",
                    n=point.n,
                    seed=seed,
                    blocks=point.blocks,
                )

    def _lengths_of(self, draft: str, samples: Mapping[int, Samples]) -> None:
        """Rows of every set and their mean (the last column), for each seed and for all."""
        for seed, found in _and_pooled(samples).items():
            for column, name in enumerate((*self.arena.set_names, MEAN)):
                value = found[:, column]
                n = sum(name in (of, MEAN) for of in self.arena.sets)
                self._add(estimate(value[0], value[1:]), draft, "al", seed, set=name, n=n)

    def _hits_of(self, draft: str, hits: Scores) -> None:
        self._add_slots(per_slot(hits, self.draws), draft, "top1")
        self._add(macro(hits, self.draws), draft, "top1", ALL)

    def _add_slots(self, found: Estimate, draft: str, metric: str) -> None:
        for index in range(len(found.value)):
            self._add(found.at(index), draft, metric, ALL, slot=index + 1)

    def _add(
        self, found: Estimate | float, draft: str, metric: str, seed: int | str, *, n: int | None = None, **at: Any
    ) -> None:
        prompts = len(self.arena.answers) if n is None else n
        self.rows.add(found, draft=draft, metric=metric, n=prompts, seed=seed, blocks="", **at)

    def _by_seed(self, arm: str, part: Callable[[Measured], Tensor]) -> dict[int, Tensor]:
        return {seed: part(one) for seed, one in self.of[arm].items()}

    def _lengths(self, counts: RoundCounts) -> Float[Tensor, "one_and_resample set_and_mean"]:
        by_set = self._per_set(counts.committed, counts.rounds)
        return torch.cat([by_set, by_set.nanmean(1, keepdim=True)], dim=1)

    def _survival(self, counts: RoundCounts) -> Float[Tensor, "one_and_resample draft_slot"]:
        by_set = self._per_set(counts.passed, counts.reached)
        # A slot that no round reached has no rate of its own; nothing survives to it.
        return by_set.nan_to_num(0.0).cumprod(dim=-1).mean(1)

    def _per_set(self, numerator: Tensor, denominator: Tensor) -> Samples:
        """Ratios of every set, as measured and in every resample, along axis 1."""
        found = []
        for name in self.arena.set_names:
            members = torch.tensor([i for i, of in enumerate(self.arena.sets) if of == name])
            weights = self.draws.weights[:, members]
            found.append(ratio_samples(numerator[members], denominator[members], weights))
        return torch.stack(found, dim=1)


def _and_pooled(by_seed: Mapping[int, Tensor]) -> dict[int | str, Tensor]:
    """Every seed's, and the mean over the seeds."""
    every: dict[int | str, Tensor] = dict(by_seed.items())
    return every | {ALL: _pooled(by_seed)}


def _pooled(by_seed: Mapping[int, Tensor], shared: Mapping[int, Tensor] | None = None) -> Tensor:
    """Mean over the seeds, or over those that `shared` has too."""
    return torch.stack([one for seed, one in by_seed.items() if shared is None or seed in shared]).mean(0)


def _t_interval(values: Sequence[float]) -> Estimate | float:
    """Mean of the seeds' values with Student's interval; without one for a single seed."""
    each = torch.tensor(values, dtype=torch.float64)
    if len(each) < 2:
        return float(each.mean())
    width = student.ppf((1 + LEVEL) / 2, len(each) - 1) * each.std() / len(each) ** 0.5
    return Estimate(each.mean(), each.mean() - width, each.mean() + width)
