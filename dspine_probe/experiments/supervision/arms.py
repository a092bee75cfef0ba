"""The drafts that the supervision experiment compares: one training each arm and seed, alike in all but supervision.

`train_arms` trains what is missing and goes on with what was stopped; `trained` lists what is there. Where a learning
rate is not given, it is chosen for each arm by short runs on held-out sequences. What every run and every choice
depends on is noted beside it, and a call that would take it for something else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspine_probe.drafts.checkpoint import load_draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.kept import note_or_refuse, refuse_other, training_depends
from dspine_probe.experiments.supervision.runs import ArmRun
from dspine_probe.files import write_atomically
from dspine_probe.target import Target
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.intermediate import NONE, TOKEN_CE, Supervision
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.run import DraftPlan, Reports, train_draft
from dspine_probe.training.state import STATE
from dspine_probe.training.validation import split, validate

RATES, DEPENDS = "rates.json", "depends.json"
TUNING = "tuning"


@dataclass(frozen=True)
class SupervisionArm:
    """One kind of supervision, the seeds to train it with, and its learning rate (None: choose it)."""

    supervision: Supervision
    seeds: tuple[int, ...]
    lr: float | None = None


def headline_arms(seeds: tuple[int, ...] = (0, 1, 2)) -> dict[str, SupervisionArm]:
    """The three arms of the paper's comparison."""
    return {name: SupervisionArm(Supervision(name), seeds) for name in (NONE, "cosine", TOKEN_CE)}


def variant_arms(seed: int = 0) -> dict[str, SupervisionArm]:
    """One seed each: what the cosine could be replaced by, and token cross-entropy at a fifth of its weight."""
    kinds = {name: Supervision(name) for name in ("expected-code", "code-mse", "cosine-unwhitened")}
    kinds[f"{TOKEN_CE} 0.1"] = Supervision(TOKEN_CE, weight=0.1)
    return {name: SupervisionArm(kind, (seed,)) for name, kind in kinds.items()}


@dataclass(frozen=True)
class ArmsPlan:
    """What to train.

    training: budget and optimiser of every run; its seed and, where it is chosen, its learning rate are replaced.
    rates: learning rates to choose among; with a single one there is no choice.
    tuning_blocks: budget of each run that chooses; these runs use a seed that no arm reports.
    """

    arms: Mapping[str, SupervisionArm]
    training: TrainConfig
    draft: DraftPlan = DraftPlan("dflash")
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    tuning_blocks: int = 25_600
    tuning_seed: int = 1_000

    def __post_init__(self) -> None:
        if not self.rates:
            raise UsageError("no learning rate was given to choose among; give one or more.")
        taken = [name for name, arm in self.arms.items() if self.tuning_seed in arm.seeds]
        if taken:
            raise UsageError(f"seed {self.tuning_seed} chooses learning rates, so {taken[0]!r} cannot report it too.")


OnRun = Callable[[str], Reports]


def train_arms(
    plan: ArmsPlan,
    target: Target,
    store: FeatureStore,
    folder: Path,
    *,
    worker: int = 0,
    workers: int = 1,
    on_run: OnRun | None = None,
) -> None:
    """Train every arm and seed of `plan` that has no checkpoint in `folder` yet.

    Args:
        plan: arms, seeds and budget.
        target: whose answers `store` holds.
        store: features; about one sequence in fifty is kept out of training, as in every run.
        folder: gets `<arm>-<seed>` (checkpoints) and `runs/` (state and metrics); a rerun resumes.
        worker: which of several processes this is; each takes whole arms.
        workers: how many processes share the plan.
        on_run: called with the name of every run that begins; returns who hears about it.

    Raises:
        UsageError: an arm or a choice of rates is there already, made with other settings, features or target.
    """
    trainer = _ArmTrainer(plan, target, store, folder, on_run or (lambda _name: Reports()))
    mine = list(plan.arms)[worker::workers]
    rates = {name: trainer.learning_rate(name) for name in mine}
    for name, lr in rates.items():
        for seed in plan.arms[name].seeds:
            trainer.train(_run_name(name, seed), name, replace(plan.training, seed=seed, lr=lr))


