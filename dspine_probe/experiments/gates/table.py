"""From gates, correctness and clamped predictions to the rows of a `GatesResult`.

Slot 0 in a row means all slots, averaged unweighted; sets are averaged after slots. Intervals come from prompts drawn
within their set, the same draws for every row, so differences between conditions are paired. A correlation is
Pearson's, taken over the blocks of one slot in one set and then averaged: what differs between slots or sets does not
enter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.experiments.acceptance import AcceptanceResult
from dspine_probe.experiments.contrast import Draws, Scores
from dspine_probe.experiments.gates.clamps import ClampScores
from dspine_probe.experiments.gates.readings import GateReadings
from dspine_probe.experiments.gates.token_kinds import KINDS
from dspine_probe.experiments.stats import Estimate, estimate

UNTOUCHED, EVERY, ALL = "untouched", "every block", "all"
SHUT, OPEN = 0.1, 0.9
Rows = list[dict[str, Any]]
Means = Float[Tensor, "one_and_resample set draft_slot"]


def reading_rows(
    draft: str, found: GateReadings, kinds: Int[Tensor, "block draft_slot"], draws: Draws
) -> Rows:
    """Gates, writes and gains by layer and slot, and gates by kind of label token and by what became of the draft."""
    rows: Rows = []
    groups = {f"label: {kind}": kinds == index for index, kind in enumerate(KINDS)}
    groups |= {"kept": found.kept == 1, "refused": found.kept == 0}
    groups |= {"predecessor right": found.predecessor_right == 1}
    groups |= {"predecessor wrong": found.predecessor_right == 0}
    for layer, channels in enumerate(found.gates, start=1):
        gate, at = channels.mean(-1), {"draft": draft, "layer": str(layer)}
        rows += _by_slot(at | {"measure": "gate", "group": EVERY}, gate, draws)
        rows += _by_slot(at | {"measure": "written", "group": EVERY}, found.written[layer - 1], draws)
        rows += _by_slot(at | {"measure": "gain", "group": EVERY}, found.gain[layer - 1], draws)
        for measure, share in (("gate shut", channels < SHUT), ("gate open", channels > OPEN)):
            rows.append(_row(at | {"measure": measure, "group": EVERY}, share.float().mean(-1), draws))
        for group, members in groups.items():
            if members.any():
                rows.append(_row(at | {"measure": "gate", "group": group}, _only(gate, members), draws))
        for a, b in (("kept", "refused"), ("predecessor right", "predecessor wrong")):
            keys = at | {"measure": "gate", "group": f"{a} − {b}"}
            rows.append(_gap_row(keys, gate, groups[a], groups[b], draws))
    every = {"draft": draft, "layer": ALL, "measure": "gain", "group": EVERY}
    return [*rows, *_by_slot(every, found.gain[-1], draws)]


def correlation_rows(draft: str, found: GateReadings, draws: Draws) -> Rows:
    """Gate against predecessor correctness and against the gain of the injection, by layer and slot."""
    rows: Rows = []
    for layer, channels in enumerate(found.gates, start=1):
        gate = channels.mean(-1)
        against = {
            "predecessor right": found.predecessor_right,
            "gain": found.gain[layer - 1],
            "gain at all layers": found.gain[-1],
        }
        for group, other in against.items():
            keys = {"draft": draft, "layer": str(layer), "measure": "correlation with gate", "group": group}
            rows += _by_slot(keys, _both(gate, other), draws, correlation(gate, other, draws))
    return rows


def clamp_rows(draft: str, clamped: Mapping[tuple[str, str], ClampScores], draws: Draws) -> Rows:
    """Accuracy and log-probability under every clamp, and their difference from the untouched draft."""
    rows: Rows = []
    untouched = clamped[UNTOUCHED, UNTOUCHED]
    for (place, value), scores in clamped.items():
        at = {"draft": draft, "layer": ALL if place == UNTOUCHED else place, "group": value}
        for measure, field in (("top1", "right"), ("top1 walked", "right_walked"), ("log prob", "log_prob")):
            here = getattr(scores, field)
            rows += _by_slot(at | {"measure": measure}, here, draws)
            if place != UNTOUCHED:
                change = here - getattr(untouched, field)
                rows += _by_slot(at | {"measure": f"{measure} change"}, change, draws)
    return rows


def walk_rows(draft: str, walked: AcceptanceResult) -> Rows:
    """Acceptance length under every clamp, and over that of the untouched draft on the same answers."""
    rows: Rows = []
    prompts = len(walked.requests) // len(walked.drafts)
    for condition in walked.drafts:
        place, _, value = condition.partition(": ")
        at = {"draft": draft, "layer": place if value else ALL, "slot": 0, "group": value or UNTOUCHED}
        size = {"n": sum(r.rounds for r in walked.requests if r.draft == condition), "prompts": prompts}
        rows.append({**at, "measure": "al", **_cells(walked.acceptance_length(condition)), **size})
        if value:
            ratio = walked.paired_ratio(condition, UNTOUCHED)
            rows.append({**at, "measure": "al ratio", **_cells(ratio), **size})
    return rows


def correlation(x: Scores, y: Scores, draws: Draws) -> Means:
    """Pearson's correlation in every set and slot, as measured and in every resample; NaN where one never varies."""
    both = _both(x, y)
    x, y = torch.where(both.isnan(), both, x).double(), torch.where(both.isnan(), both, y).double()
    # Centred first: variances are then no small differences of large numbers.
    x, y = x - x.nanmean(), y - y.nanmean()
    mean_x, mean_y, xx, yy, xy = (draws.means(part) for part in (x, y, x * x, y * y, x * y))
    spread = ((xx - mean_x**2).clamp(min=0) * (yy - mean_y**2).clamp(min=0)).sqrt()
    return torch.where(spread > 1e-12, (xy - mean_x * mean_y) / spread, torch.nan)


