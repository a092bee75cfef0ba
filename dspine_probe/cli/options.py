"""What commands share: options, loading targets, drafts and arenas, and writing a result with its figures.

Options that name something to write check it while the command line is read, before any work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dspine_probe.errors import UsageError
from dspine_probe.files import refuse_unwritable

if TYPE_CHECKING:
    from dspine_probe.drafts import Draft
    from dspine_probe.experiments.common.schema import Result
    from dspine_probe.experiments.console import StageBars
    from dspine_probe.plots.figure_block import FigureBlock
    from dspine_probe.precision import Precision
    from dspine_probe.target import Target


def writable(path: Path | None) -> Path | None:
    """Refuse a folder that could not be written in the end (a callback of options and arguments)."""
    if path is not None:
        refuse_unwritable(path)
    return path


def writable_file(path: Path) -> Path:
    """As `writable`, for a single file."""
    refuse_unwritable(path, folder=False)
    return path


def _writable_checkpoint(path: Path) -> Path:
    from dspine_probe.drafts.checkpoint import refuse_other_files

    refuse_unwritable(path)
    refuse_other_files(path)
    return path


TargetName = Annotated[str, typer.Option("--target", help="'embedded', a hub id or a folder.")]
Drafts = Annotated[
    list[str], typer.Option("--draft", help="A shipped draft, a checkpoint folder, or NAME=FOLDER; repeat for more.")
]
Prompts = Annotated[
    list[str], typer.Option("--prompts", help="'lab', a JSONL file, or a folder of them; repeat for more.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=2, help="Most prompts of each file.")]
Longest = Annotated[int, typer.Option("--max-new-tokens", min=9, help="Longest answer.")]
AnswerLength = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Rows decoded together.")]
Anchors = Annotated[int, typer.Option("--anchors", min=1, help="Blocks drafted on each answer.")]
ArenaFolder = Annotated[
    Path | None,
    typer.Option(
        "--arena",
        callback=writable,
        help="Keep answers and states here; used again if made from the same request, refused if not.",
    ),
]
Output = Annotated[Path, typer.Option("--output", callback=writable, help="Folder for table, record and figures.")]
FolderToWrite = Annotated[
    Path, typer.Argument(callback=writable, help="The folder to write; a rerun goes on with what it holds.")
]
CheckpointToWrite = Annotated[Path, typer.Argument(callback=_writable_checkpoint, help="Checkpoint folder to write.")]
PrecisionName = Annotated[
    str,
    typer.Option(
        "--precision", help="fp32, bf16, or auto: what suits the command and the machine. What is used is written down."
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Worker = Annotated[int, typer.Option("--worker", min=0, help="Which of the processes this is.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="How many processes share the work.")]


def load(target: str, drafts: Sequence[str], precision: Precision | None = None) -> tuple[Target, dict[str, Draft]]:
    """The target and the drafts by name, in fp32 unless said; drafts are located before the target is fetched."""
    from dspine_probe.drafts.checkpoint import locate

    folders = {name: locate(folder) for name, folder in named(drafts).items()}
    model = load_target(target, precision)
    return model, {name: load_one(folder, model, precision) for name, folder in folders.items()}


def load_target(name: str, precision: Precision | None = None) -> Target:
    """The target on a GPU where there is one, in fp32 unless said."""
    from dspine_probe.precision import EXACT, default_device
    from dspine_probe.target import Target

    return Target.load(name, dtype=(precision or EXACT).dtype, device=default_device())


def load_fast_target(name: str, precision: str, record: Path) -> Target:
    """The target for data and features, in what `record` says of a run that goes on, else as asked."""
    from dspine_probe.precision import Precision, recorded

    return load_target(name, Precision.resolve(precision, written=recorded(record)))


def load_one(folder: str | Path, target: Target, precision: Precision | None = None) -> Draft:
    """A draft by shipped name or folder."""
    from dspine_probe.drafts.checkpoint import load_draft

    return load_draft(folder, target, dtype=None if precision is None else precision.dtype)


def named(given: Sequence[str]) -> dict[str, str]:
    """Drafts by name: what exists as a path goes by its last part, else `NAME=FOLDER` says the name."""
    pairs = []
    for text in given:
        name, equals, folder = text.partition("=")
        whole = not equals or os.path.exists(text)
        pairs.append((Path(text).resolve().name, text) if whole else (name, folder))
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise UsageError(f"drafts are named {', '.join(names)}; tell them apart as NAME=FOLDER.")
    return dict(pairs)


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
