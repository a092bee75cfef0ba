"""From gates, correctness and clamped predictions to the table of the gates experiment, and what it says.

Factors: `place` ("1"…"L", which is the depth too, "last write" or "all") and `group` (the blocks that a mean is over,
or what gates are held at). Metrics: `gate` (mean over channels), `gate shut` and `gate open` (share of channels below
0.1, above 0.9), `written` (length of the write over the stream's), `gain` (nats), `correlation with gate`; under a
clamp `top1`, `top1 walked`, `log prob`, each also as a `… change` from the untouched draft, `al` and `al ratio`.

Slots are averaged unweighted, sets after slots. A correlation is Pearson's, taken over the blocks of one slot in one
set and then averaged: what differs between slots or sets does not enter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.experiments.acceptance import AcceptanceCounts
from dspine_probe.experiments.common.intervals import Draws, Estimate, Scores, estimate
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.schema import Result
from dspine_probe.experiments.common.wording import number, points
from dspine_probe.experiments.gates.clamps import ALL, UNTOUCHED, Clamp
from dspine_probe.experiments.gates.readings import GateReadings, Outcome
from dspine_probe.experiments.gates.token_kinds import KINDS

EVERY = "every block"
SHUT, OPEN = 0.1, 0.9
HELD = {"0": "held shut", "1": "held open", "mean": "held at their mean", "drawn": "of other blocks"}
"""What gates are held at, in words."""
Means = Float[Tensor, "one_and_resample set draft_slot"]


@dataclass(frozen=True, eq=False)
class GatesResult(Result):
    """Table, configuration and provenance; `data["skipped"]` says which usual checks were left out, and why."""

    NAME: ClassVar[str] = "gates"
    FACTORS: ClassVar[tuple[str, ...]] = ("place", "group")

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        return [sentence for draft in self.drafts for sentence in self._of_draft(draft)]

    def _of_draft(self, draft: str) -> Iterator[str]:
        def by_layer(metric: str, group: str, signed: bool = True) -> str:
            rows = self.select(draft=draft, metric=metric, group=group, slot="")
            rows = rows[rows["depth"].notna()]
            said = (f"layer {row['place']} {number(row, 3, signed=signed)}" for _, row in rows.iterrows())
            return "; ".join(said)

        yield f"{draft}: mean gate: {by_layer('gate', EVERY, signed=False)}."
        yield (
            f"{draft}: gate where the predecessor is right − where it is wrong: "
            f"{by_layer('gate', 'predecessor right − predecessor wrong')}; correlation: "
            f"{by_layer('correlation with gate', 'predecessor right')}."
        )
        yield f"{draft}: gate of kept − of refused tokens: {by_layer('gate', 'kept − refused')}."
        whole = self.select(draft=draft, metric="gain", place=ALL, slot="").iloc[0]
        follows = by_layer("correlation with gate", "gain")
        yield (
            f"{draft}: gain of a slot's own injection, nats: {by_layer('gain', EVERY)}; all layers "
            f"{number(whole, 3, signed=True)}; correlation of gate and gain: {follows}."
        )
        change = self.select(draft=draft, metric="top1 walked change", place=ALL, slot="")
        for _, row in change.iterrows():
            text = f"{draft}: all gates {HELD[row['group']]}: top-1 of the greedy walk {points(row)}"
            for _, al in self.select(draft=draft, metric="al ratio", place=ALL, group=row["group"]).iterrows():
                text += f", acceptance length × {number(al, 3)}"
            yield text + "."


class GatesTable:
    """Collects the rows of all drafts; `rows.table()` gives the table."""

    def __init__(self, draws: Draws) -> None:
        self.draws, self.rows = draws, RowBuilder(GatesResult.FACTORS)

    def add_readings(self, draft: str, found: GateReadings, kinds: Int[Tensor, "block draft_slot"]) -> None:
        """Gates, writes and gains by layer and slot, and gates by kind of label and by what became of the draft."""
        groups = {f"label: {kind}": kinds == index for index, kind in enumerate(KINDS)}
        before = found.predecessor_right
        groups |= {"kept": found.kept == 1, "refused": found.kept == 0}
        groups |= {"predecessor right": before == 1, "predecessor wrong": before == 0}
        for index, channels in enumerate(found.gates):
            gate, place = channels.mean(-1), str(index + 1)
            for metric, scores in (("gate", gate), ("written", found.written[index]), ("gain", found.gain[index])):
                self._add_slots(draft, metric, place, EVERY, scores)
            for metric, share in (("gate shut", channels < SHUT), ("gate open", channels > OPEN)):
                self._add(draft, metric, place, EVERY, share.float().mean(-1))
            for group, members in groups.items():
                if members.any():
                    self._add(draft, "gate", place, group, torch.where(members, gate, torch.nan))
            for a, b in (("kept", "refused"), ("predecessor right", "predecessor wrong")):
                here, there = (torch.where(groups[group], gate, torch.nan) for group in (a, b))
                both = torch.where(groups[a] | groups[b], gate, torch.nan)
                gap = self.draws.means(here) - self.draws.means(there)
                self._add(draft, "gate", place, f"{a} − {b}", both, gap)
        self._add_slots(draft, "gain", ALL, EVERY, found.gain[-1])

    def add_correlations(self, draft: str, found: GateReadings) -> None:
        """Gate against predecessor correctness and against the gain of the injection, by layer and slot."""
        for index, gate in enumerate(found.gates.mean(-1)):
            against = {"predecessor right": found.predecessor_right, "gain": found.gain[index]}
            for group, other in (against | {"gain at all layers": found.gain[-1]}).items():
                means = correlation(gate, other, self.draws)
                self._add_slots(draft, "correlation with gate", str(index + 1), group, gate + other, means)

    def add_clamps(self, draft: str, held: Sequence[Clamp], found: Sequence[Outcome]) -> None:
        """Accuracy and log-probability under every clamp, and their difference from the untouched draft, the first."""
        for clamp, scores in zip(held, found, strict=True):
            for metric, field in (("top1", "right"), ("top1 walked", "right_walked"), ("log prob", "log_prob")):
                here = getattr(scores, field)
                self._add_slots(draft, metric, clamp.place, clamp.value, here)
                if clamp.value != UNTOUCHED:
                    change = here - getattr(found[0], field)
                    self._add_slots(draft, f"{metric} change", clamp.place, clamp.value, change)

    def add_rounds(self, draft: str, held: Sequence[Clamp], walked: AcceptanceCounts) -> None:
        """Acceptance length under every clamp, and over that of the untouched draft on the same answers."""
        for name, clamp in zip(walked.drafts, held, strict=True):
            rounds = sum(r.rounds for r in walked.requests if r.draft == name)
            self._row(draft, "al", clamp.place, clamp.value, walked.acceptance_length(name), rounds)
            if clamp.value != UNTOUCHED:
                ratio = walked.paired_ratio(name, walked.drafts[0])
                self._row(draft, "al ratio", clamp.place, clamp.value, ratio, rounds)

    def _add_slots(
        self, draft: str, metric: str, place: str, group: str, scores: Scores, means: Means | None = None
    ) -> None:
        """A row for all slots, then one for every measured slot; `means` default to those of `scores`."""
        means = self.draws.means(scores) if means is None else means
        self._add(draft, metric, place, group, scores, means)
        values = means.nanmean(1)
        for slot in range(scores.shape[1]):
            if n := int((~scores[:, slot].isnan()).sum()):
                found = estimate(values[0, slot], values[1:, slot])
                self._row(draft, metric, place, group, found, n, str(slot + 1))

    def _add(self, draft: str, metric: str, place: str, group: str, scores: Scores, means: Means | None = None) -> None:
        means = self.draws.means(scores) if means is None else means
        values = means.nanmean(-1).nanmean(-1)
        self._row(draft, metric, place, group, estimate(values[0], values[1:]), int((~scores.isnan()).sum()))

    def _row(self, draft: str, metric: str, place: str, group: str, found: Estimate, n: int, slot: str = "") -> None:
        depth = int(place) if place.isdigit() else None
        self.rows.add(found, draft=draft, metric=metric, depth=depth, slot=slot, n=n, place=place, group=group)


def correlation(x: Scores, y: Scores, draws: Draws) -> Means:
    """Pearson's correlation in every set and slot, as measured and in every resample; NaN where one never varies."""
    missing = (x + y).isnan()
    x, y = (torch.where(missing, torch.nan, part).double() for part in (x, y))
    # Centred first: variances are then no small differences of large numbers.
    x, y = x - x.nanmean(), y - y.nanmean()
    mean_x, mean_y, xx, yy, xy = (draws.means(part) for part in (x, y, x * x, y * y, x * y))
    spread = ((xx - mean_x**2).clamp(min=0) * (yy - mean_y**2).clamp(min=0)).sqrt()
    return torch.where(spread > 1e-12, (xy - mean_x * mean_y) / spread, torch.nan)
