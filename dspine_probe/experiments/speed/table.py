"""From timed batches and passes to the table of speeds.

A row is one (draft, sampling, rows at once, metric) on all prompts (set "all") or, with one row at once, on one set;
`n` counts batches. Metrics: `acceptance_length` (tokens a round; 1 for plain decoding), `tokens_per_second` after the
prefill, `speedup` over plain decoding under the same draws of batches, `rounds_per_second`, `same_tokens` (share of
batches whose greedy answers are those of plain decoding). On all prompts also: seconds by part per committed token
(`draft_ms_per_token`, …) and as shares of the time (`draft_share`, …); the passes timed apart (`step_ms`, `verify_ms`,
`trunk_ms`, `head_ms`); `predicted_speedup`, AL · step / (verify + trunk + head), and `measured_over_predicted`.
Intervals are bootstraps over batches, which with one row are prompts; fewer than `FEW` batches give none. Times are
those of whole batches, until the last row is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.decoding.clock import Timing
from dspine_probe.experiments.common.intervals import RESAMPLES, Estimate, estimate, ratio_samples, set_weights
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.speed.costs import PassCosts
from dspine_probe.sampling import Sampling

FACTORS = ("sampling", "rows")
PLAIN, ALL = "plain", "all"
PARTS = ("draft", "head", "verify", "bookkeeping")
FEW = 3


@dataclass(frozen=True)
class BatchRun:
    """One batch decoded with one draft, or plainly.

    sets, ids, tokens, rounds: of each row; tokens are those after the first.
    timing: until the last row was done.
    same_as_plain: whether greedy answers are those of plain decoding; None when sampled.
    """

    draft: str
    sampling: Sampling
    sets: tuple[str, ...]
    ids: tuple[str, ...]
    tokens: tuple[int, ...]
    rounds: tuple[int, ...]
    timing: Timing
    same_as_plain: bool | None

    @property
    def rows(self) -> int:
        """Prompts decoded at once."""
        return len(self.ids)


def tabulate(
    runs: Sequence[BatchRun], costs: Sequence[PassCosts], *, seed: int = 0, resamples: int = RESAMPLES
) -> pd.DataFrame:
    """The table of all batches and passes."""
    rows = RowBuilder(FACTORS)
    passes = {(cost.draft, cost.sampling, cost.rows): cost for cost in costs}
    cells = dict.fromkeys((run.sampling, run.rows, run.draft) for run in runs)
    for sampling, count, draft in cells:
        mine, base = (
            [run for run in runs if (run.sampling, run.rows, run.draft) == (sampling, count, name)]
            for name in (draft, PLAIN)
        )
        for name in (ALL, *(dict.fromkeys(run.sets[0] for run in mine) if count == 1 else ())):
            part = [run for run in mine if name in (ALL, run.sets[0])]
            found = _measured(part, [run for run in base if name in (ALL, run.sets[0])], seed, resamples)
            if name == ALL:
                found |= _parts(part)
                cost = passes.get((draft, sampling, count))
                if cost is not None:
                    found |= _predicted(cost, found)
            for metric, value in found.items():
                rows.add(value, draft=draft, metric=metric, set=name, n=len(part), sampling=sampling.label, rows=count)
    return rows.table()


def _measured(
    mine: Sequence[BatchRun], plain: Sequence[BatchRun], seed: int, resamples: int
) -> dict[str, Estimate | float]:
    weights = set_weights([ALL] * len(mine), seed=seed, resamples=resamples)

    def ratio(top: Sequence[float], bottom: Sequence[float]) -> Float[Tensor, "one_and_resample"]:
        return ratio_samples(torch.tensor(top).double(), torch.tensor(bottom).double(), weights)

    tokens, seconds = ([sum(run.tokens) for run in mine], [run.timing.decoding for run in mine])
    rate = ratio(tokens, seconds)
    plain_rate = ratio([sum(run.tokens) for run in plain], [run.timing.decoding for run in plain])
    samples = {
        "acceptance_length": ratio(tokens, [sum(run.rounds) for run in mine]),
        "tokens_per_second": rate,
        "speedup": rate / plain_rate,
    }
    found: dict[str, Estimate | float] = {
        name: estimate(values[0], values[1:]) if len(mine) >= FEW else float(values[0])
        for name, values in samples.items()
    }
    found["rounds_per_second"] = sum(max(run.rounds) for run in mine) / sum(seconds)
    if mine[0].sampling.greedy:
        found["same_tokens"] = sum(bool(run.same_as_plain) for run in mine) / len(mine)
    return found


def _parts(mine: Sequence[BatchRun]) -> dict[str, Estimate | float]:
    tokens = sum(sum(run.tokens) for run in mine)
    seconds = {part: sum(getattr(run.timing, part) for run in mine) for part in PARTS}
    found: dict[str, Estimate | float] = {
        f"{part}_ms_per_token": 1000 * spent / tokens for part, spent in seconds.items()
    }
    return found | {f"{part}_share": spent / sum(seconds.values()) for part, spent in seconds.items()}


def _predicted(cost: PassCosts, found: dict[str, Estimate | float]) -> dict[str, Estimate | float]:
    length, speedup = (_value(found[metric]) for metric in ("acceptance_length", "speedup"))
    passes = {f"{name}_ms": 1000 * getattr(cost, name) for name in ("step", "verify", "trunk", "head")}
    predicted = cost.speedup(length)
    return passes | {"predicted_speedup": predicted, "measured_over_predicted": speedup / predicted}


def _value(one: Estimate | float) -> float:
    return float(one.value) if isinstance(one, Estimate) else one
