"""From ranks of labels to the emergence result: means with bootstrap intervals, differences, and what they say.

Metrics by slot: `top1`, `recall16` (label among the 16 best), `mrr` (1 / place, from 1). Over slots: `top1_mean` of
slots 2…T; without a slot: `top1_fall` from slot 1 to slot T and `top1_trend`, the rank correlation of accuracy with the
slot. A setting or draft written "a − b" is a difference on the same labels. Values average over sets; n counts labels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.experiments.common.claims import Claim
from dspine_probe.experiments.common.intervals import draw_counts, estimate, ratio_samples
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.schema import MINUS, Result, each_row
from dspine_probe.experiments.common.splits import Split
from dspine_probe.experiments.common.wording import number, percent, points
from dspine_probe.experiments.emergence.claims import claims, shallow
from dspine_probe.experiments.emergence.controls import CONTROLS, TRAINED, TRANSLATOR

METRICS = ("top1", "recall16", "mrr")


@dataclass(frozen=True)
class LabelRanks:
    """Where a reader ranked the test labels, before any statistics.

    rows: which labels this reader was asked about. first_depth: the depth of the first entry of `ranks`.
    """

    draft: str
    setting: str
    reader: str
    ranks: Int[Tensor, "depth label draft_slot"]
    sequence: Int[Tensor, "label"]
    rows: Bool[Tensor, "label"]
    first_depth: int
    vocabulary: int


@dataclass(frozen=True, eq=False)
class EmergenceResult(Result):
    """Readability by setting (trained, or a control), reader, depth and slot."""

    NAME, FACTORS = "emergence", ("setting", "reader")

    def grid(self, draft: str, setting: str = TRAINED, reader: str = TRANSLATOR, metric: str = "top1") -> pd.DataFrame:
        """Means of one metric with depths as rows and slots as columns; empty when it was not measured."""
        rows = self.select(draft=draft, setting=setting, reader=reader, metric=metric)
        return rows.assign(slot=rows["slot"].astype(int)).pivot(index="depth", columns="slot", values="mean")

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        return [sentence for draft in self.drafts for sentence in _findings(self, draft)]

    def claims(self) -> list[Claim]:
        """The ledger's line on the claim P0."""
        return claims(self)


def tabulate(measured: Iterable[LabelRanks], split: Split, resamples: int, seed: int) -> pd.DataFrame:
    """Means and bootstrap intervals of all metrics, differences between settings and drafts, and slot summaries.

    Whole groups are drawn, within their set; all rows share the same draws, so differences are paired.
    """
    boot, rows = _Bootstrap(split, resamples, seed), RowBuilder(EmergenceResult.FACTORS)
    kept: dict[tuple[str, str], _Sampled] = {}
    for item in measured:
        sampled = boot.sample(item)
        sampled.add_to(rows)
        if item.reader == TRANSLATOR:
            kept[item.draft, item.setting] = sampled
    for (draft, setting), sampled in kept.items():
        if setting != TRAINED:
            kept[draft, TRAINED].minus(sampled, "setting").add_to(rows)
    trained = [sampled for (_, setting), sampled in kept.items() if setting == TRAINED]
    for later in trained[1:]:
        later.minus(trained[0], "draft").add_to(rows)
    return rows.table()


class _Bootstrap:
    """One set of draws over the test groups of every set; without a value where a set has a single group."""

    def __init__(self, split: Split, resamples: int, seed: int) -> None:
        self.split = split
        tested = split.test(torch.arange(len(split.part)))
        self.groups = split.group[tested].unique()
        self.set_of = torch.stack([split.set[tested][split.group[tested] == g][0] for g in self.groups])
        sizes = {int(s): int((self.set_of == s).sum()) for s in self.set_of.unique()}
        self.counts = {
            index: draw_counts(size, generator=derive_generator(seed, "bootstrap", index), resamples=resamples)
            for index, size in sizes.items()
        }
        self.has_intervals = min(sizes.values()) > 1

    def sample(self, item: LabelRanks) -> _Sampled:
        """The metrics of all labels together and of every resample, averaged over sets."""
        values = _metrics(item)[:, item.rows]
        group = torch.searchsorted(self.groups, self.split.group[item.sequence[item.rows]])
        sums = torch.zeros(len(self.groups), *values.shape[:1], *values.shape[2:], dtype=torch.float64)
        sums.index_add_(0, group, values.movedim(1, 0).double())
        sizes = torch.bincount(group, minlength=len(self.groups)).double().view(-1, 1, 1, 1)
        once, drawn = [], []
        for index, counts in self.counts.items():
            member = self.set_of == index
            pair = sums[member], sizes[member]
            once.append(ratio_samples(*pair, torch.ones(1, int(member.sum()), dtype=torch.float64))[0])
            drawn.append(ratio_samples(*pair, counts))
        samples = torch.stack(drawn).nanmean(0)
        if not self.has_intervals:
            samples.fill_(math.nan)
        value = torch.stack(once).nanmean(0)
        return _Sampled(item.draft, item.setting, item.reader, item.first_depth, value, samples, int(item.rows.sum()))


