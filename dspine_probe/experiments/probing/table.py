"""From the rows that probes got right, repeat by repeat, to the probing result.

Each repeat tests other prompts. A row's score is its mean over the repeats that tested it; prompts are then resampled
as everywhere, and differences between probes are taken row by row within a repeat. Metrics: `accuracy`, `accuracy,
unseen anchor types`, `bits a label` and `compression` (uniform bits over bits), each also as `..., sd over splits`:
the standard deviation over repeats, which the interval over prompts does not contain. A probe "trained − control task"
is selectivity; other differences are against an untrained draft, the slot index alone and the commonest class. n counts
slots; no slot means all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.experiments.common.intervals import Draws, Scores, estimate
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.schema import MINUS, Result
from dspine_probe.experiments.common.wording import points

ACCURACY, UNSEEN, BITS, COMPRESSION = ("accuracy", "accuracy, unseen anchor types", "bits a label", "compression")
SPREAD = ", sd over splits"
TRAINED, CONTROL, UNTRAINED = "trained", "control task", "untrained draft"
SLOT_ALONE, COMMONEST = "slot index alone", "commonest class"
CONTROLS = (CONTROL, UNTRAINED, SLOT_ALONE, COMMONEST)


@dataclass(frozen=True, eq=False)
class ProbingResult(Result):
    """Accuracy and description length by question, probe, depth and slot.

    fits: every fit used, with its penalty, penalties at which it did not converge, rows, training and validation
        accuracy. failed_codes: fits of the description lengths that did not converge.
    coverage: by draft and question, the share of rows that were asked, over repeats.
    skipped: usual checks that were left out, and why.
    """

    NAME, FACTORS = "probing", ("question", "probe")
    fits: Sequence[Mapping[str, Any]]
    failed_codes: int
    coverage: Mapping[str, Mapping[str, float]]
    skipped: Mapping[str, str]

    def findings(self) -> list[str]:
        """What the table says, in sentences computed from it."""
        penalties = self.config["probe"]["penalties"]
        failed = sum(fit["failed"] for fit in self.fits)
        edge = sum(fit["penalty"] in (min(penalties), max(penalties)) for fit in self.fits)
        convergence = (
            f"{failed} of {len(penalties) * len(self.fits)} fits did not converge and were not used; "
            f"{self.failed_codes} fits of description lengths did not; {edge} of {len(self.fits)} probes "
            "chose a penalty at an end of the range."
        )
        return [*(line for draft in self.drafts for line in _findings(self, draft)), convergence]


class Key(NamedTuple):
    """What was asked, of which probe, and at which depth; no depth for a probe that reads no state."""

    question: str
    probe: str
    depth: int | None


@dataclass
class Measurements:
    """What a study collects: one entry a repeat in every list."""

    scores: dict[str, dict[Key, list[Scores]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    uniform: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    coverage: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fits: list[dict[str, Any]] = field(default_factory=list)
    failed_codes: int = 0

    def usual_penalty(self, key: Key) -> float:
        """The penalty chosen most often so far at this key."""
        chosen = [fit["penalty"] for fit in self.fits if Key(fit["question"], fit["probe"], fit["depth"]) == key]
        return Counter(chosen).most_common(1)[0][0]


def add_rows(rows: RowBuilder, draft: str, found: Measurements, draws: Draws) -> None:
    """Rows of every question, probe, depth and metric of a draft, for all slots and for each."""
    for metric in (ACCURACY, UNSEEN):
        for key, repeats in [*found.scores[metric].items(), *_contrasts(found.scores[metric])]:
            _add(rows, draft, key, metric, repeats, draws)
    for key, repeats in found.scores[BITS].items():
        _add(rows, draft, key, BITS, repeats, draws)
        uniform = sum(found.uniform[key.question]) / len(found.uniform[key.question])
        _add(rows, draft, key, COMPRESSION, repeats, draws, uniform=uniform)


def _contrasts(scores: Mapping[Key, list[Scores]]) -> Iterator[tuple[Key, list[Scores]]]:
    """Every trained probe minus each of its controls, repeat by repeat."""
    for key, repeats in scores.items():
        if key.probe != TRAINED:
            continue
        for control in CONTROLS:
            for depth in (key.depth, None):
                against = scores.get(Key(key.question, control, depth))
                if against is not None:
                    changes = [a - b for a, b in zip(repeats, against, strict=True)]
                    yield key._replace(probe=f"{TRAINED}{MINUS}{control}"), changes


def _add(
    rows: RowBuilder,
    draft: str,
    key: Key,
    metric: str,
    repeats: list[Scores],
    draws: Draws,
    uniform: float | None = None,
) -> None:
    """The mean of all slots, then every slot; with `uniform`, that over the mean (compression)."""

    def reduced(means: Float[Tensor, "draw set slot"]) -> Float[Tensor, "draw"]:
        values = means.nanmean(-1).nanmean(-1)
        return values if uniform is None else uniform / values

    scores = torch.stack(repeats).nanmean(0)
    means, once = draws.means(scores), replace(draws, weights=draws.weights[:1])
    each = torch.stack([once.means(one)[0] for one in repeats])
    for slot in range(scores.shape[1] + 1):
        part = slice(None) if slot == 0 else slice(slot - 1, slot)
        if not (n := int((~scores[:, part].isnan()).sum())):
            continue
        values, spread = reduced(means[..., part]), reduced(each[..., part])
        at = {"draft": draft, "n": n, "slot": slot or "", **key._asdict()}
        rows.add(estimate(values[0], values[1:]), metric=metric, **at)
        rows.add(float(spread[~spread.isnan()].std()), metric=metric + SPREAD, **at)


def _findings(result: ProbingResult, draft: str) -> Iterator[str]:
    for question in result.config["questions"]:
        at = {"draft": draft, "question": question, "slot": ""}
        trained = result.select(**at, probe=TRAINED, metric=ACCURACY)
        last = int(trained["depth"].max())
        text = f"{draft}, {question} ({100 * result.coverage[draft][question]:.0f} % of slots asked): "
        text += f"read at {', '.join(f'{100 * value:.1f}' for value in trained['mean'])} % at depths 0…{last}"
        for control in CONTROLS:
            gap = result.select(**at, probe=f"{TRAINED}{MINUS}{control}", metric=ACCURACY, depth=last).iloc[0]
            text += f"; after the last layer {points(gap)} over {control}"
        unseen = result.select(**at, probe=TRAINED, metric=UNSEEN, depth=last)
        if len(unseen):
            text += f"; {100 * unseen['mean'].iloc[0]:.1f} % behind anchor types never trained on"
        code = result.select(**at, metric=COMPRESSION)["mean"]
        if len(code):
            text += f"; compression {', '.join(f'{value:.2f}' for value in code)} at depths 0…{last}"
        yield text + "."
