"""`dspine-probe probe NAME`: one experiment a command, built from the registry, with its table, record and figures.

An option is either common to all commands or a field of the experiment's config (`common.request.option`). Commands are
built when asked for: `probe --help` imports no experiment. All measure the same kind of arena, held-out prompts with
the target's greedy answers and one list of anchors; `--arena FOLDER` keeps it for the next command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from dspine_probe.cli import options as common
from dspine_probe.experiments.registry import EXPERIMENTS, Experiment


class _Probes(TyperGroup):
    """The experiments of the registry; only the one that is run is imported, not those that are listed."""

    listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, one in EXPERIMENTS.items() if one.command]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        experiment = EXPERIMENTS[cmd_name]
        if self.listing:
            return TyperCommand(cmd_name, help=experiment.summary)
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, help=experiment.summary)(_command(experiment))
        return get_command(single)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


app = typer.Typer(cls=_Probes, help="Measure one finding: table, record and figures.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure one finding: table, record and figures."""


def _command(experiment: Experiment) -> Callable[..., None]:
    """A function with a parameter for every option, which typer turns into a command."""
    config = experiment.load_config()
    hints = get_type_hints(config)
    own = {
        part.name: _parameter(part.name, _on_the_command_line(hints[part.name]), part)
        for part in fields(config)
        if part.metadata.get("help")
    }
    shared = _common(experiment)

    def command(**given: Any) -> None:
        _run(experiment, {name: given.pop(name) for name in own}, given)

    parameters = [shared.pop("draft")] if experiment.drafts else []
    shared.pop("draft", None)
    parameters += [*own.values(), *shared.values()]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _common(experiment: Experiment) -> dict[str, Parameter]:
    """The options that all commands share, with the experiment's defaults."""
    options: dict[str, tuple[Any, Any]] = {
        "draft": (common.Drafts, list(experiment.drafts)),
        "target": (common.TargetName, "embedded"),
        "prompts": (common.Prompts, ["lab"]),
        "limit": (common.Limit, None),
        "max_new_tokens": (common.Longest, 96),
        "anchors": (common.Anchors, 8),
        "arena": (common.ArenaFolder, None),
        "output": (common.Output, Path("figures")),
        "precision": (common.PrecisionName, "auto"),
        "seed": (common.Seed, 0),
    }
    return {
        name: Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=experiment.defaults.get(name, default))
        for name, (kind, default) in options.items()
    }


def _parameter(name: str, kind: Any, part: Any) -> Parameter:
    default = part.default if part.default is not MISSING else part.default_factory()
    if isinstance(default, tuple):
        default = list(default) or None
    option = typer.Option(help=part.metadata["help"], min=part.metadata["min"])
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default)


def _on_the_command_line(hint: Any) -> Any:
    """What typer reads for a field of this type: lists for tuples, and names or folders for drafts."""
    if _is_drafts(hint):
        return list[str] | None
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]] | None  # type: ignore[misc]
    return hint


def _is_drafts(hint: Any) -> bool:
    """Whether a field is a mapping of names to drafts."""
    return any(get_origin(one) is Mapping for one in (hint, *get_args(hint)))


def _run(experiment: Experiment, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Measure, save and draw."""
    from dspine_probe.experiments.common.request import Request
    from dspine_probe.precision import Precision, default_device
    from dspine_probe.prompts import load_all_prompts

    prompts = load_all_prompts(given["prompts"], limit=given["limit"])
    precision = Precision.resolve(given["precision"], default_device())
    target, drafts = common.load(given["target"], given.get("draft", ()))
    config = experiment.load_config()
    hints = get_type_hints(config)
    values: dict[str, Any] = {"seed": given["seed"]} if "seed" in hints else {}
    for name, value in own.items():
        if _is_drafts(hints[name]):
            folders = common.named(value or ())
            values[name] = {named: common.load_one(folder, target) for named, folder in folders.items()}
        else:
            values[name] = tuple(value or ()) if get_origin(hints[name]) is tuple else value
    with common.bars_on_stderr() as bars:
        request = Request(
            target,
            drafts,
            prompts,
            max_new_tokens=given["max_new_tokens"],
            anchors=given["anchors"],
            seed=given["seed"],
            folder=given["arena"],
            precision=precision,
            on_progress=bars.show,
        )
        result = experiment.load_run()(request, config(**values))
    if result is not None:
        common.write_out(result, given["output"], experiment.draw(result))
