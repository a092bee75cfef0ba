"""The outcome of the emergence experiment: one tidy table with bootstrap intervals, and what it says.

Every row is one (draft, condition, reader, depth, slot, metric) with its value, 95 % interval, labels and prompts.
Metrics per slot: `top1`, `recall16` (label among the 16 best), `mrr` (1 / place, from 1). Rows with slot 0 speak about
all slots: `top1_mean` over slots 2…T, `top1_fall` from slot 1 to slot T, `top1_trend`, the rank correlation of accuracy
with the slot. A condition or draft written "a − b" is a difference on the same labels. Values average over sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.results import TableResult
from dspine_probe.experiments.splits import Split
from dspine_probe.experiments.stats import draw_counts, estimate, ratio_samples
from dspine_probe.experiments.wording import percent, points

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

METRICS = ("top1", "recall16", "mrr")
MINUS = " − "
NAME = "emergence"


@dataclass(frozen=True)
class Measured:
    """Ranks of the test labels under one reader, before any statistics.

    rows: which labels this reader was asked about. first_depth: the depth of the first entry of `ranks`.
    """

    draft: str
    condition: str
    reader: str
    ranks: Int[Tensor, "depth label draft_slot"]
    sequence: Int[Tensor, "label"]
    rows: Bool[Tensor, "label"]
    first_depth: int
    vocabulary: int


@dataclass(frozen=True, eq=False)
class EmergenceResult(TableResult):
    """Table, configuration and provenance; `to_frame`, `grid`, `findings`, `save`, `load`, `figure`."""

    FILE: ClassVar[str] = NAME
    config: Mapping[str, Any]
    drafts: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Any]
    seconds: float

    def grid(
        self, draft: str, condition: str = "trained", reader: str = "translator", metric: str = "top1"
    ) -> pd.DataFrame:
        """Means of one metric with depths as rows and slots as columns; empty when it was not measured."""
        rows = self.select(draft=draft, condition=condition, reader=reader, metric=metric)
        return rows.pivot(index="depth", columns="slot", values="mean")

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        return [sentence for draft in self.drafts for sentence in _findings(self, draft)]

    def claims(self) -> list[Claim]:
        """The ledger's line on the claim P0."""
        from dspine_probe.experiments.emergence.claims import claims  # they read this result

        return claims(self)

    def figure(self) -> Figure:
        """Heatmaps of the trained readers, one panel a draft (`dspine_probe.plots.emergence`)."""
        from dspine_probe.plots.emergence import (
            heatmaps,
        )  # plots build on experiments, not the other way round

        return heatmaps(self).figure


def tabulate(measured: Iterable[Measured], split: Split, resamples: int, seed: int) -> pd.DataFrame:
    """Means and bootstrap intervals of all metrics, differences between conditions and drafts, and slot summaries.

    Whole groups are drawn, within their set; all rows share the same draws, so differences are paired.
    """
    boot = _Bootstrap(split, resamples, seed)
    rows: list[dict[str, Any]] = []
    kept: dict[tuple[str, str], _Sampled] = {}
    for item in measured:
        sampled = boot.sample(item)
        rows += sampled.rows()
        if item.reader == "translator":
            kept[item.draft, item.condition] = sampled
    for (draft, condition), sampled in kept.items():
        if condition != "trained":
            rows += kept[draft, "trained"].minus(sampled, "condition").rows()
    trained = [sampled for (_, condition), sampled in kept.items() if condition == "trained"]
    for later in range(1, len(trained)):
        rows += trained[later].minus(trained[0], "draft").rows()
    return pd.DataFrame(rows)


class _Bootstrap:
    """One set of draws over the test groups of every set."""

    def __init__(self, split: Split, resamples: int, seed: int) -> None:
        self.split = split
        tested = split.test(torch.arange(len(split.part)))
        self.groups = split.group[tested].unique()
        self.set_of = torch.stack([split.set[tested][split.group[tested] == g][0] for g in self.groups])
        self.counts = {
            int(s): draw_counts(
                int((self.set_of == s).sum()),
                generator=derive_generator(seed, "bootstrap", int(s)),
                resamples=resamples,
            )
            for s in self.set_of.unique()
        }

    def sample(self, item: Measured) -> _Sampled:
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
        return _Sampled(
            {"draft": item.draft, "condition": item.condition, "reader": item.reader},
            item.first_depth,
            torch.stack(once).nanmean(0),
            torch.stack(drawn).nanmean(0),
            int(item.rows.sum()),
            int((sizes > 0).sum()),
        )


