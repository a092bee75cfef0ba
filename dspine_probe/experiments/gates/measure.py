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
from typing import cast

from transformers import PreTrainedTokenizerBase

from dspine_probe.drafts import DSpine
from dspine_probe.errors import UsageError
from dspine_probe.experiments.acceptance import AcceptanceCounts
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import RESAMPLES, Draws
from dspine_probe.experiments.common.progress import Progress, silent
from dspine_probe.experiments.common.request import NothingToMeasure, Request
from dspine_probe.experiments.gates.clamps import VALUES, clamped_rounds, clamped_scores, clamps
from dspine_probe.experiments.gates.readings import read_gates
from dspine_probe.experiments.gates.table import GatesResult, GatesTable
from dspine_probe.experiments.gates.token_kinds import kinds_of
from dspine_probe.experiments.probing.questions import refuse_misfit
from dspine_probe.hooks import HookedDraft
from dspine_probe.precision import EXACT

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
        unknown = [value for value in self.clamps if value not in VALUES]
        if unknown:
            raise UsageError(f"gates cannot be clamped to {unknown}; choose from {', '.join(VALUES)}.")
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
        UsageError: no draft, one without gates, or an arena of other taps or slots.
    """
    config, report, began = config or GatesConfig(), on_progress or silent, time.perf_counter()
    if not drafts:
        raise UsageError("there is no draft whose gates could be read; give at least one DSpine.")
    draw = {"seed": config.seed, "resamples": config.resamples}
    table = GatesTable(Draws.of(arena, **draw))
    for name, draft in drafts.items():
        refuse_misfit(name, draft, arena)

        def here(stage: str, done: int, total: int, name: str = name) -> None:
            report(f"{name}: {stage}", done, total)

        with HookedDraft(draft) as hooked:
            found = read_gates(hooked, arena, answers_per_batch=config.answers_per_batch, report=here)
            held = clamps(found, config.clamps, config.seed)
            table.add_readings(name, found, kinds_of(tokenizer, found.labels))
            table.add_correlations(name, found)
            scores = clamped_scores(hooked, arena, held, config.answers_per_batch, here)
            table.add_clamps(name, held, scores)
            if config.walked_per_set:
                rounds = clamped_rounds(hooked, arena, held, config.walked_per_set, here)
                table.add_rounds(name, held, AcceptanceCounts(tuple(rounds), **draw))
    return GatesResult(
        table.rows.table(),
        config=vars(config) | EXACT.record(),
        drafts={name: draft.config.to_dict() for name, draft in drafts.items()},
        data={**arena.about, "answers": len(arena.answers), "skipped": SKIPPED},
        seconds=time.perf_counter() - began,
    )


def run(request: Request, config: GatesConfig) -> GatesResult:
    """Measure the drafts of a request, all of which must have gates."""
    for name, draft in request.drafts.items():
        if not isinstance(draft, DSpine):
            raise NothingToMeasure(f"the draft {name!r} has no gates; name drafts of the kind dspine.")
    assert request.target.tokenizer is not None
    drafts = cast("Mapping[str, DSpine]", request.drafts)
    return gates(drafts, request.arena, request.target.tokenizer, config=config, on_progress=request.on_progress)
