"""All experiments, from which the `probe` commands, the claims ledger and the report are built.

An entry names everything by import path ("module:attribute"), so that nothing heavy is imported before it is needed. A
new experiment is one entry here:

* `result`: a subclass of `Result`; what it `claims()` goes into the ledger, what it `findings()` into the report.
* `config`: a dataclass; its fields made with `option(...)` become options of `dspine-probe probe NAME`. A field `seed`
  takes the common `--seed`.
* `run`: a function (Request, config) -> result. It raises `NothingToMeasure` where a request holds nothing for it,
  and may return None when it has only prepared something.
* `figures`: functions result -> FigureBlock, a mapping of name to block, or None where there is nothing to draw.
* `reproduced`: the config's fields, as far as they differ from the defaults, with which `make reproduce` runs it;
  None leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Experiment:
    """One entry.

    drafts: the command's default drafts; empty, and it takes none. defaults: other defaults of common options.
    command: whether it is a `probe` command; acceptance has the command `evaluate` instead.
    """

    name: str
    summary: str
    result: str
    config: str
    run: str
    figures: tuple[str, ...]
    drafts: tuple[str, ...] = ("dflash", "dspine")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reproduced: Mapping[str, Any] | None = None
    command: bool = True

    def load_result_class(self) -> Any:
        """The class of its results."""
        return imported(self.result)

    def load_config(self) -> Any:
        """The class of its config."""
        return imported(self.config)

    def load_run(self) -> Any:
        """The function that measures."""
        return imported(self.run)

    def draw(self, result: Any) -> dict[str, Any]:
        """All figures of a result by file name, in reading order."""
        blocks: dict[str, Any] = {}
        for path in self.figures:
            name, drawn = f"{result.NAME}_{path.split(':')[1]}", imported(path)(result)
            if isinstance(drawn, Mapping):
                blocks |= {f"{name}_{part}": block for part, block in drawn.items()}
            elif drawn is not None:
                blocks[name] = drawn
        return blocks


def imported(path: str) -> Any:
    """What "module:attribute" names."""
    module, attribute = path.split(":")
    return getattr(import_module(module), attribute)


def _figures(module: str, *functions: str) -> tuple[str, ...]:
    return tuple(f"dspine_probe.plots.{module}:{function}" for function in functions)


_ALL = (
    Experiment(
        "emergence",
        "Where in depth and in the block a prediction becomes readable.",
        result="dspine_probe.experiments.emergence.table:EmergenceResult",
        config="dspine_probe.experiments.emergence.measure:EmergenceConfig",
        run="dspine_probe.experiments.emergence.measure:run",
        figures=_figures("emergence", "heatmaps", "slot_curves", "controls"),
        reproduced={"train_rows": 2048, "validation_rows": 512},
    ),
    Experiment(
        "corruption",
        "What a wrong predecessor costs its successor, against a wrong token farther back (the paper's −31.8).",
        result="dspine_probe.experiments.corruption.result:CorruptionResult",
        config="dspine_probe.experiments.corruption.config:CorruptionOptions",
        run="dspine_probe.experiments.corruption.measure:run",
        figures=_figures("corruption", "places", "slots", "picks", "protocols"),
        reproduced={"fast": True},
    ),
    Experiment(
        "injection-depth",
        "What the true predecessor's code is worth, injected at each depth of a frozen draft (the paper's +14.8).",
        result="dspine_probe.experiments.injection_depth.result:InjectionDepthResult",
        config="dspine_probe.experiments.injection_depth.command:InjectionOptions",
        run="dspine_probe.experiments.injection_depth.command:run",
        figures=_figures("injection_depth", "by_depth", "by_reliability"),
        drafts=("dflash",),
        reproduced={"fast": True},
    ),
    Experiment(
        "joint-injection",
        "What the true predecessor's code is worth by depth, in a causal draft trained to use it (the paper's +14.8).",
        result="dspine_probe.experiments.joint_injection.table:JointInjectionResult",
        config="dspine_probe.experiments.joint_injection.measure:JointOptions",
        run="dspine_probe.experiments.joint_injection.measure:run",
        figures=_figures("joint_injection", "by_depth"),
        drafts=(),
    ),
    Experiment(
        "supervision",
        "Supervise a DFlash's intermediate layers by nothing, codes or tokens, and compare acceptance.",
        result="dspine_probe.experiments.supervision.result:SupervisionResult",
        config="dspine_probe.experiments.supervision.command:SupervisionOptions",
        run="dspine_probe.experiments.supervision.command:run",
        figures=_figures("supervision", "arms", "curves", "cosines", "ranks"),
        drafts=(),
    ),
    Experiment(
        "gates",
        "What the gates of a DSpine follow, and what it costs to clamp them.",
        result="dspine_probe.experiments.gates.table:GatesResult",
        config="dspine_probe.experiments.gates.measure:GatesConfig",
        run="dspine_probe.experiments.gates.measure:run",
        figures=_figures("gates", "heatmaps", "followed", "clamped"),
        drafts=("dspine",),
    ),
    Experiment(
        "probing",
        "What linear probes read at every depth, beside control tasks and an untrained draft.",
        result="dspine_probe.experiments.probing.table:ProbingResult",
        config="dspine_probe.experiments.probing.measure:ProbingConfig",
        run="dspine_probe.experiments.probing.measure:run",
        figures=_figures("probing", "curves"),
    ),
    Experiment(
        "acceptance",
        "How many tokens a round of greedy speculative decoding commits, exactly and offline.",
        result="dspine_probe.experiments.acceptance.table:AcceptanceResult",
        config="dspine_probe.experiments.acceptance.measure:AcceptanceOptions",
        run="dspine_probe.experiments.acceptance.measure:run",
        figures=_figures("acceptance", "bars", "survival", "over_blocks"),
        reproduced={},
        command=False,
    ),
    Experiment(
        "speed",
        "From acceptance to tokens per second: every draft and plain decoding, predicted and measured.",
        result="dspine_probe.experiments.speed.result:SpeedResult",
        config="dspine_probe.experiments.speed.measure:SpeedConfig",
        run="dspine_probe.experiments.speed.measure:speed",
        figures=_figures("speed", "tokens_per_second", "time_per_token", "speedup_by_set", "speedup_by_rows"),
        defaults={"limit": 32, "max_new_tokens": 128},
        reproduced={"rows": (1,), "temperature": (0.0,), "cost_repeats": 0, "prompts": 7, "max_new_tokens": 64},
    ),
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
"""By name, in the order of commands, ledger and report."""
