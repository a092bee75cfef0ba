"""From right and wrong slots to the table of the injection experiment: accuracies, gains, contrasts, trends.

Rows are (draft, arm, depth, told, metric, slot, set) with value, 95 % interval over prompts, and what it was measured
on. Drafts whose names differ only in a number at the end are seeds of one draft: their mean gets rows of its own, under
the common name, with `seeds` above one. Metrics:

- `top1`: share of slots 2…T that are right, mean over slots and sets; slot 0 and set "mean" are these means.
- `difference`: of two arms, named "a − b" in column `arm`; "a − floor" is a gain over no injection.
- `shallow_minus_late`: mean of the shallow depths minus mean of the late ones, told alike.
- `trend`: Spearman's correlation of accuracy with depth, by set, and its mean over sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.experiments.contrast import Draws, Scores, macro, per_set, per_slot
from dspine_probe.experiments.injection_depth.arms import (
    ALL,
    BLOCKS,
    MARKOV,
    MLP,
    UNRELIABLE,
    Arm,
    contrasted,
)
from dspine_probe.experiments.injection_depth.block_pass import FIRST_SLOT
from dspine_probe.experiments.injection_depth.injectors import NOISE, RANDOM
from dspine_probe.experiments.stats import Estimate, estimate

FLOOR, NO_OP, NOTHING = "floor", "no-op", "nothing"
TRUE, RANK_2 = "true", "rank-2"
MINUS = " − "
MEAN = "mean"  # over sets, as slot 0 stands for the mean over slots
TOP1, DIFFERENCE, CONTRAST, TREND = "top1", "difference", "shallow_minus_late", "trend"


@dataclass(frozen=True)
class Condition:
    """An arm, and what its sites are told about their predecessors."""

    arm: str
    depth: int | str | None
    told: str

    @classmethod
    def of(cls, arm: Arm, told: str = "true") -> Condition:
        """An arm as it is told."""
        return cls(arm.name, arm.depth, told)


Found = Mapping[Condition, Scores]


def mixed(share: float) -> str:
    """What sites are told when this share of codes is true and the rest are the draft's own guesses."""
    return f"rho {share:.2f}"


def family(draft: str) -> str:
    """The name that seeds of one draft share: "dflash-0" and "dflash-seed1" are both of "dflash"."""
    return re.sub(r"[-_/ ]?(seed[-_]?)?\d+$", "", draft) or draft


def tabulate(found: Mapping[str, Found], draws: Draws, layers: int) -> pd.DataFrame:
    """The rows of every draft, and of the mean over the seeds of each family with two or more."""
    rows: list[dict[str, Any]] = []
    for name, seeds, scores in _with_families(found):
        table = _Table({"draft": name, "seeds": seeds}, scores, draws, layers)
        rows += [*table.accuracies(), *table.differences(), *table.contrasts(), *table.trends()]
    return pd.DataFrame(rows)


def _with_families(found: Mapping[str, Found]) -> Iterator[tuple[str, int, Found]]:
    for name in dict.fromkeys(family(draft) for draft in found):
        members = [draft for draft in found if family(draft) == name]
        for draft in members:
            yield draft, 1, found[draft]
        if len(members) > 1:
            shared = [c for c in found[members[0]] if all(c in found[m] for m in members)]
            mean = {c: torch.stack([found[m][c] for m in members]).mean(0) for c in shared}
            yield name, len(members), mean


