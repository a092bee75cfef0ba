"""From the rows that probes got right, repeat by repeat, to the table of a `ProbingResult`.

Each repeat tests other prompts. A row's score is its mean over the repeats that tested it; prompts are then resampled
as everywhere (`contrast.py`), and differences between conditions are taken row by row within a repeat. `seed_sd` is the
standard deviation of the value over repeats, which the interval over prompts does not contain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.experiments.contrast import Draws, Scores
from dspine_probe.experiments.probing.linear_probe import Probe
from dspine_probe.experiments.stats import estimate

ACCURACY, UNSEEN, BITS, COMPRESSION = (
    "accuracy",
    "accuracy, unseen anchor types",
    "bits a label",
    "compression",
)
MINUS = " − "
TRAINED, CONTROL, UNTRAINED = "trained", "control task", "untrained draft"
SLOT_ALONE, COMMONEST = "slot index alone", "commonest class"
CONTROLS = (CONTROL, UNTRAINED, SLOT_ALONE, COMMONEST)


class Key(NamedTuple):
    """What was probed for, under which condition, and where; no depth for what reads no state."""

    target: str
    condition: str
    depth: int | None


@dataclass
class Measurements:
    """What a study collects: one entry a repeat in every list."""

    right: dict[Key, list[Scores]] = field(default_factory=lambda: defaultdict(list))
    right_unseen: dict[Key, list[Scores]] = field(default_factory=lambda: defaultdict(list))
    bits: dict[Key, list[Scores]] = field(default_factory=lambda: defaultdict(list))
    uniform: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    coverage: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fits: list[dict[str, Any]] = field(default_factory=list)
    failed_codes: int = 0

    def note(self, key: Key, repeat: int, probe: Probe, width: int) -> None:
        """Put a fit on record."""
        self.fits.append(
            {
                **key._asdict(),
                "repeat": repeat,
                "penalty": probe.penalty,
                "failed": probe.failed,
                "rows": probe.rows,
                "rows_per_feature": probe.rows / width,
                "train_accuracy": probe.train_accuracy,
                "validation_accuracy": probe.validation_accuracy,
            }
        )

    def usual_penalty(self, key: Key) -> float:
        """The penalty chosen most often so far at this key."""
        chosen = [
            fit["penalty"] for fit in self.fits if Key(fit["target"], fit["condition"], fit["depth"]) == key
        ]
        return Counter(chosen).most_common(1)[0][0]

    def mean_coverage(self) -> dict[str, float]:
        """By target, the share of rows that were asked."""
        return {target: sum(shares) / len(shares) for target, shares in self.coverage.items()}


def tabulate(draft: str, found: Measurements, draws: Draws) -> pd.DataFrame:
    """One row for every target, condition, depth, slot (0: all) and measure."""
    rows: list[dict[str, Any]] = []
    for measure, scores in ((ACCURACY, found.right), (UNSEEN, found.right_unseen)):
        for key, repeats in scores.items():
            rows += _rows(draft, key, measure, repeats, draws)
        for key, changes in _contrasts(scores):
            rows += _rows(draft, key, measure, changes, draws)
    for key, repeats in found.bits.items():
        rows += _rows(draft, key, BITS, repeats, draws)
        uniform = sum(found.uniform[key.target]) / len(found.uniform[key.target])
        rows += _rows(draft, key, COMPRESSION, repeats, draws, uniform=uniform)
    return pd.DataFrame(rows).astype({"depth": "Int64"})


def _contrasts(scores: Mapping[Key, list[Scores]]) -> Iterator[tuple[Key, list[Scores]]]:
    """Every trained probe minus each of its controls, repeat by repeat."""
    for key, repeats in scores.items():
        if key.condition != TRAINED:
            continue
        for control in CONTROLS:
            for depth in (key.depth, None):
                against = scores.get(Key(key.target, control, depth))
                if against is not None:
                    changes = [a - b for a, b in zip(repeats, against, strict=True)]
                    yield key._replace(condition=f"{TRAINED}{MINUS}{control}"), changes


def _rows(
    draft: str,
    key: Key,
    measure: str,
    repeats: Sequence[Scores],
    draws: Draws,
    *,
    uniform: float | None = None,
) -> Iterator[dict[str, Any]]:
    """The mean of all slots as slot 0, then every slot; with `uniform`, that over the mean (compression)."""
    scores = torch.stack(list(repeats)).nanmean(0)
    means, once = draws.means(scores), replace(draws, weights=draws.weights[:1])
    each = torch.stack([once.means(one)[0] for one in repeats])
    for slot in range(scores.shape[1] + 1):
        part = slice(None) if slot == 0 else slice(slot - 1, slot)
        if scores[:, part].isnan().all():
            continue
        values, spread = _reduce(means[..., part], uniform), _reduce(each[..., part], uniform)
        found, measured = estimate(values[0], values[1:]), ~scores[:, part].isnan()
        yield {
            "draft": draft, **key._asdict(), "slot": slot, "measure": measure,
            "mean": float(found.value), "low": float(found.low), "high": float(found.high),
            "seed_sd": float(spread[~spread.isnan()].std()), "n": int(measured.sum()),
            "prompts": len(draws.prompt[measured.any(1)].unique()),
        }  # fmt: skip


def _reduce(means: Float[Tensor, "draw set slot"], uniform: float | None) -> Float[Tensor, "draw"]:
    values = means.nanmean(-1).nanmean(-1)
    return values if uniform is None else uniform / values
