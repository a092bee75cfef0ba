"""Training injectors on a frozen draft: all arms of a group side by side, on one pass of the layers they share.

Every arm sees the same blocks, slots and steps; only its own parts learn, by the final cross-entropy at the injected
slots. The learning rate is chosen for each arm among a few on held-out sequences, at a small budget. Finished arms are
saved at once and never trained again, so a killed run goes on with what is missing. Entry point: `train_injectors`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_probe.drafts import Draft
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.injection_depth.arms import Arm, ArmModule, arms_of, borrowed, build
from dspine_probe.experiments.injection_depth.batches import BlockSource, Draw
from dspine_probe.experiments.injection_depth.block_pass import BlockPass, refuse_leak
from dspine_probe.experiments.injection_depth.injectors import Codes
from dspine_probe.experiments.injection_depth.plan import InjectionPlan
from dspine_probe.experiments.injection_depth.store import InjectorSet, draft_fingerprint, save_arm, trained
from dspine_probe.experiments.progress import Progress, silent
from dspine_probe.files import write_atomically
from dspine_probe.precision import fast_autocast, fast_dtype
from dspine_probe.target import Target
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.validation import split

_TRIALS = "trials.json"
_WARMUP, _CLIP = 0.05, 1.0
_CHECKS = 4
_CHOICES = ("groups", "depths", "control_depths")


def train_injectors(
    draft: Draft,
    target: Target,
    store: FeatureStore,
    folder: str | Path,
    plan: InjectionPlan | None = None,
    *,
    on_progress: Progress | None = None,
) -> InjectorSet:
    """Train every arm of the plan that `folder` does not hold yet.

    Args:
        draft: stays as it is; unfrozen arms train a copy.
        target: whose head gives the codes.
        store: cached states of the target; about one sequence in fifty is held out for choosing learning rates.
        folder: one draft's arms, and `trials.json` with the held-out loss of every learning rate tried.
        on_progress: called with (stage, steps done, steps in all).

    Raises:
        UsageError: a depth or group that the draft does not have, too few sequences, or a folder of another draft.
        ProbeError: a loss is no longer a number.
    """
    plan = plan or InjectionPlan()
    groups = arms_of(draft, groups=plan.groups, depths=plan.depths, control_depths=plan.control_depths)
    return train_arms(draft, target, store, folder, plan, groups, on_progress=on_progress)


def train_arms(
    draft: Draft,
    target: Target,
    store: FeatureStore,
    folder: str | Path,
    plan: InjectionPlan,
    groups: Mapping[str, Sequence[Arm]],
    *,
    on_progress: Progress | None = None,
) -> InjectorSet:
    """`train_injectors` for arms of one's own choice, those of a group side by side."""
    shop = _Workshop(draft, target, store, Path(folder), plan, on_progress or silent)
    for group, arms in groups.items():
        shop.finish(group, arms)
    return InjectorSet.load(
        folder, draft, target, names=[arm.name for arms in groups.values() for arm in arms]
    )


@dataclass(frozen=True)
class _Run:
    """An arm in training: its module, optimiser and peak learning rate, and the losses it has seen."""

    module: ArmModule
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, module: ArmModule, rate: float, slow: float) -> _Run:
        parts = [(module.fast, rate), (module.slow, rate * slow)]
        groups = [{"params": params, "lr": lr, "peak": lr} for params, lr in parts if params]
        return cls(module, torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0))

    def descend(self, loss: Float[Tensor, ""], share: float) -> None:
        """One step at `share` of the peak rates."""
        if not bool(loss.isfinite()):
            raise ProbeError(
                f"the loss of arm {self.module.arm.name} became {float(loss)} after {len(self.losses)} steps; give "
                "lower rates."
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), _CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(loss.detach()))


