"""From right and wrong slots to the table of the injection experiment: accuracies, gains, contrasts, trends.

Factors: `arm` (which injector, or "a − b" of two) and `predecessor` (what the injector is given for it). Drafts that
are seeds of one family get rows of their own and their mean's, under the family's name. Metrics:

- `top1`: share of slots 2…T that are right, mean over slots and sets where no slot or set is named.
- `difference`: of two arms; "a − floor" is a gain over no injection. Of two predecessors: "true − rank-2".
- `shallow_minus_late`: mean of the shallow depths minus mean of the late ones, given the same predecessor.
- `trend`: Spearman's correlation of accuracy with depth, by set, and its mean over sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.experiments.common.intervals import Draws, Estimate, Scores, estimate, macro, per_set, per_slot
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.injection_depth.arms import ALL, LAYERS, MARKOV, MLP, UNRELIABLE, Arm, contrasted
from dspine_probe.experiments.injection_depth.blocks import FIRST_SLOT
from dspine_probe.experiments.injection_depth.injectors import NOISE, RANDOM

FLOOR, NO_OP, NOTHING = "floor", "no-op", "nothing"
TRUE, RANK_2 = "true", "rank-2"
MINUS = " − "
MEAN = "mean"
TOP1, DIFFERENCE, CONTRAST, TREND = "top1", "difference", "shallow_minus_late", "trend"
FACTORS = ("arm", "predecessor")


@dataclass(frozen=True)
class Condition:
    """An arm, the depth at which it injects (None: several or none), and the predecessor it is given."""

    arm: str
    depth: int | None
    predecessor: str

    @classmethod
    def of(cls, arm: Arm, predecessor: str = TRUE) -> Condition:
        """An arm given some predecessor."""
        return cls(arm.name, arm.depth if isinstance(arm.depth, int) else None, predecessor)


FLOOR_CONDITION = Condition(FLOOR, None, NOTHING)
Found = Mapping[Condition, Scores]


def mixed(share: float) -> str:
    """The predecessor where this share of codes is true and the rest are the draft's own guesses."""
    return f"rho {share:.2f}"


def tabulate(found: Mapping[str, Found], families: Mapping[str, str], draws: Draws, layers: int) -> pd.DataFrame:
    """The rows of every draft, and of the mean of every family with two or more seeds.

    Args:
        found: by draft, whether each slot of each block is right under each condition.
        families: the family of every draft; a family of one has the draft's own name.
        draws: the bootstrap over prompts.
        layers: of the drafts.
    """
    rows = RowBuilder(FACTORS)
    for family in dict.fromkeys(families[draft] for draft in found):
        members = [draft for draft in found if families[draft] == family]
        for draft in members:
            _DraftRows(rows, draft, found[draft], draws, layers).fill()
        if len(members) > 1:
            shared = [c for c in found[members[0]] if all(c in found[m] for m in members)]
            mean = {c: torch.stack([found[m][c] for m in members]).mean(0) for c in shared}
            _DraftRows(rows, family, mean, draws, layers).fill()
    return rows.table()


