"""The command line: each command reads its options, calls into the package and prints what comes back.

Heavy modules are imported inside the commands, so that `--help` answers at once. Faults become one sentence on
stderr and an exit status here and nowhere else: 2 for a request that cannot be met, 1 for work that failed, 130 for
Ctrl-C; `--debug` adds the traceback. Entry point: `main`.
"""

import errno
import json
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dspine_probe import __version__, cli_experiments, cli_probe, cli_training
from dspine_probe.errors import ProbeError, UsageError


class _Commands(typer.core.TyperGroup):
    """The command group, with faults turned into sentences and exit statuses."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if hasattr(error, "exit_code") or getattr(error, "errno", None) == errno.EPIPE:
                raise  # typer's own usage errors, and a reader such as `head` that has left
            status, sentence = _verdict(error)
            if ctx.params.get("debug"):
                traceback.print_exc()
            Console(stderr=True, highlight=False).print(
                f"dspine-probe: {sentence}", markup=False, soft_wrap=True
            )
            raise typer.Exit(status) from None


def _verdict(error: BaseException) -> tuple[int, str]:
    """The exit status and the sentence for a fault."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted; files that were finished are whole and stay"
    if isinstance(error, UsageError):
        return 2, str(error)
    if isinstance(error, ProbeError):
        return 1, str(error)
    if isinstance(error, OSError) and error.strerror:
        name = f": {error.filename}" if error.filename is not None else ""
        return 1, f"the system refused: {error.strerror}{name}"
    if isinstance(error, MemoryError):
        return 1, "memory ran out; close other programs or ask for smaller batches"
    return 1, f"internal fault, {type(error).__name__}: {error}; 'dspine-probe --debug' shows where"


app = typer.Typer(
    cls=_Commands,
    help="Hook, train and measure the draft models of speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspine-probe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a fault.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Hook, train and measure the draft models of speculative decoding."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show versions, devices, cache, and what would not work here and why; exit 1 if something essential is missing."""
    from dspine_probe.doctor import examine, render

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        Console().print(*render(report), sep="\n\n")
    if not report.sound:
        raise typer.Exit(1)


@app.command("generate-data")
def generate_data(
    prompts: Annotated[
        Path, typer.Argument(help="JSONL with `prompt` or `turns`, and `id` and `domain` if you have them.")
    ],
    folder: Annotated[
        Path, typer.Argument(help="Where the answers and the packed corpus go; a rerun resumes.")
    ],
    target: Annotated[str, typer.Option(help="'embedded', a hub id or a folder.")] = "embedded",
    tokens: Annotated[int | None, typer.Option(min=1, help="Stop at this many kept response tokens.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 320,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 192,
    boxed_share: Annotated[float, typer.Option(help="Share of maths prompts asked to box the answer.")] = 0.0,
    without_prompts: Annotated[
        bool, typer.Option(help="Store prompt ids only, for texts not to be shared.")
    ] = False,
    worker: Annotated[int, typer.Option(help="Which of the processes that share the folder this is.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="How many processes share the folder.")] = 1,
) -> None:
    """Let the target answer prompts at T=0 and pack what is worth training on."""
    from dspine_probe.prompts import load_prompts
    from dspine_probe.training.regenerate import Worker, encode_prompts, regenerate

    part = Worker(worker, workers)
    rows = load_prompts(prompts)
    answering = cli_training.fast_target(target)
    corpus = regenerate(
        answering,
        encode_prompts(answering, rows, boxed_share=boxed_share),
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


@app.command()
def synthesize(
    folder: Annotated[
        Path, typer.Argument(help="Where the turns, answers and the packed corpus go; a rerun resumes.")
    ],
    target: Annotated[str, typer.Option(help="'embedded', a hub id or a folder.")] = "embedded",
    tokens: Annotated[int, typer.Option(min=1, help="Stop at this many kept response tokens.")] = 200_000,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 320,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 192,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled user turns.")] = 0,
    worker: Annotated[int, typer.Option(help="Which of the processes that share the folder this is.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="How many processes share the folder.")] = 1,
) -> None:
    """Let the target write prompts itself and answer them at T=0, with no data at all."""
    from dspine_probe.training.regenerate import Worker
    from dspine_probe.training.synthesis import TurnSampling, synthesize

    part = Worker(worker, workers)
    sampling = TurnSampling(seed=seed, batch_size=batch_size)
    corpus = synthesize(
        cli_training.fast_target(target),
        folder,
        token_budget=tokens,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        worker=part,
    )
    typer.echo(f"{len(corpus.examples):,} answers, {corpus.response_tokens:,} tokens in {folder}")


app.command("evaluate")(cli_experiments.evaluate)
app.command("reproduce")(cli_experiments.reproduce)
app.add_typer(cli_probe.app, name="probe")
app.command("ledger")(cli_probe.ledger)
app.command("features")(cli_training.features)
app.command("train")(cli_training.train)


def main() -> None:
    """Run the command line with the arguments of the process."""
    app(prog_name="dspine-probe")


if __name__ == "__main__":
    main()
