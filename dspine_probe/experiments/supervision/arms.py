"""The drafts that the supervision experiment compares: one training each arm and seed, alike in all but supervision.

`train_arms` trains what is missing and goes on with what was stopped; `trained` lists what is there. Where a learning
rate is not given, it is chosen for each arm by short runs on held-out sequences. Measuring is `supervision`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dspine_probe.drafts.checkpoint import CONFIG, load_draft
from dspine_probe.errors import UsageError
from dspine_probe.files import write_atomically
from dspine_probe.target import Target
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.intermediate import NONE, TOKEN_CE, Supervision
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.run import PLAN, DraftPlan, Reports, train_draft
from dspine_probe.training.state import STATE
from dspine_probe.training.validation import split, validate

RATES = "rates.json"


@dataclass(frozen=True)
class Arm:
    """One kind of supervision, the seeds to train it with, and its learning rate (None: choose it)."""

    supervision: Supervision
    seeds: tuple[int, ...]
    lr: float | None = None


def headline_arms(seeds: tuple[int, ...] = (0, 1, 2)) -> dict[str, Arm]:
    """The three arms of the paper's comparison."""
    return {name: Arm(Supervision(name), seeds) for name in (NONE, "cosine", TOKEN_CE)}


def variant_arms(seed: int = 0) -> dict[str, Arm]:
    """One seed each: what the cosine could be replaced by, and token cross-entropy at a fifth of its weight."""
    kinds = {name: Supervision(name) for name in ("expected-code", "code-mse", "cosine-unwhitened")}
    kinds[f"{TOKEN_CE} 0.1"] = Supervision(TOKEN_CE, weight=0.1)
    return {name: Arm(kind, (seed,)) for name, kind in kinds.items()}


@dataclass(frozen=True)
class ArmsPlan:
    """What to train.

    training: budget and optimiser of every run; its seed and, where it is chosen, its learning rate are replaced.
    rates: learning rates to choose among; with a single one there is no choice.
    tuning_blocks: budget of each run that chooses; these runs use a seed that no arm reports.
    """

    arms: Mapping[str, Arm]
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
            raise UsageError(
                f"seed {self.tuning_seed} chooses learning rates, so {taken[0]!r} cannot report it too."
            )


@dataclass(frozen=True)
class ArmRun:
    """One trained draft and the folder its run left behind."""

    checkpoint: Path
    run: Path

    @property
    def finished(self) -> bool:
        """Whether the checkpoint has been written."""
        return (self.checkpoint / CONFIG).is_file()

    def settings(self) -> dict[str, dict[str, Any]]:
        """Plan and training settings of the run.

        Raises:
            UsageError: the run's folder does not hold them.
        """
        for path in (self.run / PLAN, self.run / STATE):
            if not path.is_file():
                raise UsageError(f"{path} was not found; give the folder in which the arm was trained.")
        # Mapped, not read: the settings are a few bytes of a large file.
        state = torch.load(self.run / STATE, map_location="cpu", weights_only=True, mmap=True)
        return {"plan": json.loads((self.run / PLAN).read_text()), "training": state["config"]}

    @classmethod
    def at(cls, folder: Path, name: str) -> ArmRun:
        """Where `train_arms` keeps the run of that name."""
        return cls(folder / name, folder / "runs" / name)


Runs = Mapping[str, Mapping[int, ArmRun]]
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
        on_run: called with the name of every run that begins; returns who is told about it.

    Raises:
        UsageError: an arm has been trained already, at another rate than the one given or chosen.
    """
    mine = list(plan.arms)[worker::workers]
    rates = {name: _learning_rate(name, plan, target, store, folder, on_run) for name in mine}
    for name, lr in rates.items():
        for seed in plan.arms[name].seeds:
            training = replace(plan.training, seed=seed, lr=lr)
            _train(_run_name(name, seed), name, plan, training, target, store, folder, on_run)


def trained(plan: ArmsPlan, folder: Path) -> dict[str, dict[int, ArmRun]]:
    """The finished runs of `plan`, by arm and seed; arms without any are left out."""
    found = {
        name: {seed: run for seed in arm.seeds if (run := ArmRun.at(folder, _run_name(name, seed))).finished}
        for name, arm in plan.arms.items()
    }
    return {name: runs for name, runs in found.items() if runs}


def rates_tried(folder: Path, arms: Sequence[str]) -> dict[str, Any]:
    """For each arm whose learning rate was chosen: the rate, and held-out tokens per anchor of all that were tried."""
    paths = {name: folder / "runs" / _run_name(name, "tuning") / RATES for name in arms}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def _learning_rate(
    name: str, plan: ArmsPlan, target: Target, store: FeatureStore, folder: Path, on_run: OnRun | None
) -> float:
    given = plan.arms[name].lr
    if given is not None or len(plan.rates) == 1:
        return plan.rates[0] if given is None else given
    path = folder / "runs" / _run_name(name, "tuning") / RATES
    if path.exists():
        return float(json.loads(path.read_text())["chosen"])
    tried = dict(_tried(name, plan, target, store, folder, on_run))
    chosen = max(tried, key=lambda lr: tried[lr])
    found = {"chosen": chosen, "blocks": plan.tuning_blocks, "tokens_per_anchor": tried}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda to: to.write_text(json.dumps(found, indent=2) + "\n"))
    return chosen


def _tried(
    name: str, plan: ArmsPlan, target: Target, store: FeatureStore, folder: Path, on_run: OnRun | None
) -> Iterator[tuple[float, float]]:
    """Every learning rate with the held-out tokens per anchor that a short run reaches."""
    _, held_out = split(store.meta.ids)
    for lr in plan.rates:
        training = replace(plan.training, seed=plan.tuning_seed, lr=lr, blocks=plan.tuning_blocks)
        run = _train(
            f"{_run_name(name, 'tuning')}-{lr:g}", name, plan, training, target, store, folder, on_run
        )
        # The checkpoint is all that is needed from here on, and a state takes several times its room.
        (run.run / STATE).unlink(missing_ok=True)
        draft = load_draft(run.checkpoint, target)
        yield lr, validate(draft, store, held_out).tokens_per_anchor


def _train(
    run_name: str,
    arm: str,
    plan: ArmsPlan,
    training: TrainConfig,
    target: Target,
    store: FeatureStore,
    folder: Path,
    on_run: OnRun | None,
) -> ArmRun:
    run = ArmRun.at(folder, run_name)
    if run.finished:
        _refuse_another_rate(run, training.lr)
        return run
    draft = replace(plan.draft, supervision=plan.arms[arm].supervision)
    reports = Reports() if on_run is None else on_run(run_name)
    train_draft(draft, target, store, training, run.run, run.checkpoint, reports=reports)
    return run


def _refuse_another_rate(run: ArmRun, lr: float) -> None:
    if not (run.run / STATE).is_file():
        return  # a run that chose a rate, which its name says
    before = run.settings()["training"]["lr"]
    if before != lr:
        raise UsageError(
            f"{run.checkpoint} was trained at the rate {before:g}, and {lr:g} was chosen for it; train into another "
            f"folder, or give {before:g} alone."
        )


def _run_name(arm: str, seed: int | str) -> str:
    return f"{arm.replace(' ', '-')}-{seed}"