def trained(plan: ArmsPlan, folder: Path) -> dict[str, dict[int, ArmRun]]:
    """The finished runs of `plan`, by arm and seed; arms without any are left out."""
    found = {
        name: {seed: run for seed in arm.seeds if (run := ArmRun.at(folder, _run_name(name, seed))).finished}
        for name, arm in plan.arms.items()
    }
    return {name: runs for name, runs in found.items() if runs}


def rates_tried(folder: Path, arms: Sequence[str]) -> dict[str, Any]:
    """For each arm whose learning rate was chosen: the rate, and held-out tokens per anchor of all that were tried."""
    paths = {name: ArmRun.at(folder, _run_name(name, TUNING)).run / RATES for name in arms}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


@dataclass(frozen=True)
class _ArmTrainer:
    """What all runs of a call share."""

    plan: ArmsPlan
    target: Target
    store: FeatureStore
    folder: Path
    on_run: OnRun

    def learning_rate(self, name: str) -> float:
        """The rate given for an arm, or the one that its short runs choose."""
        given = self.plan.arms[name].lr
        if given is not None or len(self.plan.rates) == 1:
            return self.plan.rates[0] if given is None else given
        path = ArmRun.at(self.folder, _run_name(name, TUNING)).run / RATES
        tuning = replace(self.plan.training, seed=self.plan.tuning_seed, blocks=self.plan.tuning_blocks)
        wanted = self._depends(name, tuning) | {"lr": list(self.plan.rates)}
        note_or_refuse(path.with_name(DEPENDS), wanted, begun=path.exists())
        if path.exists():
            return float(json.loads(path.read_text())["chosen"])
        tried = {lr: self._try(name, replace(tuning, lr=lr)) for lr in self.plan.rates}
        chosen = max(tried, key=lambda lr: tried[lr])
        found = {"chosen": chosen, "blocks": tuning.blocks, "tokens_per_anchor": tried}
        write_atomically(path, lambda to: to.write_text(json.dumps(found, indent=2) + "\n"))
        return chosen

    def _try(self, name: str, training: TrainConfig) -> float:
        """Held-out tokens per anchor that a short run reaches."""
        run = self.train(f"{_run_name(name, TUNING)}-{training.lr:g}", name, training)
        # The checkpoint is all that is needed from here on, and a state takes several times its room.
        (run.run / STATE).unlink(missing_ok=True)
        _, held_out = split(self.store.meta.ids)
        draft = load_draft(run.checkpoint, self.target)
        return validate(draft, self.store, held_out, precision=training.precision).tokens_per_anchor

    def train(self, run_name: str, arm: str, training: TrainConfig) -> ArmRun:
        """Train a run, go on with it, or leave it as it is once finished."""
        run, wanted = ArmRun.at(self.folder, run_name), self._depends(arm, training)
        state = run.run / STATE
        note_or_refuse(run.run / DEPENDS, wanted, begun=run.finished or state.is_file())
        if state.is_file():
            # The state knows what became of a run that was resumed by other means, perhaps at another rate.
            refuse_other(run.run, wanted | run.settings()["training"], wanted)
        if run.finished:
            return run
        plan = replace(self.plan.draft, supervision=self.plan.arms[arm].supervision)
        reports = self.on_run(run_name)
        train_draft(plan, self.target, self.store, training, run.run, run.checkpoint, reports=reports)
        return run

    def _depends(self, arm: str, training: TrainConfig) -> dict[str, Any]:
        """Everything that the numbers of a run depend on."""
        draft = replace(self.plan.draft, supervision=self.plan.arms[arm].supervision)
        return training_depends(draft, training, self.target, self.store)


def _run_name(arm: str, seed: int | str) -> str:
    return f"{arm.replace(' ', '-')}-{seed}"
