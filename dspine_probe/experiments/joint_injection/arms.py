"""Training the arms of the joint experiment: a draft and its injector from the same warm start, on the same blocks.

Every arm is one run of the common trainer in a folder of its own, resumed where it was stopped and never trained again
once finished. What a run depends on is noted beside it; another use of the folder is refused. Entry points:
`train_joint`, `load_joint`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.kept import note_or_refuse, training_depends
from dspine_probe.experiments.injection_depth.injectors import Codes
from dspine_probe.experiments.joint_injection.objective import JointArm, JointObjective
from dspine_probe.files import write_atomically
from dspine_probe.target import Target
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.run import DraftPlan, start_draft
from dspine_probe.training.state import STATE
from dspine_probe.training.trainer import StepReport, train
from dspine_probe.training.validation import split

WEIGHTS, DEPENDS = "arm.safetensors", "depends.json"


@dataclass(frozen=True)
class JointPlan:
    """What all arms share: the causal draft, the budget and its rate, the injector's rate as a share of that."""

    training: TrainConfig
    draft: DraftPlan = DraftPlan("dflash", causal=True)
    injector_rate: float = 1.0


def train_joint(
    arms: Sequence[JointArm],
    plan: JointPlan,
    target: Target,
    store: FeatureStore,
    folder: Path,
    *,
    on_log: Callable[[str, StepReport], None] | None = None,
) -> None:
    """Train every arm that `folder` does not hold yet; `on_log` hears of an arm's name and its logged steps.

    Raises:
        UsageError: an arm is there already, made with other settings, features or target.
    """
    train_on, _ = split(store.meta.ids)
    for arm in arms:
        place = folder / arm.name
        config = replace(plan.training, seed=arm.seed)
        note_or_refuse(place / DEPENDS, _depends(arm, plan, target, store), begun=(place / STATE).is_file())
        if (place / WEIGHTS).is_file():
            continue
        objective = _untrained(arm, plan, target, store, train_on)
        report = None if on_log is None else partial(on_log, arm.name)
        train(objective.draft, store, config, place, indices=train_on, objective=objective, on_log=report)
        tensors = {name: p.detach().float().contiguous() for name, p in objective.named_parameters()}
        write_atomically(place / WEIGHTS, partial(save_file, tensors))
        (place / STATE).unlink(missing_ok=True)  # several times the size of what is needed from here on


def load_joint(arm: JointArm, plan: JointPlan, target: Target, store: FeatureStore, folder: Path) -> JointObjective:
    """A finished arm, in fp32.

    Raises:
        UsageError: it has not been trained, or with other settings.
    """
    place = folder / arm.name
    if not (place / WEIGHTS).is_file():
        raise UsageError(f"{place} holds no finished arm; leave out --no-train to train it.")
    note_or_refuse(place / DEPENDS, _depends(arm, plan, target, store), begun=True)
    objective = _untrained(arm, plan, target, store, split(store.meta.ids)[0])
    missing, unexpected = objective.load_state_dict(load_file(place / WEIGHTS), strict=False)
    trained = {name for name, _ in objective.named_parameters()}
    if unexpected or trained & set(missing):
        raise UsageError(f"{place / WEIGHTS} does not fit this arm; delete {place} and train it again.")
    return objective.float().eval().requires_grad_(False)


def _untrained(
    arm: JointArm, plan: JointPlan, target: Target, store: FeatureStore, train_on: list[int]
) -> JointObjective:
    """Draft and injector as they start; seeds differ in the injector's random parts and the order of blocks."""
    draft = start_draft(plan.draft, target, store, train_on, arm.seed)
    rank, message = draft.code_sizes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(arm.seed)
        codes = Codes.of(target.head, rank, arm.seed)
        return JointObjective(draft, arm, codes, message, injector_rate=plan.injector_rate).to(target.device)


def _depends(arm: JointArm, plan: JointPlan, target: Target, store: FeatureStore) -> dict[str, Any]:
    shared = training_depends(plan.draft, replace(plan.training, seed=arm.seed), target, store)
    return shared | asdict(arm) | {"injector_rate": plan.injector_rate}
