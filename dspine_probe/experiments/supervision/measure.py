"""Does supervising a draft's intermediate layers help, and with what? (arXiv 2609.36173: 3.67 < 3.75 < 3.85)

Arms are DFlash drafts trained alike from one start, on the same blocks in the same order, whose layers 1…L−1 were asked
for nothing, for the label's transfer code (cosine), for the label among all tokens (token cross-entropy), or for
variants of these. The number that decides, chosen beforehand, is the acceptance length of greedy decoding: tokens over
rounds in a set, then the unweighted mean of the sets. `supervision` measures finished runs; `arms` trains.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dspine_probe.drafts import DFlash
from dspine_probe.drafts.checkpoint import load_draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import RESAMPLES, Draws
from dspine_probe.experiments.common.progress import Progress, silent
from dspine_probe.experiments.supervision.readings import ArmReadings, OwnReadouts, RoundCounts, arena_rounds, read_arm
from dspine_probe.experiments.supervision.result import SupervisionResult
from dspine_probe.experiments.supervision.runs import ArmRun, Runs, curve, refuse_unlike
from dspine_probe.experiments.supervision.table import BASE, Measured, tabulate
from dspine_probe.target import Target
from dspine_probe.training.intermediate import load_readouts
from dspine_probe.transfer import TransferSpace, codes_from_projection

DRAFTS = "drafts"
SKIPPED = {
    "sign-flip test": "paired bootstrap over prompts, and a t-interval over seeds",
    "git hash": "versions of the packages are recorded",
    "initial state": "not compared: what starts equal is the code's promise, and tested",
}


@dataclass(frozen=True)
class SupervisionConfig:
    """Rank of the codes that all arms are read with (None: a third of the hidden size), and the bootstrap."""

    rank: int | None = None
    resamples: int = RESAMPLES
    seed: int = 0


def supervision(
    target: Target,
    runs: Runs,
    arena: Arena,
    *,
    config: SupervisionConfig = SupervisionConfig(),
    rates: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> SupervisionResult:
    """Measure finished arms on held-out answers.

    Args:
        target: the drafts' target; fp32, as the arena's states.
        runs: by arm and seed; the arm without supervision is called "none". Gains use the seeds that both have.
        arena: blocks and answers that no run was trained on.
        config: codes and bootstrap.
        rates: how learning rates were chosen, for the record.
        on_progress: called with ("drafts", done, total).

    Raises:
        UsageError: no arm "none", arms that were not trained alike, or fewer than two answers.
    """
    _refuse(runs, arena)
    settings = {arm: {seed: run.settings() for seed, run in of.items()} for arm, of in runs.items()}
    refuse_unlike(settings)
    began, total = time.monotonic(), sum(map(len, runs.values()))
    space = TransferSpace.fit(target.head, config.rank or target.hidden_size // 3)
    measured: list[Measured] = []
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            found = settings[arm][seed]
            supervised = found["plan"]["supervision_arm"]
            rounds, readings = _measure(target, run, supervised, arena, space, config.seed)
            points = tuple(curve(run, found["training"]["clip"]))
            measured.append(Measured(arm, seed, rounds, readings, points))
            (on_progress or silent)(DRAFTS, len(measured), total)
    draws = Draws.of(arena, seed=config.seed, resamples=config.resamples)
    return SupervisionResult(
        tabulate(measured, arena, draws),
        config={**vars(config), "rank": space.rank, "rates": dict(rates or {}), "skipped": SKIPPED},
        drafts={arm: {str(seed): found for seed, found in of.items()} for arm, of in settings.items()},
        data={**arena.about, "answers": len(arena.answers), "rows": len(arena.prompt) * arena.slots},
        seconds=time.monotonic() - began,
    )


def _measure(
    target: Target, run: ArmRun, arm: str, arena: Arena, space: TransferSpace, seed: int
) -> tuple[RoundCounts, ArmReadings]:
    draft = load_draft(run.checkpoint, target, dtype=torch.float32)
    if not isinstance(draft, DFlash) or draft.config.num_slots != arena.slots:
        raise UsageError(
            f"{run.checkpoint} is a {draft.config.architecture} of {draft.config.num_slots} slots; the arena needs a "
            f"DFlash of {arena.slots}."
        )
    codes = space.codes(target.head)
    weights = load_readouts(run.run)
    aimed = codes_from_projection(target.head, space.mean, space.basis) if arm == "cosine-unwhitened" else codes
    own = OwnReadouts(weights, aimed) if weights else None
    return arena_rounds(draft, arena), read_arm(draft, arena, space, codes, own, seed=seed)


def _refuse(runs: Runs, arena: Arena) -> None:
    if BASE not in runs or not runs[BASE]:
        raise UsageError(f"there is no arm {BASE!r} to compare with; train it with the same seeds.")
    lonely = [arm for arm, by_seed in runs.items() if not set(by_seed) & set(runs[BASE])]
    if lonely:
        raise UsageError(
            f"{lonely[0]} has seeds {sorted(runs[lonely[0]])} and {BASE!r} {sorted(runs[BASE])}; train both with one "
            "seed in common."
        )
    if len(arena.answers) < 2:
        raise UsageError("the arena holds one answer; give prompts with two or more long answers.")
