"""What the bench measured: tokens and seconds of every batch, costs of every pass, and what follows from them.

Speedup compares tokens per second with those of plain decoding on the same prompts; it is predicted as
AL · t_step / (t_verify + t_trunk + t_head) from the passes alone. Intervals are bootstraps over batches, which with one
row are prompts; fewer than `FEW` batches give none. Times are those of whole batches, until the last row is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from dspine_probe.decoding.clock import Timing
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.bench.costs import PassCosts
from dspine_probe.experiments.claim import Claim
from dspine_probe.experiments.results import load_result, save_result
from dspine_probe.experiments.stats import RESAMPLES, Estimate, draw_counts, estimate, ratio_samples
from dspine_probe.sampling import Sampling

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PLAIN, NAME, ALL = "plain", "bench", "all"
PARTS = ("draft", "head", "verify", "bookkeeping")
FEW = 3


@dataclass(frozen=True)
class BatchRun:
    """One batch decoded in one way.

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


@dataclass(frozen=True)
class BenchResult:
    """Runs, costs, and how they were made."""

    runs: tuple[BatchRun, ...]
    costs: tuple[PassCosts, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    resamples: int = RESAMPLES

    @property
    def modes(self) -> tuple[str, ...]:
        """Plain decoding first, then the drafts."""
        return tuple(dict.fromkeys(run.draft for run in self.runs))

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """In the order measured."""
        return tuple(dict.fromkeys(run.sampling for run in self.runs))

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of prompts decoded at once."""
        return tuple(dict.fromkeys(run.rows for run in self.runs))

    @property
    def same_tokens(self) -> bool:
        """Whether every greedy answer equals that of plain decoding."""
        return all(run.same_as_plain is not False for run in self.runs)

    def acceptance_length(self, draft: str, sampling: Sampling, rows: int, set: str = ALL) -> Estimate:
        """Tokens over rounds of all rows; 1 for plain decoding."""
        mine = self._cell(draft, sampling, rows, set)
        return self._ratio([sum(run.tokens) for run in mine], [sum(run.rounds) for run in mine])

    def tokens_per_second(self, draft: str, sampling: Sampling, rows: int, set: str = ALL) -> Estimate:
        """Tokens of all rows over seconds after the prefill."""
        mine = self._cell(draft, sampling, rows, set)
        return self._ratio([sum(run.tokens) for run in mine], [run.timing.decoding for run in mine])

    def speedup(self, draft: str, sampling: Sampling, rows: int, set: str = ALL) -> Estimate:
        """Tokens per second over those of plain decoding, under the same draws of batches."""
        mine, base = (self._cell(name, sampling, rows, set) for name in (draft, PLAIN))
        (value, samples), (plain, plain_samples) = (
            self._samples([sum(run.tokens) for run in cell], [run.timing.decoding for run in cell])
            for cell in (mine, base)
        )
        return _interval(value / plain, samples / plain_samples, len(mine))

    def predicted(self, draft: str, sampling: Sampling, rows: int) -> float:
        """Speedup that the acceptance length promises at the costs of the passes; NaN where they were not timed."""
        length = float(self.acceptance_length(draft, sampling, rows).value)
        found = [c for c in self.costs if (c.draft, c.sampling, c.rows) == (draft, sampling, rows)]
        return found[0].speedup(length) if found else float("nan")

    def seconds_per_token(self, draft: str, sampling: Sampling, rows: int) -> dict[str, float]:
        """Seconds of each part of decoding, per committed token."""
        mine = self._cell(draft, sampling, rows, ALL)
        tokens = sum(sum(run.tokens) for run in mine)
        return {part: sum(getattr(run.timing, part) for run in mine) / tokens for part in PARTS}

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for every way, sampling and number of rows, and with one row also for every set."""
        cells = dict.fromkeys((run.sampling, run.rows, run.draft) for run in self.runs)
        lines = []
        for sampling, rows, draft in cells:
            lines.append(self._line(draft, sampling, rows, ALL))
            if rows == 1:
                sets = dict.fromkeys(run.sets[0] for run in self._cell(draft, sampling, rows, ALL))
                lines += [self._line(draft, sampling, rows, name) for name in sets]
        return pd.DataFrame(lines)

    def to_frame(self) -> pd.DataFrame:
        """A copy of the table."""
        return self.table.copy()

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        from dspine_probe.experiments.bench.findings import findings  # they read this result

        return list(findings(self))

    def claims(self) -> list[Claim]:
        """The ledger's line on what the injection costs, if a DFlash and a DSpine were measured."""
        from dspine_probe.experiments.bench.findings import claims  # they read this result

        return list(claims(self))

    def save(self, folder: str | Path) -> None:
        """Write `bench.csv` (the table) and `bench.json` (every run and pass, configuration, versions)."""
        record = {name: getattr(self, name) for name in ("runs", "costs", "config", "seed", "resamples")}
        save_result(folder, NAME, self.table, record)

    @classmethod
    def load(cls, folder: str | Path) -> BenchResult:
        """Read back a saved result.

        Raises:
            UsageError: there is none in the folder.
            ProbeError: it cannot be read.
        """
        _, record = load_result(folder, NAME)
        try:
            runs = tuple(_read_run(raw) for raw in record["runs"])
            costs = tuple(
                PassCosts(**{**raw, "sampling": Sampling(**raw["sampling"])}) for raw in record["costs"]
            )
            return cls(runs, costs, record["config"], record["seed"], record["resamples"])
        except (KeyError, TypeError) as error:
            raise ProbeError(f"{NAME}.json in {folder} lacks {error}; measure again") from error

    def figure(self) -> Figure:
        """Time per token by part (`dspine_probe.plots.speed`)."""
        from dspine_probe.plots.speed import time_per_token  # plots build on experiments

        return time_per_token(self).figure

    def _cell(self, draft: str, sampling: Sampling, rows: int, set: str) -> list[BatchRun]:
        found = [
            run
            for run in self.runs
            if (run.draft, run.sampling, run.rows) == (draft, sampling, rows)
            and (set == ALL or run.sets == (set,))
        ]
        if not found:
            raise UsageError(
                f"{draft!r} was not measured with {sampling.label}, {rows} rows and set {set!r}; there are "
                f"{', '.join(self.modes)} with {', '.join(map(str, self.rows))} rows"
            )
        return found

    def _ratio(self, top: list[float], bottom: list[float]) -> Estimate:
        return _interval(*self._samples(top, bottom), len(top))

    def _samples(self, top: list[float], bottom: list[float]) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        counts = draw_counts(len(top), generator=generator, resamples=self.resamples)
        numerator, denominator = torch.tensor(top).double(), torch.tensor(bottom).double()
        return numerator.sum() / denominator.sum(), ratio_samples(numerator, denominator, counts)

    def _line(self, draft: str, sampling: Sampling, rows: int, set: str) -> dict[str, Any]:
        mine = self._cell(draft, sampling, rows, set)
        line: dict[str, Any] = {"draft": draft, "sampling": sampling.label, "rows": rows, "set": set}
        line |= {"batches": len(mine), "tokens": sum(sum(run.tokens) for run in mine)}
        for name in ("acceptance_length", "tokens_per_second", "speedup"):
            found = getattr(self, name)(draft, sampling, rows, set)
            line |= {
                name: float(found.value),
                f"{name}_low": float(found.low),
                f"{name}_high": float(found.high),
            }
        line["rounds_per_second"] = sum(max(run.rounds) for run in mine) / sum(
            r.timing.decoding for r in mine
        )
        if set == ALL:
            predicted = 1.0 if draft == PLAIN else self.predicted(draft, sampling, rows)
            line |= {"predicted_speedup": predicted, "measured_over_predicted": line["speedup"] / predicted}
            parts = self.seconds_per_token(draft, sampling, rows)
            line |= {f"{part}_ms_per_token": 1000 * seconds for part, seconds in parts.items()}
            line |= {f"{part}_share": seconds / sum(parts.values()) for part, seconds in parts.items()}
        return line | {"same_tokens": None if not sampling.greedy else all(run.same_as_plain for run in mine)}


def spoken(config: Mapping[str, Any]) -> str:
    """The engines of a recorded configuration in words."""
    about = config.get("engines") or {"compute": "unknown"}
    return ", ".join(value for value in about.values() if isinstance(value, str))


def _interval(value: Tensor, samples: Tensor, batches: int) -> Estimate:
    if batches < FEW:
        unknown = torch.full_like(value, float("nan"))
        return Estimate(value, unknown, unknown)
    return estimate(value, samples)


def _read_run(raw: Mapping[str, Any]) -> BatchRun:
    lists = {name: tuple(raw[name]) for name in ("sets", "ids", "tokens", "rounds")}
    parsed = {"sampling": Sampling(**raw["sampling"]), "timing": Timing(**raw["timing"])}
    return BatchRun(**{**raw, **lists, **parsed})