@dataclass(frozen=True)
class _Table:
    """The rows of one draft or family."""

    keys: Mapping[str, Any]
    found: Found
    draws: Draws
    layers: int

    def accuracies(self) -> Iterator[dict[str, Any]]:
        """`top1` of every condition: all slots, by slot, by set."""
        for condition, scores in self.found.items():
            yield self._row(condition, TOP1, macro(scores, self.draws), scores)
            by_slot, by_set = per_slot(scores, self.draws), per_set(scores, self.draws)
            for slot in range(FIRST_SLOT, scores.shape[1] + 1):
                yield self._row(
                    condition, TOP1, _at(by_slot, slot - 1), scores[:, slot - 1 :][:, :1], slot=slot
                )
            for index, name in enumerate(self.draws.set_names):
                part = scores[self.draws.set_index == index]
                yield self._row(condition, TOP1, _at(by_set, index), part, set=name)

    def differences(self) -> Iterator[dict[str, Any]]:
        """Gains over no injection, true against wrong code, and arms against their controls."""
        floor = Condition(FLOOR, None, NOTHING)
        pairs = [(condition, floor) for condition in self.found if condition != floor]
        pairs += [(replace(wrong, told=TRUE), wrong) for wrong in self.found if wrong.told == RANK_2]
        for a, b in [*pairs, *self._controls()]:
            if a in self.found and b in self.found:
                gap = self.found[a] - self.found[b]
                second = b.arm if a.arm != b.arm else f"{b.arm} told {b.told}"
                yield self._row(
                    replace(a, arm=a.arm + MINUS + second), DIFFERENCE, macro(gap, self.draws), gap
                )

    def contrasts(self) -> Iterator[dict[str, Any]]:
        """Shallow minus late for everything that the depth arms are told, and shallow minus the late rivals."""
        shallow, late = contrasted(self.layers)
        rows = [
            (CONTRAST, told, f"{_list(shallow)}{MINUS}{_list(late)}", self._mean(late, told))
            for told in dict.fromkeys(condition.told for condition in self.found)
        ]
        for rival in (MLP, BLOCKS, MARKOV):
            arm = Arm(self.layers, late=rival)
            name = f"{_list(shallow)}{MINUS}{arm.name}"
            rows.append((DIFFERENCE, TRUE, name, self.found.get(Condition.of(arm))))
        for metric, told, name, other in rows:
            mean = self._mean(shallow, told)
            if mean is not None and other is not None:
                gap = mean - other
                yield self._row(Condition(name, None, told), metric, macro(gap, self.draws), gap)

    def trends(self) -> Iterator[dict[str, Any]]:
        """Rank correlation of accuracy with depth."""
        depths = [Condition.of(Arm(depth)) for depth in range(self.layers + 1)]
        if not all(condition in self.found for condition in depths):
            return
        by_depth = [self.draws.means(self.found[c]).nanmean(-1) for c in depths]
        by_set = spearman(torch.stack(by_depth, dim=-1))
        here, scores = Condition("depth", None, TRUE), self.found[depths[0]]
        mean = by_set.nanmean(-1)
        yield self._row(here, TREND, estimate(mean[0], mean[1:]), scores)
        for index, name in enumerate(self.draws.set_names):
            part = scores[self.draws.set_index == index]
            yield self._row(here, TREND, estimate(by_set[0, index], by_set[1:, index]), part, set=name)

    def _controls(self) -> Iterator[tuple[Condition, Condition]]:
        """Arms and what they are held against."""
        last = self.layers
        for depth in range(last + 1):
            here = Condition.of(Arm(depth))
            yield Condition.of(Arm(ALL)), here
            yield here, Condition.of(Arm(depth, code=RANDOM))
            yield here, Condition.of(Arm(depth, code=NOISE))
            yield Condition.of(Arm(depth, leak=True)), here
        for early in range(last):
            yield Condition.of(Arm(early, unfrozen=True)), Condition.of(Arm(last, unfrozen=True))
            for share in UNRELIABLE:
                a, b = (Condition.of(Arm(d, reliability=share), mixed(share)) for d in (early, last))
                yield a, b

    def _mean(self, depths: tuple[int, ...], told: str) -> Scores | None:
        wanted = [Condition.of(Arm(depth), told) for depth in depths]
        if not all(condition in self.found for condition in wanted):
            return None
        return torch.stack([self.found[condition] for condition in wanted]).mean(0)

    def _row(
        self,
        condition: Condition,
        metric: str,
        found: Estimate,
        scores: Tensor,
        *,
        slot: int = 0,
        set: str = MEAN,
    ) -> dict[str, Any]:
        measured = ~scores.isnan()
        return {
            **self.keys,
            "arm": condition.arm,
            "depth": "–" if condition.depth is None else str(condition.depth),
            "told": condition.told,
            "metric": metric,
            "slot": slot,
            "set": set,
            "mean": float(found.value),
            "low": float(found.low),
            "high": float(found.high),
            "n": int(measured.sum()),
        }


def spearman(values: Float[Tensor, "*stat depth"]) -> Float[Tensor, "*stat"]:
    """Rank correlation with the depth; ties share their rank, equal values everywhere give NaN."""
    gap = values[..., :, None] - values[..., None, :]
    place = (gap > 0).double().sum(-1) + 0.5 * (gap == 0).double().sum(-1)
    place = place - place.mean(-1, keepdim=True)
    depth = torch.arange(values.shape[-1], dtype=place.dtype)
    depth = depth - depth.mean()
    return (place * depth).sum(-1) / (place.norm(dim=-1) * depth.norm())


def _at(found: Estimate, index: int) -> Estimate:
    return Estimate(found.value[index], found.low[index], found.high[index])


def _list(depths: tuple[int, ...]) -> str:
    return "depths " + ", ".join(map(str, depths)) if len(depths) > 1 else f"depth {depths[0]}"
