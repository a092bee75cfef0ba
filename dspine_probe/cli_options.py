"""What the `probe` commands share: options, loading drafts and arenas, and writing a result with its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console

from dspine_probe.errors import UsageError

if TYPE_CHECKING:
    from dspine_probe.decoding.engine import Engines
    from dspine_probe.drafts import Draft
    from dspine_probe.experiments.arena import Arena
    from dspine_probe.experiments.console import StageBars
    from dspine_probe.plots.figure_block import FigureBlock
    from dspine_probe.target import Target

TargetName = Annotated[str, typer.Option("--target", help="'embedded', a hub id or a folder.")]
Drafts = Annotated[
    list[str],
    typer.Option("--draft", help="A shipped draft, a checkpoint folder, or NAME=FOLDER; repeat for more."),
]
Prompts = Annotated[
    list[str], typer.Option("--prompts", help="'lab', a JSONL file, or a folder of them; repeat for more.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=2, help="Most prompts of each file.")]
Longest = Annotated[int, typer.Option("--max-new-tokens", min=9, help="Longest answer.")]
Anchors = Annotated[int, typer.Option("--anchors", min=1, help="Blocks drafted on each answer.")]
ArenaFolder = Annotated[
    Path | None,
    typer.Option("--arena", help="Keep answers and states here, or use those that are here already."),
]
Output = Annotated[Path, typer.Option("--output", help="Folder for table, record and figures.")]
Features = Annotated[
    list[Path] | None,
    typer.Option("--features", help="A folder made by `features`: train what is missing on it; repeatable."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of anchors, stand-ins and bootstrap.")]


class Result(Protocol):
    """What every experiment returns."""

    def save(self, folder: Path) -> None: ...

    def findings(self) -> list[str]: ...


def load(target: str, drafts: Sequence[str]) -> tuple[Target, dict[str, Draft]]:
    """The target and the drafts, by name."""
    answering = load_target(target)
    return answering, {name: load_one(folder, answering) for name, folder in named(drafts).items()}


def load_target(name: str) -> Target:
    """The target in its default dtype, on a GPU where there is one."""
    from dspine_probe.precision import default_device
    from dspine_probe.target import Target

    return Target.load(name, device=default_device())


def load_one(folder: str | Path, target: Target) -> Draft:
    """A draft by shipped name or folder."""
    from dspine_probe.drafts.checkpoint import load_draft

    return load_draft(folder, target)


def engines_named(name: str) -> Engines:
    """The engines that an option names."""
    from dspine_probe.decoding.fast_cpu import FastCpu
    from dspine_probe.decoding.reference import REFERENCE

    if name not in ("fast", "reference"):
        raise UsageError(f"--engine {name!r} is unknown; use 'fast' or 'reference'.")
    return FastCpu() if name == "fast" else REFERENCE


def named(given: Sequence[str]) -> dict[str, str]:
    """`NAME=FOLDER` as pairs; a folder alone goes by its last part."""
    pairs = [text.split("=", 1) if "=" in text else [Path(text).name, text] for text in given]
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise UsageError(f"drafts are named {', '.join(names)}; tell them apart as NAME=FOLDER.")
    return {name: folder for name, folder in pairs}


def arena_of(
    target: Target,
    drafts: Mapping[str, Draft],
    sources: Sequence[str],
    limit: int | None,
    max_new_tokens: int,
    anchors: int,
    folder: Path | None,
    seed: int,
    bars: StageBars,
) -> Arena:
    """The arena kept in `folder`, or a new one from the prompts, kept there."""
    from dspine_probe.experiments.arena import Arena
    from dspine_probe.experiments.arena_building import build_arena
    from dspine_probe.prompts import load_all_prompts

    config = next(iter(drafts.values())).config
    if folder is not None and Arena.is_in(folder):
        return Arena.load(folder)
    built = build_arena(
        target,
        load_all_prompts(sources, limit=limit),
        taps=config.target_layer_ids,
        slots=config.num_slots,
        per_answer=anchors,
        max_new_tokens=max_new_tokens,
        seed=seed,
        on_progress=bars.show,
    )
    if folder is not None:
        built.save(folder)
    return built


def bars_on_stderr() -> StageBars:
    """Progress bars that leave standard output to the result."""
    from dspine_probe.experiments.console import StageBars

    return StageBars(Console(stderr=True))


def write_out(result: Result, output: Path, blocks: Mapping[str, FigureBlock]) -> None:
    """Save the table and the figures, and print what they say."""
    from dspine_probe.plots.figure_block import write_figure

    result.save(output)
    notes = [write_figure(output / name, block) for name, block in blocks.items()]
    for sentence in result.findings():
        Console(highlight=False).print(f"- {sentence}")
    for note in sorted({note for note in notes if note}):
        Console(stderr=True, highlight=False).print(note)
    typer.echo(f"table, record and {len(blocks)} figures in {output}")