class _Workshop:
    """Everything that the arms of one draft share."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        store: FeatureStore,
        folder: Path,
        plan: InjectionPlan,
        report: Progress,
    ) -> None:
        self.plan, self.folder, self.report = plan, folder, report
        self.rank, self.message = plan.sizes(draft)
        self.all_slots = draft.config.is_causal if plan.all_slots is None else plan.all_slots
        refuse_leak(draft, all_slots=self.all_slots)
        self.fingerprint = draft_fingerprint(draft)
        self._refuse_other_runs()
        self.codes = Codes.of(target.head, self.rank, plan.seed)
        self.draft, self.device = _frozen(draft), draft.head.device
        train_on, held_out = split(store.meta.ids)
        self.source, self.check = (self._source(store, part) for part in (train_on, held_out))

    def finish(self, group: str, arms: Sequence[Arm]) -> None:
        """Train and save those arms of a group that are missing."""
        missing = [arm for arm in arms if arm.name not in trained(self.folder)]
        if not missing:
            return
        trials = self._trials(group, missing)
        rates = {arm.name: self._best(trials.get(arm.name, {})) for arm in missing}
        began = time.monotonic()
        runs = [self._run(arm, rates[arm.name]) for arm in missing]
        curves = self._train(f"{group}: training", runs, self.plan.steps(self.plan.blocks), checks=_CHECKS)
        seconds = round(time.monotonic() - began, 1)
        for run, curve in zip(runs, curves, strict=True):
            name = run.module.arm.name
            record = {"rate": rates[name], "trials": trials.get(name, {}), "held_out": curve}
            record |= {"losses": [round(loss, 4) for loss in run.losses], "group_seconds": seconds}
            save_arm(self.folder, run.module, self._about(run.module) | record)

    def _best(self, losses: dict[str, float]) -> float:
        """The rate of least held-out loss; the only one, if there was no choice."""
        return float(min(losses, key=lambda rate: losses[rate])) if losses else self.plan.rates[0]

    def _trials(self, group: str, arms: Sequence[Arm]) -> dict[str, dict[str, float]]:
        """Held-out loss of every arm at every rate after a short training, from the folder where it is known."""
        path = self.folder / _TRIALS
        known: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.is_file() else {}
        fresh = [arm for arm in arms if arm.name not in known]
        if len(self.plan.rates) == 1 or not fresh:
            return known
        found: dict[str, dict[str, float]] = {arm.name: {} for arm in fresh}
        for rate in self.plan.rates:
            runs = [self._run(arm, rate) for arm in fresh]
            curves = self._train(f"{group}: rate {rate:g}", runs, self.plan.steps(self.plan.trial_blocks))
            for arm, curve in zip(fresh, curves, strict=True):
                found[arm.name][str(rate)] = curve[-1]["loss"]
        known |= found
        write_atomically(path, lambda to: to.write_text(json.dumps(known, indent=1) + "\n"))
        return known

    def _run(self, arm: Arm, rate: float) -> _Run:
        module = build(arm, self.draft, self.codes, message=self.message, seed=self.plan.seed)
        return _Run.of(module, rate, self.plan.slow)

    def _train(
        self, stage: str, runs: Sequence[_Run], steps: int, *, checks: int = 1
    ) -> list[list[dict[str, float]]]:
        """Train side by side; returns what each run got on held-out blocks, `checks` times on the way to the end."""
        due = {round(steps * (check + 1) / checks) for check in range(checks)}
        curves: list[list[dict[str, float]]] = [[] for _ in runs]
        for step in range(steps):
            draw = self._draw(self.source, step)
            for run in runs:
                run.descend(self._loss(run.module, draw)[0], _share(step, steps))
            self.report(stage, step + 1, steps)
            for curve, found in zip(curves, self._validate(runs) if step + 1 in due else (), strict=False):
                curve.append({"blocks": (step + 1) * self.plan.step_blocks} | found)
        return curves

    @torch.no_grad()
    def _validate(self, runs: Sequence[_Run]) -> list[dict[str, float]]:
        """Loss and accuracy of every run on the same held-out blocks."""
        sums = torch.zeros(len(runs), 2, dtype=torch.float64)
        steps = self.plan.steps(self.plan.held_out_blocks)
        for step in range(steps):
            draw = self._draw(self.check, step)
            sums += torch.stack([torch.stack(self._loss(run.module, draw)).double().cpu() for run in runs])
        return [{"loss": float(loss), "top1": float(hits)} for loss, hits in sums / steps]

    def _draw(self, source: BlockSource, step: int) -> Draw:
        batch = source.at(step).to(self.device)
        with self._fast():
            blocks = BlockPass.of(self.draft, batch)
            return Draw.of(
                blocks, batch, self.codes, all_slots=self.all_slots, seed=self.plan.seed, step=step
            )

    def _loss(self, module: ArmModule, draw: Draw) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Mean cross-entropy at the arm's sites, and the share of them that it gets right."""
        arm = module.arm
        sites = draw.sites(arm)
        with self._fast():
            scores = module(module.blocks(draw.blocks, draw.batch), sites, *draw.told(arm, sites)).float()
        labels = draw.labels(sites)
        count = (labels >= 0).sum().clamp(min=1)
        loss = F.cross_entropy(scores, labels, ignore_index=-1, reduction="sum") / count
        return loss, (scores.argmax(dim=-1) == labels).sum() / count

    def _fast(self) -> torch.autocast:
        return fast_autocast(self.device.type)

    def _source(self, store: FeatureStore, indices: Sequence[int]) -> BlockSource:
        plan = self.plan
        return BlockSource(
            store,
            indices,
            block_size=self.draft.config.block_size,
            sequences=plan.sequences,
            anchors=plan.anchors,
            seed=plan.seed,
        )

    def _about(self, module: ArmModule) -> dict[str, Any]:
        return {
            "draft": self.fingerprint,
            "all_slots": self.all_slots,
            "rank": self.rank,
            "message": self.message,
            "seed": self.plan.seed,
            "parameters": sum(p.numel() for p in module.parameters()),
            "plan": self._budget(),
        }

    def _budget(self) -> dict[str, Any]:
        """What all arms of a folder must have in common."""
        chosen = asdict(self.plan) | {"rates": list(self.plan.rates), "all_slots": self.all_slots}
        return {name: value for name, value in chosen.items() if name not in _CHOICES}

    def _refuse_other_runs(self) -> None:
        for name, record in trained(self.folder).items():
            if record["draft"] != self.fingerprint:
                raise UsageError(
                    f"{self.folder} holds the injector {name!r} of another draft; give each draft a folder of its own."
                )
            changed = [key for key, value in self._budget().items() if record["plan"].get(key) != value]
            if changed:
                raise UsageError(
                    f"{self.folder} holds injectors of another plan ({', '.join(changed)}); choose another folder."
                )


def _frozen(draft: Draft) -> Draft:
    """A copy that nothing trains, its matrices in the dtype they are multiplied in, lest every call cast them."""
    copy, dtype = borrowed(draft), fast_dtype(draft.head.device.type)
    copy.head = copy.head.to(dtype)
    for module in copy.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    return copy.requires_grad_(False)


def _share(step: int, steps: int) -> float:
    """Linear warm-up, then cosine to zero."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
