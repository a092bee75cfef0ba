"""Commands that make corpora: the target answers prompts, given or written by itself."""

from pathlib import Path
from typing import Annotated

import typer

from dspine_probe.cli.options import (
    AnswerLength,
    BatchSize,
    FolderToWrite,
    PrecisionName,
    Seed,
    TargetName,
    Worker,
    Workers,
    load_fast_target,
)


def generate_data(
    prompts: Annotated[
        Path, typer.Argument(help="JSONL with `prompt` or `turns`, and `id` and `domain` if you have them.")
    ],
    folder: FolderToWrite,
    target: TargetName = "embedded",
    tokens: Annotated[int | None, typer.Option(min=1, help="Stop at this many kept response tokens.")] = None,
    max_new_tokens: AnswerLength = 320,
    batch_size: BatchSize = 192,
    boxed_share: Annotated[float, typer.Option(help="Share of maths prompts asked to box the answer.")] = 0.0,
    without_prompts: Annotated[bool, typer.Option(help="Store prompt ids only, for texts not to be shared.")] = False,
    worker: Worker = 0,
    workers: Workers = 1,
    precision: PrecisionName = "auto",
) -> None:
    """Let the target answer prompts at T=0 and pack what is worth training on; a rerun resumes."""
    from dspine_probe.prompts import load_prompts
    from dspine_probe.training import regenerate

    part = regenerate.Worker(worker, workers)
    rows = load_prompts(prompts)
    model = load_fast_target(target, precision, folder / regenerate.SETTINGS)
    corpus = regenerate.regenerate(
        model,
        regenerate.encode_prompts(model, rows, boxed_share=boxed_share),
        folder,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        token_budget=tokens,
        worker=part,
        notes={"prompts": prompts.name, "boxed_share": boxed_share},
    )
    if without_prompts:
        corpus.save(folder, include_prompts=False)
    typer.echo(f"{len(corpus.examples):,} answers, {corpus.response_tokens:,} tokens in {folder}")


def synthesize(
    folder: FolderToWrite,
    target: TargetName = "embedded",
    tokens: Annotated[int, typer.Option(min=1, help="Stop at this many kept response tokens.")] = 200_000,
    max_new_tokens: AnswerLength = 320,
    batch_size: BatchSize = 192,
    seed: Seed = 0,
    worker: Worker = 0,
    workers: Workers = 1,
    precision: PrecisionName = "auto",
) -> None:
    """Let the target write prompts itself and answer them at T=0, with no data at all; a rerun resumes."""
    from dspine_probe.training import regenerate, synthesis

    part = regenerate.Worker(worker, workers)
    corpus = synthesis.synthesize(
        load_fast_target(target, precision, folder / regenerate.SETTINGS),
        folder,
        token_budget=tokens,
        max_new_tokens=max_new_tokens,
        sampling=synthesis.TurnSampling(seed=seed, batch_size=batch_size),
        worker=part,
    )
    typer.echo(f"{len(corpus.examples):,} answers, {corpus.response_tokens:,} tokens in {folder}")
