"""What do the gates of a DSpine follow, and does it matter that they do?

Described: the mean gate by layer, slot, kind of the label token, and whether the drafted token is kept or refused.
Asked: does a gate stand wider open where the predecessor's own prediction is right, and where the injection gains more?
Correlations are taken within a slot and a set, then averaged, so that later slots being harder does not make them.
Tried: gates are clamped (`clamps`), and the loss in accuracy and acceptance length is measured on the same
blocks and answers. Entry point: `gates`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from dspine_probe.drafts import DSpine
from dspine_probe.errors import UsageError
from dspine_probe.experiments.acceptance import AcceptanceResult, RequestCounts, measure
from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.contrast import Draws
from dspine_probe.experiments.gates.clamps import (
    VALUES,
    Clamp,
    ClampScores,
    clamps,
    under_clamp,
    walk_clamped,
)
from dspine_probe.experiments.gates.readings import GateReadings, contexts, read_gates, spine_of
from dspine_probe.experiments.gates.result import GatesResult
from dspine_probe.experiments.gates.table import (
    UNTOUCHED,
    clamp_rows,
    correlation_rows,
    reading_rows,
    walk_rows,
)
from dspine_probe.experiments.gates.token_kinds import kinds_of
from dspine_probe.experiments.progress import Progress, silent
from dspine_probe.experiments.stats import RESAMPLES
from dspine_probe.hooks import HookedDraft

SKIPPED = {
    "other architectures": "gates are DSpine's alone",
    "peak over layers": "layers are reported side by side; none is claimed to be the strongest",
}


@dataclass(frozen=True)
class GatesConfig:
    """Sizes and seeds.

    clamps: values that gates are held at.
    walked_per_set: answers of each set that are walked under every clamp, for acceptance length; 0 leaves it out.
    """

    clamps: tuple[str, ...] = VALUES
    walked_per_set: int = 5
    answers_per_batch: int = 8
    resamples: int = RESAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.walked_per_set == 1:
            raise UsageError(
                "walked_per_set is 1, but intervals need two answers of a set; give 2 or more, or 0 for no walk."
            )


def gates(
    drafts: Mapping[str, DSpine],
    arena: Arena,
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: GatesConfig | None = None,
    on_progress: Progress | None = None,
) -> GatesResult:
    """Read, correlate and clamp the gates of every draft on the same blocks.

    Args:
        drafts: by name; several seeds of one recipe, or several recipes.
        arena: held-out blocks with the taps these drafts read.
        tokenizer: the target's, for the kinds of tokens.
        on_progress: called with (stage, done, total).

    Raises:
        UsageError: no draft, one without gates, an unknown clamp, or an arena of other taps or slots.
    """
    config, report, began = config or GatesConfig(), on_progress or silent, time.perf_counter()
    if not drafts:
        raise UsageError("there is no draft whose gates could be read; give at least one DSpine.")
    draws = Draws.of(arena, seed=config.seed, resamples=config.resamples)
    rows: list[dict[str, Any]] = []
    for name, draft in drafts.items():
        _refuse_misfit(name, draft, arena)
        with HookedDraft(draft) as hooked:
            found = _read(hooked, arena, config, name, report)
            kinds = kinds_of(tokenizer, found.labels)
            held = clamps(found, config.clamps, config.seed)
            rows += reading_rows(name, found, kinds, draws) + correlation_rows(name, found, draws)
            rows += clamp_rows(name, _clamped(hooked, arena, held, config, name, report), draws)
            if config.walked_per_set:
                rows += walk_rows(name, _walked(hooked, arena, held, config, name, report))
    configs = {name: draft.config.to_dict() for name, draft in drafts.items()}
    seconds = time.perf_counter() - began
    return GatesResult(pd.DataFrame(rows), vars(config), configs, dict(arena.about), SKIPPED, seconds)


def _read(
    hooked: HookedDraft, arena: Arena, config: GatesConfig, name: str, report: Progress
) -> GateReadings:
    return read_gates(
        hooked,
        arena,
        answers_per_batch=config.answers_per_batch,
        on_batch=lambda done, total: report(f"{name}: gates", done, total),
    )


def _clamped(
    hooked: HookedDraft,
    arena: Arena,
    held: list[Clamp],
    config: GatesConfig,
    name: str,
    report: Progress,
) -> dict[tuple[str, str], ClampScores]:
    """Every clamp on every block; a batch's context is encoded once for all of them."""
    untouched = Clamp(UNTOUCHED, UNTOUCHED, ())
    parts: dict[tuple[str, str], list[ClampScores]] = {}
    done = 0
    for batch, context in contexts(spine_of(hooked), arena, config.answers_per_batch):
        for clamp in [untouched, *held]:
            scores = under_clamp(hooked, clamp, batch, context)
            parts.setdefault((clamp.place, clamp.value), []).append(scores)
        done += int(batch.real.sum())
        report(f"{name}: clamps", done, len(arena.prompt))
    fields = ClampScores.__dataclass_fields__
    return {
        at: ClampScores(**{field: torch.cat([getattr(s, field) for s in scores]) for field in fields})
        for at, scores in parts.items()
    }


def _walked(
    hooked: HookedDraft,
    arena: Arena,
    held: list[Clamp],
    config: GatesConfig,
    name: str,
    report: Progress,
) -> AcceptanceResult:
    """Rounds of the same answers under every clamp; a clamp is a "draft" of the acceptance result."""
    chosen = [
        index
        for set_name in arena.set_names
        for index in [i for i, of in enumerate(arena.sets) if of == set_name][: config.walked_per_set]
    ]
    answers, slots = [arena.answers[i] for i in chosen], arena.slots
    counts: list[RequestCounts] = []
    conditions = [Clamp(UNTOUCHED, UNTOUCHED, ()), *held]
    for done, clamp in enumerate(conditions, start=1):
        label = UNTOUCHED if clamp.place == UNTOUCHED else f"{clamp.place}: {clamp.value}"
        rounds = walk_clamped(hooked, clamp, answers)
        for i, answer, one in zip(chosen, answers, rounds, strict=True):
            counts.append(measure(label, arena.sets[i], answer.id, one, stopped=False, slots=slots))
        report(f"{name}: walks", done, len(conditions))
    return AcceptanceResult(tuple(counts), seed=config.seed, resamples=config.resamples)


def _refuse_misfit(name: str, draft: DSpine, arena: Arena) -> None:
    if not isinstance(draft, DSpine):
        raise UsageError(f"{name!r} is a {type(draft).__name__}, which has no gates; give a DSpine.")
    if draft.config.num_slots != arena.slots:
        raise UsageError(
            f"{name!r} drafts {draft.config.num_slots} slots and the arena has {arena.slots}; build one for it."
        )
    given, read = arena.answers[0].taps.shape[-1], draft.fc.in_features
    if given != read:
        raise UsageError(
            f"the arena holds {given} tap values a token and {name!r} reads {read}; build it with the taps "
            f"{list(draft.config.target_layer_ids)}."
        )
