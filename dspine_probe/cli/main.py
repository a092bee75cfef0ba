"""The program `dspine-probe`: its groups of commands, and what becomes of a fault.

Each command reads its options, calls into the package and prints what comes back. Heavy modules are imported inside
the commands, so that `--help` answers at once. Faults become one sentence on stderr and an exit status here and nowhere
else: 2 for a request that cannot be met, 1 for work that failed, 130 for Ctrl-C; `--debug` adds the traceback. Entry
point: `main`.
"""

import errno
import json
import traceback
from typing import Annotated, Any

import typer
from rich.console import Console

from dspine_probe import __version__
from dspine_probe.cli import corpora, experiments, probe, training
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
            Console(stderr=True, highlight=False).print(f"dspine-probe: {sentence}", markup=False, soft_wrap=True)
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Hook, train and measure the draft models of speculative decoding."""


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """Show versions, devices, cache, and what would not work here and why; exit 1 if something essential is missing."""
    from dspine_probe.doctor import examine, render

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        Console().print(*render(report), sep="\n\n")
    if not report.sound:
        raise typer.Exit(1)


for command in (
    corpora.generate_data, corpora.synthesize, training.features, training.train,
    experiments.evaluate, experiments.reproduce, experiments.ledger,
):  # fmt: skip
    app.command()(command)
app.add_typer(probe.app, name="probe")


def main() -> None:
    """Run the command line with the arguments of the process."""
    app(prog_name="dspine-probe")
