"""The commands that measure drafts as a whole: `evaluate`, `reproduce`, and the `ledger` of what was measured."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspine_probe.cli.options import (
    AnswerLength,
    BatchSize,
    Drafts,
    Output,
    PrecisionName,
    Seed,
    TargetName,
    bars_on_stderr,
    load,
    named,
    writable,
    writable_file,
)


def evaluate(
    draft: Drafts,
    prompts: Annotated[
        list[str] | None, typer.Option(help="'lab' (default), a JSONL file, or a folder of them; repeat for more.")
    ] = None,
    target: TargetName = "embedded",
    max_new_tokens: AnswerLength = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of each file.")] = None,
    output: Annotated[
        Path | None, typer.Option(callback=writable, help="Folder for acceptance.csv and acceptance.json.")
    ] = None,
    batch_size: BatchSize = 32,
    seed: Seed = 0,
    precision: PrecisionName = "auto",
) -> None:
    """Measure how many tokens a round of greedy speculative decoding commits, exactly and offline (auto: in fp32)."""
    from dspine_probe.experiments import acceptance
    from dspine_probe.experiments.console import acceptance_table
    from dspine_probe.precision import EXACT, Precision
    from dspine_probe.prompts import load_all_prompts

    rows = load_all_prompts(prompts or ["lab"], limit=limit)
    chosen = EXACT if precision == "auto" else Precision.resolve(precision)
    model, drafts = load(target, draft, chosen)
    with bars_on_stderr() as bars:
        result = acceptance.evaluate(
            model, drafts, rows, max_new_tokens=max_new_tokens, batch_size=batch_size, seed=seed, on_progress=bars.show
        )
    if output is not None:
        result.save(output)
    Console().print(acceptance_table(result))


def reproduce(
    output: Output = Path("figures/reproduce"),
    draft: Annotated[
        list[str] | None, typer.Option(help="Drafts to compare; default: the shipped dflash and dspine.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=24, help="Longest answer.")] = 96,
    seed: Seed = 0,
) -> None:
    """Measure the findings on the embedded target and the shipped drafts, and write figures and a report."""
    from dspine_probe import report
    from dspine_probe.drafts.checkpoint import locate
    from dspine_probe.experiments import reproduction
    from dspine_probe.experiments.common.request import Request
    from dspine_probe.experiments.console import frame_table
    from dspine_probe.prompts import load_prompts

    names = draft or ["dflash", "dspine"]
    for folder in named(names).values():
        locate(folder)  # before the target is fetched, like the check of the prompts
    prompts = load_prompts("lab", limit=limit)
    reproduction.refuse_few(prompts)
    console = Console(stderr=True, highlight=False)
    console.print("Loading the target (fetched and converted once, about 20 seconds) and the drafts")
    target, drafts = load("embedded", names)
    with bars_on_stderr() as bars:
        request = Request(
            target,
            drafts,
            prompts,
            max_new_tokens=max_new_tokens,
            anchors=reproduction.ANCHORS,
            seed=seed,
            on_progress=bars.show,
        )
        found = reproduction.reproduce(request, lambda so_far: console.print(report.lead(so_far)))
    page, notes = report.write(found, output)
    lead = report.lead(found)
    if lead:
        Console(highlight=False).print(lead)
    Console().print(frame_table(found.summary(), title=f"{target.name}, greedy, 95 % intervals over prompts"))
    for sentence in found.findings():
        Console(highlight=False).print(f"- {sentence}")
    for note in notes:
        console.print(note)
    typer.echo(f"report: {page}  ({found.seconds:.0f} s)")


def ledger(
    results: Annotated[Path, typer.Argument(help="Folder with saved results.")] = Path("data/results"),
    output: Annotated[Path, typer.Option(callback=writable_file, help="The ledger to write.")] = Path("docs/claims.md"),
) -> None:
    """Write the claims ledger from saved results: the paper's numbers beside ours, with every control."""
    from dspine_probe.experiments.ledger import write_ledger

    filed = write_ledger(results, output)
    typer.echo(f"{len(filed)} measured claims in {output}")
