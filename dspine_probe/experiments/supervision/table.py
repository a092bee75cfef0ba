"""The table of the supervision experiment, from what was measured of every draft.

One row is (arm, seed, set, metric, layer, slot, blocks) with value, 95 % interval and number of prompts. Seed "all" is
the mean over seeds, its interval over prompts alone; rows of `al_gain` with seed "t over seeds" have the t-interval of
the seeds' gains in place of it. Metrics:

al (tokens per round), al_gain (minus the arm "none", same seeds, same prompts), survival (slot k and all before it
kept), top1 and top1_gain (slot 0: mean over slots), cosine by reader (metric "cosine, <reader>"), effective_rank and
effective_rank_raw (no interval), and the curves of `supervision_logs`. Entry point: `tabulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import t as student  # type: ignore[import-untyped]
from torch import Tensor

from dspine_probe.experiments.acceptance import MEAN
from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.contrast import Draws, difference, macro, per_slot
from dspine_probe.experiments.stats import LEVEL, Estimate, estimate, ratio_samples
from dspine_probe.experiments.supervision.readings import READERS, ArmReadings, RoundCounts

BASE, ALL, OVER_SEEDS = "none", "all", "t over seeds"
COLUMNS = ("arm", "seed", "set", "metric", "layer", "slot", "blocks", "value", "low", "high", "prompts")
Samples = Float[Tensor, "one_and_resample *stat"]
"""A value as measured, then in every resample."""


@dataclass(frozen=True)
class Measured:
    """Everything about one draft, before any statistics."""

    arm: str
    seed: int
    rounds: RoundCounts
    readings: ArmReadings
    curve: tuple[Mapping[str, Any], ...]


def tabulate(measured: Sequence[Measured], arena: Arena, draws: Draws) -> pd.DataFrame:
    """All rows; every draft is measured on the same prompts and sees the same draws, so gains are paired."""
    table = _Table(measured, arena, draws)
    rows: list[dict[str, Any]] = []
    for arm in dict.fromkeys(one.arm for one in measured):
        rows += table.acceptance(arm)
        rows += table.accuracy(arm)
        rows += table.stream(arm)
        rows += table.curves(arm)
    frame = pd.DataFrame([{"set": MEAN, "prompts": len(arena.answers)} | row for row in rows])
    return frame.reindex(columns=COLUMNS).astype({name: "Int64" for name in ("layer", "slot", "blocks")})


class _Table:
    """Rows of one arm at a time."""

    def __init__(self, measured: Sequence[Measured], arena: Arena, draws: Draws) -> None:
        self.of: dict[str, dict[int, Measured]] = {}
        for one in measured:
            self.of.setdefault(one.arm, {})[one.seed] = one
        self.arena, self.draws = arena, draws

    def acceptance(self, arm: str) -> Iterator[dict[str, Any]]:
        """al, al_gain, survival."""
        lengths = {seed: self._lengths(one.rounds) for seed, one in self.of[arm].items()}
        base = {seed: self._lengths(one.rounds) for seed, one in self.of[BASE].items()}
        yield from self._by_seed(arm, "al", lengths)
        if arm != BASE:
            gains = {seed: found - base[seed] for seed, found in lengths.items() if seed in base}
            yield from self._by_seed(arm, "al_gain", gains)
            interval = _t_interval([float(gain[0, -1]) for gain in gains.values()])
            yield {"arm": arm, "seed": OVER_SEEDS, "metric": "al_gain", **interval}
        survival = torch.stack([self._survival(one.rounds) for one in self.of[arm].values()]).mean(0)
        yield from _slots(
            {"arm": arm, "seed": ALL, "metric": "survival"}, estimate(survival[0], survival[1:])
        )

    def accuracy(self, arm: str) -> Iterator[dict[str, Any]]:
        """top1 and top1_gain, by slot and (as slot 0) over all slots."""
        hits = {seed: one.readings.correct for seed, one in self.of[arm].items()}
        pooled = torch.stack(list(hits.values())).mean(0)
        keys = {"arm": arm, "seed": ALL, "metric": "top1"}
        yield from _slots(keys, per_slot(pooled, self.draws))
        yield keys | {"slot": 0} | _cells(macro(pooled, self.draws))
        if arm == BASE:
            return
        base = {seed: one.readings.correct for seed, one in self.of[BASE].items()}
        shared = [seed for seed in hits if seed in base]
        ours, theirs = (torch.stack([side[seed] for seed in shared]).mean(0) for side in (hits, base))
        gain = {"arm": arm, "seed": ALL, "metric": "top1_gain"}
        yield from _slots(gain, per_slot(ours - theirs, self.draws))
        yield gain | {"slot": 0} | _cells(difference(ours, theirs, self.draws))
        for seed in shared:
            found = difference(hits[seed], base[seed], self.draws)
            yield gain | {"seed": str(seed), "slot": 0} | _cells(found)

    def stream(self, arm: str) -> Iterator[dict[str, Any]]:
        """Cosines and effective ranks by layer."""
        for reader in READERS:
            by_seed = {seed: one.readings.cosine[reader] for seed, one in self.of[arm].items()}
            for seed, cosine in (by_seed | {ALL: torch.stack(list(by_seed.values())).mean(0)}).items():
                for layer, scores in enumerate(cosine, start=1):
                    if not scores.isnan().all():
                        row = {"arm": arm, "seed": str(seed), "metric": f"cosine, {reader}", "layer": layer}
                        yield row | _cells(macro(scores, self.draws))
        for metric in ("effective_rank", "effective_rank_raw"):
            ranks = {seed: getattr(one.readings, metric) for seed, one in self.of[arm].items()}
            for seed, found in (ranks | {ALL: torch.stack(list(ranks.values())).mean(0)}).items():
                for layer, value in enumerate(found.tolist(), start=1):
                    yield {"arm": arm, "seed": str(seed), "metric": metric, "layer": layer, "value": value}

    def curves(self, arm: str) -> Iterator[dict[str, Any]]:
        """What the runs' own files say; their held-out sequences are not the arena's, so no prompts are counted."""
        for seed, one in self.of[arm].items():
            for row in one.curve:
                yield {"arm": arm, "seed": str(seed), "set": "training", "prompts": None, **row}

    def _by_seed(self, arm: str, metric: str, samples: Mapping[int, Samples]) -> Iterator[dict[str, Any]]:
        """Rows of every set and their mean (the last column), for each seed and for all."""
        pooled = torch.stack(list(samples.values())).mean(0)
        for seed, found in (dict(samples) | {ALL: pooled}).items():
            for column, name in enumerate((*self.arena.set_names, MEAN)):
                keys = {"arm": arm, "seed": str(seed), "set": name, "metric": metric}
                prompts = sum(name in (of, MEAN) for of in self.arena.sets)
                value = found[:, column]
                yield keys | {"prompts": prompts} | _cells(estimate(value[0], value[1:]))

    def _lengths(self, counts: RoundCounts) -> Float[Tensor, "one_and_resample set_and_mean"]:
        by_set = self._per_set(lambda members: (counts.committed[members], counts.rounds[members]))
        return torch.cat([by_set, by_set.nanmean(1, keepdim=True)], dim=1)

    def _survival(self, counts: RoundCounts) -> Float[Tensor, "one_and_resample draft_slot"]:
        by_set = self._per_set(lambda members: (counts.passed[members], counts.reached[members]))
        # A slot that no round reached has no rate of its own; nothing survives to it.
        return by_set.nan_to_num(0.0).cumprod(dim=-1).mean(1)

    def _per_set(self, sums: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Samples:
        """Ratios of every set, as measured and in every resample, along axis 1."""
        found = []
        for name in self.arena.set_names:
            members = torch.tensor([i for i, of in enumerate(self.arena.sets) if of == name])
            found.append(ratio_samples(*sums(members), self.draws.weights[:, members]))
        return torch.stack(found, dim=1)


def _t_interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean of the seeds' values with Student's interval; without one for a single seed."""
    each = torch.tensor(values, dtype=torch.float64)
    mean = float(each.mean())
    if len(each) < 2:
        return {"value": mean}
    width = float(student.ppf((1 + LEVEL) / 2, len(each) - 1) * each.std() / len(each) ** 0.5)
    return {"value": mean, "low": mean - width, "high": mean + width}


def _cells(found: Estimate) -> dict[str, float]:
    return {"value": float(found.value), "low": float(found.low), "high": float(found.high)}


def _slots(keys: Mapping[str, Any], found: Estimate) -> Iterator[dict[str, Any]]:
    columns = zip(found.value.tolist(), found.low.tolist(), found.high.tolist(), strict=True)
    for slot, (value, low, high) in enumerate(columns, start=1):
        yield {**keys, "slot": slot, "value": value, "low": low, "high": high}
