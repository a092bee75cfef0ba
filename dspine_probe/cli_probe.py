"""`dspine-probe probe NAME`: one finding a command, with its table, record and figures; `ledger` sums them up.

All commands measure the same kind of arena: held-out prompts, the target's greedy answers to them, and one list of
anchors. `--arena FOLDER` keeps it, so that the next command need not answer the prompts again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dspine_probe.cli_options import (
    Anchors,
    ArenaFolder,
    Drafts,
    Features,
    Limit,
    Longest,
    Output,
    Prompts,
    Seed,
    TargetName,
    arena_of,
    bars_on_stderr,
    engines_named,
    load,
    load_one,
    load_target,
    named,
    write_out,
)
from dspine_probe.errors import UsageError

app = typer.Typer(help="Measure one finding: table, record and figures.", no_args_is_help=True)


@app.command("corruption")
def corruption_command(
    draft: Drafts = ["dflash", "dspine"],
    fine_tuned: Annotated[
        list[str] | None,
        typer.Option(
            help="PARENT=FOLDER: a draft trained with --visible-prefix from that draft (protocol B)."
        ),
    ] = None,
    target: TargetName = "embedded",
    prompts: Prompts = ["lab"],
    limit: Limit = None,
    max_new_tokens: Longest = 96,
    anchors: Anchors = 8,
    arena: ArenaFolder = None,
    output: Output = Path("figures"),
    fast: Annotated[bool, typer.Option(help="Fewer anchors and kinds of corruption.")] = False,
    seed: Seed = 0,
) -> None:
    """What a wrong predecessor costs its successor, against a wrong token farther back (the paper's −31.8)."""
    from dataclasses import replace

    from dspine_probe.experiments.corruption import CorruptionConfig, corruption
    from dspine_probe.plots import corruption as plots

    answering, loaded = load(target, draft)
    adapted = {name: load_one(folder, answering) for name, folder in named(fine_tuned or ()).items()}
    config = replace(CorruptionConfig.fast() if fast else CorruptionConfig(), seed=seed)
    with bars_on_stderr() as bars:
        field = arena_of(answering, loaded, prompts, limit, max_new_tokens, anchors, arena, seed, bars)
        result = corruption(
            loaded,
            answering,
            field,
            fine_tuned=adapted,
            config=config,
            on_step=lambda _what, done, total: bars.show("corruption", done, total),
        )
    blocks = {
        f"corruption_{plot.__name__}": plot(result) for plot in (plots.places, plots.slots, plots.picks)
    }
    if set(result.data["headline_slots"]) - {"A"}:
        blocks["corruption_protocols"] = plots.protocols(result)
    write_out(result, output, blocks)


@app.command("injection-depth")
def injection_command(
    draft: Drafts = ["dflash"],
    injectors: Annotated[
        Path | None,
        typer.Option(help="Folder with one folder of injectors a draft, by name; default: the shipped ones."),
    ] = None,
    features: Features = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks that each injector is trained on.")] = 15_360,
    group: Annotated[
        list[str] | None, typer.Option(help="Train only this group of arms; repeat for more. [default: all]")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Peak learning rate; repeat to choose one for each arm by short runs."),
    ] = None,
    target: TargetName = "embedded",
    prompts: Prompts = ["lab"],
    limit: Limit = None,
    max_new_tokens: Longest = 96,
    anchors: Anchors = 8,
    arena: ArenaFolder = None,
    output: Output = Path("figures"),
    fast: Annotated[
        bool, typer.Option(help="Only the injector of each depth, true and wrong codes.")
    ] = False,
    seed: Seed = 0,
) -> None:
    """What the true predecessor's code is worth, told at each depth of a frozen draft (the paper's +14.8)."""
    from dspine_probe.experiments.injection_depth import (
        InjectionConfig,
        InjectionPlan,
        InjectorSet,
        injection_depth,
        train_injectors,
    )
    from dspine_probe.files import data_dir
    from dspine_probe.plots import injection_depth as plots
    from dspine_probe.training.features import FeatureStore

    answering, loaded = load(target, draft)
    folder = injectors or data_dir() / "injectors"
    if features and injectors is None:
        raise UsageError("training needs a folder of its own; name it with --injectors.")
    config = InjectionConfig(fast=fast, seed=seed, shares=() if fast else InjectionConfig().shares)
    with bars_on_stderr() as bars:
        if features:
            plan = InjectionPlan(blocks=blocks)
            plan = replace(plan, groups=tuple(group or plan.groups), rates=tuple(rate or plan.rates))
            store = FeatureStore.open(*features)
            for name, one in loaded.items():
                train_injectors(one, answering, store, folder / name, plan, on_progress=bars.show)
        sets = {name: InjectorSet.load(folder / name, one, answering) for name, one in loaded.items()}
        field = arena_of(answering, loaded, prompts, limit, max_new_tokens, anchors, arena, seed, bars)
        result = injection_depth(loaded, sets, answering, field, config=config, on_progress=bars.show)
    figures = {"injection_by_depth": plots.by_depth(result)}
    if config.shares:
        figures["injection_by_reliability"] = plots.by_reliability(result)
    write_out(result, output, figures)


@app.command("supervision")
def supervision_command(
    arms: Annotated[Path, typer.Option(help="Folder of trained arms, `<arm>-<seed>`, and their runs.")],
    features: Features = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks that each arm is trained on.")] = 102_400,
    lr: Annotated[
        list[float] | None, typer.Option(help="Peak rate; repeat to choose one for each arm by short runs.")
    ] = None,
    tuning_blocks: Annotated[
        int, typer.Option(min=1, help="Blocks of each run that chooses a rate.")
    ] = 25_600,
    variants: Annotated[bool, typer.Option(help="Also the other codes, one seed each.")] = True,
    worker: Annotated[int, typer.Option(min=0, help="Which of the processes that train this is.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="How many processes train; each takes whole arms.")] = 1,
    target: TargetName = "embedded",
    prompts: Prompts = ["lab"],
    limit: Limit = None,
    max_new_tokens: Longest = 96,
    anchors: Anchors = 8,
    arena: ArenaFolder = None,
    output: Output = Path("figures"),
    seed: Seed = 0,
) -> None:
    """Supervise a DFlash's intermediate layers by nothing, codes or tokens, and compare acceptance."""
    from dspine_probe.cli_training import fast_target
    from dspine_probe.experiments import supervision as experiment
    from dspine_probe.plots import supervision as plots
    from dspine_probe.precision import mixed_precision
    from dspine_probe.training.features import FeatureStore
    from dspine_probe.training.optimization import TrainConfig

    rates = tuple(lr or [1e-3])
    chosen = experiment.headline_arms() | (experiment.variant_arms() if variants else {})
    training = TrainConfig(blocks=blocks, lr=rates[0], mixed_precision=mixed_precision())
    plan = experiment.ArmsPlan(chosen, training, rates=rates, tuning_blocks=tuning_blocks)
    if features:
        store, teacher = FeatureStore.open(*features), fast_target(target)
        experiment.train_arms(plan, teacher, store, arms, worker=worker, workers=workers)
    if worker:
        return  # the first process measures, once the others are done
    runs = experiment.trained(plan, arms)
    if not runs:
        raise UsageError(f"{arms} holds no finished arm; train them by naming --features.")
    answering = load_target(target)
    first = {"first": load_one(next(iter(next(iter(runs.values())).values())).checkpoint, answering)}
    with bars_on_stderr() as bars:
        field = arena_of(answering, first, prompts, limit, max_new_tokens, anchors, arena, seed, bars)
        tried = experiment.rates_tried(arms, list(plan.arms))
        result = experiment.supervision(answering, runs, field, rates=tried, on_progress=bars.show)
    drawn = (plots.arms, plots.curves, plots.cosines, plots.ranks)
    write_out(result, output, {f"supervision_{plot.__name__}": plot(result) for plot in drawn})


@app.command("gates")
def gates_command(
    draft: Drafts = ["dspine"],
    target: TargetName = "embedded",
    prompts: Prompts = ["lab"],
    limit: Limit = None,
    max_new_tokens: Longest = 96,
    anchors: Anchors = 8,
    arena: ArenaFolder = None,
    output: Output = Path("figures"),
    seed: Seed = 0,
) -> None:
    """What the gates of a DSpine follow, and what it costs to clamp them."""
    from dspine_probe.drafts import DSpine
    from dspine_probe.experiments.gates import GatesConfig, gates
    from dspine_probe.plots import gates as plots

    answering, loaded = load(target, draft)
    gated = {name: one for name, one in loaded.items() if isinstance(one, DSpine)}
    without = [name for name in loaded if name not in gated]
    if without:
        raise UsageError(f"the draft {without[0]!r} has no gates; name drafts of the kind dspine.")
    with bars_on_stderr() as bars:
        field = arena_of(answering, loaded, prompts, limit, max_new_tokens, anchors, arena, seed, bars)
        assert answering.tokenizer is not None
        config = GatesConfig(seed=seed)
        result = gates(gated, field, answering.tokenizer, config=config, on_progress=bars.show)
    drawn = (plots.heatmaps, plots.followed, plots.clamped)
    write_out(result, output, {f"gates_{plot.__name__}": plot(result) for plot in drawn})


@app.command("probing")
def probing_command(
    draft: Drafts = ["dflash", "dspine"],
    target: TargetName = "embedded",
    prompts: Prompts = ["lab"],
    limit: Limit = None,
    max_new_tokens: Longest = 96,
    anchors: Anchors = 8,
    arena: ArenaFolder = None,
    output: Output = Path("figures"),
    seed: Seed = 0,
) -> None:
    """What linear probes read at every depth, beside control tasks and an untrained draft."""
    from dspine_probe.experiments.probing import ProbingConfig, probing
    from dspine_probe.plots import probing as plots

    answering, loaded = load(target, draft)
    with bars_on_stderr() as bars:
        field = arena_of(answering, loaded, prompts, limit, max_new_tokens, anchors, arena, seed, bars)
        result = probing(loaded, field, config=ProbingConfig(seed=seed), on_progress=bars.show)
    write_out(result, output, {f"probing_{name}": plots.curves(result, name) for name in loaded})


@app.command("speed")
def speed_command(
    draft: Drafts = ["dflash", "dspine"],
    target: TargetName = "embedded",
    prompts: Prompts = ["lab"],
    limit: Limit = 32,
    max_new_tokens: Longest = 128,
    rows: Annotated[list[int], typer.Option(min=1, help="Prompts decoded at once; repeat.")] = [1, 4, 16],
    temperature: Annotated[list[float], typer.Option(help="0 is greedy; repeat.")] = [0.0, 1.0],
    engine: Annotated[str, typer.Option(help="'fast' (CPU, packed weights) or 'reference'.")] = "fast",
    output: Output = Path("figures"),
    seed: Seed = 0,
) -> None:
    """From acceptance to tokens per second: every draft and plain decoding, predicted and measured."""
    from dspine_probe.experiments.bench import BenchConfig, bench
    from dspine_probe.plots import speed as plots
    from dspine_probe.prompts import load_all_prompts
    from dspine_probe.sampling import Sampling

    answering, loaded = load(target, draft)
    samplings = tuple(Sampling(one) for one in temperature)
    config = BenchConfig(max_new_tokens, samplings, tuple(rows), seed=seed)
    asked = load_all_prompts(prompts, limit=limit)
    with bars_on_stderr() as bars:
        result = bench(
            answering, loaded, asked, config=config, engines=engines_named(engine), on_progress=bars.show
        )
    figures = {
        "speed_time_per_token": plots.time_per_token(result),
        "speed_by_set": plots.speedup_by_set(result),
    }
    if len(rows) > 1:
        figures["speed_by_rows"] = plots.speedup_by_rows(result)
    write_out(result, output, figures)


def ledger(
    results: Annotated[Path, typer.Argument(help="Folder with saved results.")] = Path("data/results"),
    output: Annotated[Path, typer.Option(help="The ledger to write.")] = Path("docs/claims.md"),
) -> None:
    """Write the claims ledger from saved results: the paper's numbers beside ours, with every control."""
    from dspine_probe.experiments.ledger import write_ledger

    filed = write_ledger(results, output)
    typer.echo(f"{len(filed)} measured claims in {output}")
