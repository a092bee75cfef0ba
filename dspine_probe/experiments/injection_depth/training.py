"""Training injectors on a frozen draft: one run of the common trainer for every arm, on the same blocks and draws.

An arm learns by the final cross-entropy at its sites; only its own parts learn. The learning rate is chosen for each
arm among a few on held-out sequences, at a small budget. Finished arms are saved at once and never trained again, so a
killed run goes on with what is missing. Entry point: `train_injectors`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from dspine_probe.drafts import Draft
from dspine_probe.errors import ProbeError
from dspine_probe.experiments.common.kept import note_or_refuse
from dspine_probe.experiments.common.progress import Progress, silent
from dspine_probe.experiments.injection_depth.arms import Arm, ArmModule, arms_of, borrowed, build
from dspine_probe.experiments.injection_depth.injectors import Codes
from dspine_probe.experiments.injection_depth.objective import ArmObjective, InjectionPlan
from dspine_probe.experiments.injection_depth.store import InjectorSet, draft_fingerprint, save_arm, trained
from dspine_probe.files import write_atomically
from dspine_probe.precision import Precision
from dspine_probe.target import Target
from dspine_probe.training.batches import StepBatches
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.objectives.base import Progress as Step
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.trainer import train
from dspine_probe.training.validation import split

PLAN, TRIALS = "plan.json", "trials.json"
_WARMUP, _CHECKS = 0.05, 4
_CHOICES = ("groups", "depths", "control_depths")


def train_injectors(
    draft: Draft,
    target: Target,
    store: FeatureStore,
    folder: str | Path,
    plan: InjectionPlan | None = None,
    *,
    arms: Sequence[Arm] | None = None,
    precision: Precision | None = None,
    on_progress: Progress | None = None,
) -> InjectorSet:
    """Train every arm of the plan that `folder` does not hold yet.

    Args:
        draft: stays as it is; unfrozen arms train a copy.
        target: whose head gives the codes.
        store: cached states of the target; about one sequence in fifty is held out for choosing learning rates.
        folder: one draft's arms, `plan.json` with what they depend on, and `trials.json` with the held-out loss of
            every learning rate tried.
        arms: arms of one's own choice in place of the plan's groups.
        precision: by default what `auto` gives, or what the folder was begun with.
        on_progress: called with (stage, steps done, steps in all).

    Raises:
        UsageError: a depth or group that the draft does not have, too few sequences, or a folder of another draft,
            store or budget.
        ProbeError: a loss is no longer a number.
    """
    plan, folder = plan or InjectionPlan(), Path(folder)
    if arms is None:
        groups = arms_of(draft, groups=plan.groups, depths=plan.depths, control_depths=plan.control_depths)
        arms = [arm for group in groups.values() for arm in group]
    trainer = InjectorTrainer(draft, target, store, folder, plan, precision, on_progress or silent)
    for arm in arms:
        trainer.finish(arm)
    return InjectorSet.load(folder, draft, target, names=[arm.name for arm in arms])


class InjectorTrainer:
    """Everything that the arms of one draft share."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        store: FeatureStore,
        folder: Path,
        plan: InjectionPlan,
        precision: Precision | None,
        report: Progress,
    ) -> None:
        """Refuses a folder that holds the work of another draft, store or plan."""
        self.plan, self.store, self.folder, self.report = plan.for_draft(draft), store, folder, report
        self.depends = self._depends(draft, precision)
        self.codes = Codes.of(target.head, self.plan.rank or 0, plan.seed)
        self.draft = _frozen(draft, self.precision.dtype)
        self.train_on, held_out = split(store.meta.ids)
        self.held_out = StepBatches(store, held_out, self._config(1.0, plan.held_out_blocks), self.width)

    @property
    def width(self) -> int:
        """Slots of a block, the anchor's included."""
        return self.draft.config.block_size

    def finish(self, arm: Arm) -> None:
        """Train and save an arm that is missing."""
        if arm.name in trained(self.folder):
            return
        trials = self._trials(arm)
        rate = float(min(trials, key=lambda rate: trials[rate])) if trials else self.plan.rates[0]
        began = time.monotonic()
        module, curve = self._train(arm, rate, self.plan.blocks, checks=_CHECKS)
        record = {
            **self.depends,
            "parameters": sum(p.numel() for p in module.parameters()),
            "rate": rate,
            "trials": trials,
            "held_out": curve,
            "seconds": round(time.monotonic() - began, 1),
        }
        save_arm(self.folder, module, record)

    def _trials(self, arm: Arm) -> dict[str, float]:
        """Held-out loss at every rate after a short training, from the folder where it is known; empty for one rate."""
        path = self.folder / TRIALS
        known: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.is_file() else {}
        found = known.setdefault(arm.name, {})
        for rate in self.plan.rates if len(self.plan.rates) > 1 else ():
            if str(rate) not in found:
                found[str(rate)] = self._train(arm, rate, self.plan.trial_blocks)[1][-1]["loss"]
                write_atomically(path, lambda to: to.write_text(json.dumps(known, indent=1) + "\n"))
        return {str(rate): found[str(rate)] for rate in self.plan.rates if str(rate) in found}

    def _train(
        self, arm: Arm, rate: float, blocks: int, *, checks: int = 1
    ) -> tuple[ArmModule, list[dict[str, float]]]:
        """A trained module, and what it got on held-out blocks, `checks` times on the way to the end."""
        module = build(arm, self.draft, self.codes, message=self.plan.message or 0, seed=self.plan.seed)
        objective = ArmObjective(module, self.draft, self.codes, self.plan)
        config = self._config(rate, blocks)
        config = replace(config, log_every=math.ceil(config.steps() / checks))
        curve: list[dict[str, float]] = []

        def check(report: Any) -> None:
            self.report(f"{arm.name}: rate {rate:g}", report.step, report.total_steps)
            curve.append({"blocks": report.blocks} | self._validate(objective))

        with TemporaryDirectory() as scratch:
            try:
                train(
                    self.draft,
                    self.store,
                    config,
                    Path(scratch),
                    indices=self.train_on,
                    objective=objective,
                    on_log=check,
                )
            except ProbeError as error:
                raise ProbeError(f"arm {arm.name} at the rate {rate:g}: {error}") from error
        return module, curve

    @torch.no_grad()
    def _validate(self, objective: ArmObjective) -> dict[str, float]:
        """Loss and accuracy on the same held-out blocks for every arm."""
        losses, hits, counts = [], 0.0, 0.0
        for step in range(self.held_out.config.steps()):
            generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + step)
            (batch,) = self.held_out.at(step)
            with self.precision.autocast(self.draft.head.device):
                found = objective(batch.to(self.draft.head.device, torch.float32), Step(step, 1, generator))
            losses.append(float(found.loss))
            hits, counts = hits + float(found.slot_hits.sum()), counts + float(found.slot_counts.sum())
        return {"loss": sum(losses) / len(losses), "top1": hits / max(counts, 1.0)}

    def _config(self, rate: float, blocks: int) -> TrainConfig:
        plan = self.plan
        return TrainConfig(
            blocks=blocks,
            sequences=plan.sequences,
            anchors=plan.anchors,
            lr=rate,
            warmup=_WARMUP,
            seed=plan.seed,
            save_every=blocks,
            mixed_precision=self.precision.accelerate,
        )

    def _depends(self, draft: Draft, precision: Precision | None) -> dict[str, Any]:
        """What all arms of the folder depend on, noted in it or compared with what is noted there."""
        path = self.folder / PLAN
        written = json.loads(path.read_text()).get("precision") if path.is_file() else None
        asked = precision or Precision.resolve("auto", draft.head.device)
        self.precision = Precision.resolve(asked.asked, draft.head.device, written=written)
        depends: dict[str, Any] = {"draft": draft_fingerprint(draft), "features": self.store.fingerprint}
        depends |= {name: value for name, value in asdict(self.plan).items() if name not in _CHOICES}
        depends["precision"] = self.precision.used
        note_or_refuse(path, depends, begun=bool(trained(self.folder)) or (self.folder / TRIALS).is_file())
        return depends


def _frozen(draft: Draft, dtype: torch.dtype) -> Draft:
    """A copy that nothing trains, its matrices in the dtype they are multiplied in, lest every call cast them."""
    copy = borrowed(draft)
    copy.head = copy.head.to(dtype)
    for module in copy.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    return copy.requires_grad_(False)
