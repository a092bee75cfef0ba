"""Commands that make drafts: cache the target's states, train, write a checkpoint."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspine_probe.cli.options import (
    CheckpointToWrite,
    FolderToWrite,
    PrecisionName,
    TargetName,
    Workers,
    bars_on_stderr,
    load_fast_target,
    load_target,
    writable,
)


def features(
    folder: FolderToWrite,
    corpus: Annotated[list[Path], typer.Option(help="A packed corpus; repeat for several.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts file of corpora that were saved without prompts.")
    ] = None,
    boxed_share: Annotated[float, typer.Option(help="As it was in generate-data.")] = 0.0,
    worker: Annotated[int, typer.Option(help="Which of several processes this is; each needs its own folder.")] = 0,
    workers: Workers = 1,
    taps: Annotated[str | None, typer.Option(help="Target layers to tap, as 1,8,15; default: five spread.")] = None,
    target: TargetName = "embedded",
    precision: PrecisionName = "auto",
) -> None:
    """Run the target over corpora and keep its tapped states (about 7 KB a token for the embedded target)."""
    from dspine_probe.config import check_taps, default_taps
    from dspine_probe.prompts import load_prompts
    from dspine_probe.training.features import META, build_features
    from dspine_probe.training.regenerate import encode_prompts
    from dspine_probe.training.run import collect

    model = load_fast_target(target, precision, folder / META)
    layers = default_taps(model.num_layers) if taps is None else numbers("--taps", taps)
    check_taps(layers, model.num_layers)
    known = None if prompts is None else encode_prompts(model, load_prompts(prompts), boxed_share=boxed_share)
    examples = collect(corpus, known)[worker::workers]
    with bars_on_stderr() as bars:

        def show(done: int, total: int) -> None:
            bars.show("features, tokens", done, total)

        store = build_features(model, examples, layers, folder, on_batch=show)
    typer.echo(f"{len(store):,} sequences, {store.meta.tokens:,} tokens in {folder}")


def train(
    kind: Annotated[str, typer.Argument(help="A kind of draft: dflash, dspine or a rival.")],
    output: CheckpointToWrite,
    features: Annotated[list[Path], typer.Option(help="A folder made by `features`; repeat for several.")],
    blocks: Annotated[int, typer.Option(min=1, help="Blocks to train on, in all.")],
    work: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Where the run keeps its state and metrics; default: OUTPUT.run."),
    ] = None,
    target: TargetName = "embedded",
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of a micro-batch.")] = 4,
    anchors: Annotated[int, typer.Option(min=1, help="Anchors per sequence.")] = 16,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    gamma: Annotated[float, typer.Option(help="Decay of the slot weights, in slots.")] = 4.0,
    draft_vocab: Annotated[int, typer.Option(min=0, help="Most frequent tokens to propose; 0: all.")] = 8192,
    layers: Annotated[int, typer.Option(min=1)] = 5,
    block_size: Annotated[int, typer.Option(min=2)] = 8,
    warm: Annotated[bool, typer.Option(help="Start from the target's last layers.")] = True,
    mask_token: Annotated[
        int | None, typer.Option(help="Unused embedding row; default: the known one of the target's vocabulary.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Go on from this checkpoint, a folder or a shipped draft's name.")
    ] = None,
    visible_prefix: Annotated[
        float, typer.Option(help="Share of blocks that show the gold tokens of a random prefix.", min=0, max=1)
    ] = 0.0,
    causal: Annotated[bool, typer.Option(help="A slot sees only earlier slots; dspine always does.")] = False,
    supervision: Annotated[
        str,
        typer.Option(
            help="What a dflash's intermediate layers are trained to say: none, cosine, token-ce, expected-code, "
            "code-mse or cosine-unwhitened."
        ),
    ] = "none",
    supervision_weight: Annotated[
        float, typer.Option(help="Weight of codes in each layer, or of token-ce in the mean over layers.")
    ] = 0.5,
    schedule: Annotated[
        str, typer.Option(help="cosine: shares of --blocks. wsd: warm-up, then a constant rate, in absolute blocks.")
    ] = "cosine",
    warmup_blocks: Annotated[int, typer.Option(min=0, help="wsd: blocks over which the rate rises.")] = 12_800,
    keep_states: Annotated[
        str | None, typer.Option(help="wsd: keep the state at these numbers of blocks, as 40000,80000.")
    ] = None,
    decay_from: Annotated[
        Path | None, typer.Option(help="wsd: let the last fifth of --blocks decay from this stable run's kept state.")
    ] = None,
    replacement_blocks: Annotated[
        str, typer.Option(help="wsd, dspine: blocks until which replacement holds, and at which it is gone.")
    ] = "53000,107000",
    alignment_warmup_blocks: Annotated[
        int, typer.Option(min=0, help="wsd: blocks over which alignment or supervision rises.")
    ] = 9_344,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states and checks.")] = 200,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    precision: PrecisionName = "auto",
) -> None:
    """Train a draft; the same command goes on where it was stopped. Several devices: under `accelerate launch`."""
    import torch

    from dspine_probe.precision import Precision, recorded
    from dspine_probe.training.features import FeatureStore
    from dspine_probe.training.intermediate import Supervision
    from dspine_probe.training.optimization import TrainConfig
    from dspine_probe.training.run import PLAN, DraftPlan, Reports, train_draft
    from dspine_probe.training.trainer import StepReport
    from dspine_probe.training.validation import Validation

    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(stderr=True, highlight=False)
    began = time.monotonic()

    def log(report: StepReport) -> None:
        slots = " ".join(f"{share:.2f}" for share in report.slot_accuracy)
        left = ""
        if report.slots_per_second:
            per_step = report.blocks * (block_size - 1) / report.step / report.slots_per_second
            left = f", {(report.total_steps - report.step) * per_step / 60:.0f} min left"
        console.print(
            f"step {report.step}/{report.total_steps}: CE {report.cross_entropy:.3f}, slots {slots}, "
            f"{report.slots_per_second:,.0f} slots/s{left}"
        )

    def checked(step: int, found: Validation) -> None:
        minutes = (time.monotonic() - began) / 60
        console.print(f"step {step}: held out {found.tokens_per_anchor:.3f} tokens per anchor ({minutes:.0f} min)")

    run = work or output.with_name(output.name + ".run")
    begun = run if decay_from is None or (run / PLAN).is_file() else decay_from
    begun = begun.parent if begun.is_file() else begun
    chosen = Precision.resolve(precision, written=recorded(begun / PLAN))
    hold, end = numbers("--replacement-blocks", replacement_blocks, count=2)
    config = TrainConfig(
        blocks=blocks,
        sequences=sequences,
        anchors=anchors,
        accumulate=accumulate,
        lr=lr,
        gamma=gamma,
        optimizer=optimizer,
        seed=seed,
        save_every=save_every,
        mixed_precision=chosen.accelerate,
        visible_prefix=visible_prefix,
        schedule=schedule,
        warmup_blocks=warmup_blocks,
        replacement_blocks=(hold, end),
        alignment_warmup_blocks=alignment_warmup_blocks,
        keep_states=numbers("--keep-states", keep_states) if keep_states else (),
    )
    plan = DraftPlan(
        kind,
        layers,
        block_size,
        draft_vocab or None,
        warm,
        mask_token,
        causal,
        Supervision(supervision, supervision_weight),
        init,
    )
    store = FeatureStore.open(*features)
    model = load_target(target, chosen)
    train_draft(plan, model, store, config, run, output, reports=Reports(log, checked), decay_from=decay_from)
    typer.echo(f"checkpoint in {output}")


def numbers(option: str, text: str, *, count: int | None = None) -> tuple[int, ...]:
    """`1,8,15` as numbers, `count` of them if that is given."""
    from dspine_probe.errors import UsageError

    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or len(found) != (count or len(found)):
        raise UsageError(f"{option} {text!r} is not {count or 'a list of'} numbers; write them as 1,8.")
    return found