@dataclass(frozen=True)
class _DraftRows:
    """The rows of one draft or family."""

    rows: RowBuilder
    draft: str
    found: Found
    draws: Draws
    layers: int

    def fill(self) -> None:
        """Add all rows."""
        self._accuracies()
        for a, b in [*self._gains(), *self._controls()]:
            if a in self.found and b in self.found:
                self._add(_minus(a, b), DIFFERENCE, self.found[a] - self.found[b])
        self._contrasts()
        self._trends()

    def _accuracies(self) -> None:
        """`top1` of every condition: all slots, by slot, by set."""
        for condition, scores in self.found.items():
            self._add(condition, TOP1, scores)
            by_slot, by_set = per_slot(scores, self.draws), per_set(scores, self.draws)
            for slot in range(FIRST_SLOT, scores.shape[1] + 1):
                column = scores[:, slot - 1 : slot]
                self._add(condition, TOP1, column, _at(by_slot, slot - 1), slot=str(slot))
            for index, name in enumerate(self.draws.set_names):
                part = scores[self.draws.set_index == index]
                self._add(condition, TOP1, part, _at(by_set, index), set=name)

    def _gains(self) -> Iterator[tuple[Condition, Condition]]:
        """Every condition over no injection, and true against wrong codes."""
        yield from ((condition, FLOOR_CONDITION) for condition in self.found if condition != FLOOR_CONDITION)
        yield from ((replace(w, predecessor=TRUE), w) for w in self.found if w.predecessor == RANK_2)

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

    def _contrasts(self) -> None:
        """Shallow minus late for every predecessor of the depth arms, and shallow minus the late rivals."""
        shallow, late = contrasted(self.layers)
        rows = [
            (CONTRAST, given, f"{_list(shallow)}{MINUS}{_list(late)}", self._mean(late, given))
            for given in dict.fromkeys(condition.predecessor for condition in self.found)
        ]
        for rival in (MLP, LAYERS, MARKOV):
            arm = Arm(self.layers, late=rival)
            name = f"{_list(shallow)}{MINUS}{arm.name}"
            rows.append((DIFFERENCE, TRUE, name, self.found.get(Condition.of(arm))))
        for metric, given, name, other in rows:
            mean = self._mean(shallow, given)
            if mean is not None and other is not None:
                self._add(Condition(name, None, given), metric, mean - other)

    def _trends(self) -> None:
        """Rank correlation of accuracy with depth."""
        depths = [Condition.of(Arm(depth)) for depth in range(self.layers + 1)]
        if not all(condition in self.found for condition in depths):
            return
        by_depth = [self.draws.means(self.found[c]).nanmean(-1) for c in depths]
        by_set = spearman(torch.stack(by_depth, dim=-1))
        here, scores = Condition("depth", None, TRUE), self.found[depths[0]]
        mean = by_set.nanmean(-1)
        self._add(here, TREND, scores, estimate(mean[0], mean[1:]))
        for index, name in enumerate(self.draws.set_names):
            part = scores[self.draws.set_index == index]
            self._add(here, TREND, part, estimate(by_set[0, index], by_set[1:, index]), set=name)

    def _mean(self, depths: tuple[int, ...], predecessor: str) -> Scores | None:
        wanted = [Condition.of(Arm(depth), predecessor) for depth in depths]
        if not all(condition in self.found for condition in wanted):
            return None
        return torch.stack([self.found[condition] for condition in wanted]).mean(0)

    def _add(
        self,
        condition: Condition,
        metric: str,
        scores: Tensor,
        found: Estimate | None = None,
        *,
        slot: str = "",
        set: str = MEAN,
    ) -> None:
        """One row; the value is the mean over slots and sets, unless another is given."""
        self.rows.add(
            macro(scores, self.draws) if found is None else found,
            draft=self.draft,
            metric=metric,
            depth=condition.depth,
            slot=slot,
            set=set,
            n=int((~scores.isnan()).sum()),
            arm=condition.arm,
            predecessor=condition.predecessor,
        )


def spearman(values: Float[Tensor, "*stat depth"]) -> Float[Tensor, "*stat"]:
    """Rank correlation with the depth; ties share their rank, equal values everywhere give NaN."""
    gap = values[..., :, None] - values[..., None, :]
    place = (gap > 0).double().sum(-1) + 0.5 * (gap == 0).double().sum(-1)
    place = place - place.mean(-1, keepdim=True)
    depth = torch.arange(values.shape[-1], dtype=place.dtype)
    depth = depth - depth.mean()
    return (place * depth).sum(-1) / (place.norm(dim=-1) * depth.norm())


def _minus(a: Condition, b: Condition) -> Condition:
    """The label of a difference, in the factor that differs."""
    if a.arm == b.arm:
        return replace(a, predecessor=a.predecessor + MINUS + b.predecessor)
    return replace(a, arm=a.arm + MINUS + b.arm)


def _at(found: Estimate, index: int) -> Estimate:
    return Estimate(found.value[index], found.low[index], found.high[index])


def _list(depths: tuple[int, ...]) -> str:
    return "depths " + ", ".join(map(str, depths)) if len(depths) > 1 else f"depth {depths[0]}"
