"""The injection experiment as a command: its options, and how a request is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.request import NothingToMeasure, Request, option
from dspine_probe.experiments.injection_depth.measure import InjectionConfig, injection_depth
from dspine_probe.experiments.injection_depth.objective import InjectionPlan
from dspine_probe.experiments.injection_depth.result import InjectionDepthResult
from dspine_probe.experiments.injection_depth.store import InjectorSet, shipped_injectors
from dspine_probe.experiments.injection_depth.training import train_injectors
from dspine_probe.training.features import FeatureStore


@dataclass(frozen=True)
class InjectionOptions:
    """What `probe injection-depth` takes as options."""

    injectors: Path | None = option(
        None, "Folder with one folder of injectors a draft, by name; default: the shipped ones."
    )
    features: tuple[Path, ...] = option((), "A folder made by `features`: train what is missing on it; repeatable.")
    blocks: int = option(15_360, "Blocks that each injector is trained on.", min=1)
    group: tuple[str, ...] = option((), "Train only this group of arms; repeat for more. [default: all]")
    rate: tuple[float, ...] = option((), "Peak learning rate; repeat to choose one for each arm by short runs.")
    fast: bool = option(False, "Only the injector of each depth, true and wrong codes.")
    seed: int = 0


def run(request: Request, options: InjectionOptions) -> InjectionDepthResult:
    """Train what is missing, if there are features, and measure the drafts of a request that have injectors."""
    if options.features and options.injectors is None:
        raise UsageError("training needs a folder of its own; name it with --injectors.")
    folders = _folders(request, options.injectors)
    if options.features:
        plan = InjectionPlan(blocks=options.blocks)
        plan = replace(plan, groups=options.group or plan.groups, rates=options.rate or plan.rates)
        store = FeatureStore.open(*options.features)
        for name, draft in request.drafts.items():
            train_injectors(
                draft,
                request.target,
                store,
                folders[name],
                plan,
                precision=request.precision,
                on_progress=request.on_progress,
            )
    sets = {name: InjectorSet.load(folder, request.drafts[name], request.target) for name, folder in folders.items()}
    config = InjectionConfig(fast=options.fast, seed=options.seed)
    return injection_depth(
        {name: request.drafts[name] for name in sets},
        sets,
        request.target,
        request.arena,
        config=replace(config, shares=()) if options.fast else config,
        precision=request.precision,
        on_progress=lambda _name, done, total: request.on_progress("injection", done, total),
    )


def _folders(request: Request, injectors: Path | None) -> dict[str, Path]:
    """Where each draft's injectors are; drafts without shipped ones are left out."""
    if injectors is not None:
        return {name: injectors / name for name in request.drafts}
    shipped = {name: shipped_injectors(name) for name in request.drafts}
    found = {name: folder for name, folder in shipped.items() if folder is not None}
    if not found:
        raise NothingToMeasure(f"there are no injectors of {', '.join(request.drafts)}; train them first.")
    return found