def _by_slot(
    keys: Mapping[str, Any],
    scores: Scores,
    draws: Draws,
    means: Means | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows of every measured slot, after one for all; `means` default to those of `scores`."""
    means = draws.means(scores) if means is None else means
    yield {**keys, "slot": 0, **_cells(_over_slots(means)), **_size(scores, draws)}
    found = estimate(means[0].nanmean(0), means[1:].nanmean(1))
    for slot in range(scores.shape[1]):
        if not scores[:, slot].isnan().all():
            size = _size(scores[:, slot : slot + 1], draws)
            yield {**keys, "slot": slot + 1, **_cells(found, slot), **size}


def _row(keys: Mapping[str, Any], scores: Scores, draws: Draws) -> dict[str, Any]:
    return {**keys, "slot": 0, **_cells(_over_slots(draws.means(scores))), **_size(scores, draws)}


def _gap_row(
    keys: Mapping[str, Any],
    scores: Scores,
    a: Bool[Tensor, "block draft_slot"],
    b: Bool[Tensor, "block draft_slot"],
    draws: Draws,
) -> dict[str, Any]:
    """Mean where `a` minus mean where `b`, within every slot and set that has both."""
    gap = draws.means(_only(scores, a)) - draws.means(_only(scores, b))
    return {**keys, "slot": 0, **_cells(_over_slots(gap)), **_size(_only(scores, a | b), draws)}


def _over_slots(means: Means) -> Estimate:
    values = means.nanmean(-1).nanmean(-1)
    return estimate(values[0], values[1:])


def _only(scores: Scores, members: Bool[Tensor, "block draft_slot"]) -> Scores:
    return torch.where(members, scores, torch.nan)


def _both(x: Scores, y: Scores) -> Scores:
    """NaN where either is."""
    return x + y


def _cells(found: Estimate, at: int | None = None) -> dict[str, float]:
    parts = {"mean": found.value, "low": found.low, "high": found.high}
    return {name: float(part if at is None else part[at]) for name, part in parts.items()}


def _size(scores: Scores, draws: Draws) -> dict[str, int]:
    measured = ~scores.isnan()
    return {"n": int(measured.sum()), "prompts": len(draws.prompt[measured.any(1)].unique())}