@dataclass(frozen=True)
class _Sampled:
    """Value and resamples of the three metrics at every depth and slot."""

    keys: dict[str, str]
    first_depth: int
    value: Float[Tensor, "metric depth slot"]
    samples: Float[Tensor, "resample metric depth slot"]
    n: int
    prompts: int

    def minus(self, other: _Sampled, key: str) -> _Sampled:
        """The paired difference, labelled "a − b" in the column `key`."""
        keys = self.keys | {key: self.keys[key] + MINUS + other.keys[key]}
        return dataclasses.replace(
            self, keys=keys, value=self.value - other.value, samples=self.samples - other.samples
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Table rows for every slot, then for all slots together."""
        for metric, value, samples in zip(METRICS, self.value, self.samples.movedim(1, 0), strict=True):
            yield from self._rows(metric, value, samples, first_slot=1)
        top1, drawn = self.value[0], self.samples[:, 0]
        summaries = [("top1_mean", _mean), ("top1_fall", _fall)]
        if not any(MINUS in text for text in self.keys.values()):
            summaries.append(("top1_trend", _trend))
        for metric, summary in summaries:
            yield from self._rows(metric, summary(top1)[:, None], summary(drawn)[..., None], first_slot=0)

    def _rows(self, metric: str, value: Tensor, samples: Tensor, first_slot: int) -> Iterator[dict[str, Any]]:
        interval = estimate(value, samples)
        for depth in range(value.shape[0]):
            for slot in range(value.shape[1]):
                at = depth, slot
                yield self.keys | {
                    "depth": depth + self.first_depth,
                    "slot": slot + first_slot,
                    "metric": metric,
                    "mean": float(value[at]),
                    "low": float(interval.low[at]),
                    "high": float(interval.high[at]),
                    "n": self.n,
                    "prompts": self.prompts,
                }


def _metrics(item: Measured) -> Float[Tensor, "metric label depth slot"]:
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
    rows = result.select(draft=draft, condition="trained", reader="translator")
    last = int(rows["depth"].max())
    slots = int(rows["slot"].max())
    falls = rows[rows["metric"] == "top1_fall"].set_index("depth")
    trends = rows[rows["metric"] == "top1_trend"].set_index("depth")
    shallow = range(1, (last + 1) // 2 + 1)
    holds = [d for d in shallow if falls.loc[d, "low"] > 0 and trends.loc[d, "high"] < 0]
    verdict = (
        "at every shallow depth"
        if len(holds) == len(shallow)
        else f"at {len(holds)} of {len(shallow)} shallow depths"
    )
    yield (
        f"{draft}: with matched labels, readability falls with the slot {verdict} (depths 1…{shallow[-1]}); "
        + "; ".join(
            f"depth {d}: slot 1 − slot {slots} = {points(falls.loc[d])}, trend {_number(trends.loc[d])}"
            for d in shallow
        )
        + "."
    )
    slot_rows = rows[(rows["metric"] == "top1") & (rows["slot"] > 0)]
    first, final = (
        slot_rows[(slot_rows["depth"] == last) & (slot_rows["slot"] == s)].iloc[0] for s in (1, slots)
    )
    yield f"{draft}: after the last layer slot 1 is read at {percent(first)} and slot {slots} at {percent(final)}."
    for control in ("attention cut", "attention and injection cut", "untrained draft", "shuffled labels"):
        against = result.select(draft=draft, condition=control, reader="translator", metric="top1_fall")
        if len(against):
            least = against[against["depth"].isin(shallow)].iloc[-1]
            yield f"{draft}, {control}: slot 1 − slot {slots} at depth {shallow[-1]} is {points(least)}."


def _number(row: pd.Series) -> str:
    if pd.isna(row["mean"]):
        return "undefined (all slots equal)"
    return f"{row['mean']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"