@dataclass(frozen=True)
class _Sampled:
    """Value and resamples of the three metrics at every depth and slot."""

    draft: str
    setting: str
    reader: str
    first_depth: int
    value: Float[Tensor, "metric depth slot"]
    samples: Float[Tensor, "resample metric depth slot"]
    n: int

    def minus(self, other: _Sampled, name: str) -> _Sampled:
        """The paired difference, labelled "a − b" in `draft` or `setting`."""
        label = f"{getattr(self, name)}{MINUS}{getattr(other, name)}"
        value, samples = self.value - other.value, self.samples - other.samples
        changes: dict[str, Any] = {name: label, "value": value, "samples": samples}
        return dataclasses.replace(self, **changes)

    def add_to(self, rows: RowBuilder) -> None:
        """A row for every slot, then for all slots together."""
        slots = [str(slot) for slot in range(1, self.value.shape[-1] + 1)]
        for metric, value, samples in zip(METRICS, self.value, self.samples.movedim(1, 0), strict=True):
            self._add(rows, metric, value, samples, slots)
        top1, drawn = self.value[0], self.samples[:, 0]
        summaries = [("top1_mean", _mean, f"2-{slots[-1]}"), ("top1_fall", _fall, "")]
        if MINUS not in self.draft + self.setting:
            summaries.append(("top1_trend", _trend, ""))
        for metric, summary, slot in summaries:
            self._add(rows, metric, summary(top1)[:, None], summary(drawn)[..., None], [slot])

    def _add(
        self,
        rows: RowBuilder,
        metric: str,
        value: Float[Tensor, "depth place"],
        samples: Float[Tensor, "resample depth place"],
        slots: list[str],
    ) -> None:
        found = estimate(value, samples)
        for depth in range(len(value)):
            for place, slot in enumerate(slots):
                rows.add(
                    found.at(depth, place),
                    draft=self.draft,
                    metric=metric,
                    n=self.n,
                    depth=depth + self.first_depth,
                    slot=slot,
                    setting=self.setting,
                    reader=self.reader,
                )


def _metrics(item: LabelRanks) -> Float[Tensor, "metric label depth slot"]:
    ranks = item.ranks.movedim(1, 0)
    found = ranks < item.vocabulary
    return torch.stack([(ranks == 0).float(), ((ranks < 16) & found).float(), found / (ranks + 1.0)])


def _mean(accuracy: Float[Tensor, "*stat slot"]) -> Float[Tensor, "*stat"]:
    return accuracy[..., 1:].mean(-1)


def _fall(accuracy: Float[Tensor, "*stat slot"]) -> Float[Tensor, "*stat"]:
    return accuracy[..., 0] - accuracy[..., -1]


def _trend(accuracy: Float[Tensor, "*stat slot"]) -> Float[Tensor, "*stat"]:
    """Spearman's correlation with the slot number; ties share their rank, and equal accuracies everywhere give NaN."""
    above = accuracy[..., :, None] - accuracy[..., None, :]
    place = (above > 0).double().sum(-1) + 0.5 * (above == 0).double().sum(-1)
    place = place - place.mean(-1, keepdim=True)
    slot = torch.arange(place.shape[-1], dtype=place.dtype)
    slot = slot - slot.mean()
    return (place * slot).sum(-1) / (place.norm(dim=-1) * slot.norm())


def _findings(result: EmergenceResult, draft: str) -> Iterator[str]:
    falls, trends = (shallow(result, metric, draft) for metric in ("top1_fall", "top1_trend"))
    pairs = list(zip(each_row(falls), each_row(trends), strict=True))
    holds, deepest = sum(fall["low"] > 0 and trend["high"] < 0 for fall, trend in pairs), falls["depth"].max()
    where = "every shallow depth" if holds == len(pairs) else f"{holds} of {len(pairs)} shallow depths"
    rows = result.select(draft=draft, setting=TRAINED, reader=TRANSLATOR, metric="top1")
    after = rows[rows["depth"] == rows["depth"].max()]
    first, last = after.iloc[0], after.iloc[-1]
    gap = f"slot {first['slot']} − slot {last['slot']}"
    each = "; ".join(
        f"depth {fall['depth']}: {gap} = {points(fall)}, trend {number(trend, signed=True)}" for fall, trend in pairs
    )
    yield f"{draft}: with matched labels, readability falls with the slot at {where} (depths 1…{deepest}); {each}."
    yield (
        f"{draft}: after the last layer slot {first['slot']} is read at {percent(first)} and slot {last['slot']} at "
        f"{percent(last)}."
    )
    for control in CONTROLS:
        against = shallow(result, "top1_fall", draft, control)
        if len(against):
            yield f"{draft}, {control}: {gap} at depth {deepest} is {points(against.iloc[-1])}."
