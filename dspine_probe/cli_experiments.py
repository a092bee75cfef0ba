"""The commands that measure drafts; `cli` registers them and turns their faults into sentences."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspine_probe.cli_options import bars_on_stderr, load_one, load_target


def evaluate(
    draft: Annotated[
        list[str],
        typer.Option(help="Name of a shipped draft or a checkpoint folder; repeat to compare several."),
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="'lab' (default), a JSONL file, or a folder of them; repeat for more."),
    ] = None,
    target: Annotated[str, typer.Option(help="'embedded', a hub id or a folder.")] = "embedded",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of each file.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for acceptance.csv and acceptance.json.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts side by side.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
) -> None:
    """Measure how many tokens a round of greedy speculative decoding commits, exactly and offline, in fp32."""
    from dspine_probe.experiments import evaluation
    from dspine_probe.experiments.console import acceptance_table
    from dspine_probe.prompts import load_all_prompts

    rows = load_all_prompts(prompts or ["lab"], limit=limit)
    answering = load_target(target)
    drafts = {name: load_one(name, answering) for name in draft}
    with bars_on_stderr() as bars:
        result = evaluation.evaluate(
            answering,
            drafts,
            rows,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            seed=seed,
            on_progress=bars.show,
        )
    if output is not None:
        result.save(output)
    Console().print(acceptance_table(result))


def reproduce(
    output: Annotated[Path, typer.Option(help="Folder for report, figures and tables.")] = Path(
        "figures/reproduce"
    ),
    draft: Annotated[
        list[str] | None, typer.Option(help="Drafts to compare; default: the shipped dflash and dspine.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=3, help="Use only the first prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=24, help="Longest answer.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits and bootstraps.")] = 0,
) -> None:
    """Measure the findings on the embedded target and the shipped drafts, and write figures and a report."""
    from dspine_probe import report
    from dspine_probe.drafts.checkpoint import load_draft
    from dspine_probe.experiments.console import StageBars, frame_table
    from dspine_probe.experiments.injection_depth import InjectorSet, shipped_injectors
    from dspine_probe.experiments.reproduction import ReproductionConfig
    from dspine_probe.experiments.reproduction import reproduce as run
    from dspine_probe.prompts import load_prompts
    from dspine_probe.target import Target

    console = Console(stderr=True)
    console.print("Loading the target (fetched and converted once, about 20 seconds) and the drafts")
    target = Target.load("embedded")
    drafts = {name: load_draft(name, target) for name in draft or ["dflash", "dspine"]}
    folders = {name: folder for name in drafts if (folder := shipped_injectors(name))}
    injectors = {name: InjectorSet.load(folder, drafts[name], target) for name, folder in folders.items()}
    with StageBars(console) as bars:
        found = run(
            target,
            drafts,
            load_prompts("lab", limit=limit),
            injectors=injectors,
            config=ReproductionConfig(max_new_tokens=max_new_tokens, seed=seed),
            on_progress=bars.show,
        )
    page, notes = report.write(found, output)
    Console().print(frame_table(found.summary(), title=f"{target.name}, greedy, 95 % intervals over prompts"))
    for sentence in found.findings():
        Console(highlight=False).print(f"- {sentence}")
    for note in notes:
        console.print(note, highlight=False)
    typer.echo(f"report: {page}  ({found.seconds:.0f} s)")
