"""Finished training runs as the supervision experiment reads them: where they are, their settings and their curves.

`refuse_unlike` sees to it that arms differ in supervision alone; `curve` gives the points of a run's own files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from dspine_probe.drafts.checkpoint import CONFIG
from dspine_probe.errors import UsageError
from dspine_probe.training.records import METRICS, VALIDATION, read_rows
from dspine_probe.training.run import PLAN
from dspine_probe.training.state import STATE

_MAY_DIFFER = ("lr", "seed", "save_every", "log_every")
Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ArmRun:
    """One trained draft and the folder its run left behind."""

    checkpoint: Path
    run: Path

    @classmethod
    def at(cls, folder: Path, name: str) -> ArmRun:
        """Where `train_arms` keeps the run of that name."""
        return cls(folder / name, folder / "runs" / name)

    @property
    def finished(self) -> bool:
        """Whether the checkpoint has been written."""
        return (self.checkpoint / CONFIG).is_file()

    def settings(self) -> dict[str, dict[str, Any]]:
        """Plan and training settings of the run, as its own files say them.

        Raises:
            UsageError: the run's folder does not hold them, or it was resumed at another rate.
        """
        for path in (self.run / PLAN, self.run / STATE):
            if not path.is_file():
                raise UsageError(f"{path} was not found; give the folder in which the arm was trained.")
        # Mapped, not read: the settings are a few bytes of a large file.
        state = torch.load(self.run / STATE, map_location="cpu", weights_only=True, mmap=True)
        rates = list(dict.fromkeys(rate for _, rate in state.get("rates", ())))
        if len(rates) > 1:
            raise UsageError(
                f"{self.run} was trained at the rate {', then '.join(f'{rate:g}' for rate in rates)}, and an arm has "
                "one; train it again in another folder."
            )
        return {"plan": json.loads((self.run / PLAN).read_text()), "training": state["config"]}


Runs = Mapping[str, Mapping[int, ArmRun]]


def refuse_unlike(settings: Mapping[str, Mapping[int, Settings]]) -> None:
    """Arms may differ in supervision, seeds and learning rate, and in nothing else.

    Raises:
        UsageError: two runs differ in something else, or one is given under another seed than its own.
    """
    first: tuple[str, dict[str, Any]] | None = None
    for arm, by_seed in settings.items():
        for seed, found in by_seed.items():
            if found["training"]["seed"] != seed:
                raise UsageError(
                    f"the draft given as seed {seed} of {arm} was trained with seed {found['training']['seed']}; "
                    "name it by its own."
                )
            fixed = {k: v for k, v in found["plan"].items() if not k.startswith("supervision_")}
            fixed |= {k: v for k, v in found["training"].items() if k not in _MAY_DIFFER}
            first = first or (arm, fixed)
            for name, value in fixed.items():
                if first[1].get(name) != value:
                    raise UsageError(
                        f"{arm} (seed {seed}) was trained with {name} {value} and {first[0]} with "
                        f"{first[1].get(name)}; arms must be trained alike to be compared."
                    )


class CurvePoint(NamedTuple):
    """A number from the files of a run: what, after how many blocks, of which layer if any, over how many things."""

    metric: str
    blocks: int
    value: float
    n: int
    layer: int | None = None


def curve(run: ArmRun, clip: float) -> Iterator[CurvePoint]:
    """Points for every validation of a run and the steps logged since the one before.

    `validation` is held-out tokens per anchor. `cross_entropy`, `loss` and `layer_loss` are means, `grad_norm` is the
    median norm of the draft's gradient before clipping, `clipped` the share of steps in which it was above `clip`.
    """
    logged = read_rows(run.run / METRICS)
    before = 0
    for row in read_rows(run.run / VALIDATION):
        step, blocks = int(row["step"]), int(row["blocks"])
        yield CurvePoint("validation", blocks, float(row["tokens_per_anchor"]), int(row["anchors"]))
        steps = [one for one in logged if before < int(one["step"]) <= step]
        before, n = step, len(steps)
        if not steps:
            continue
        norms = [float(one["grad_norm"]) for one in steps]
        yield CurvePoint("grad_norm", blocks, median(norms), n)
        yield CurvePoint("clipped", blocks, fmean(norm > clip for norm in norms), n)
        for metric in ("cross_entropy", "loss"):
            yield CurvePoint(metric, blocks, fmean(float(one[metric]) for one in steps), n)
        parts = [json.loads(one["parts"]) for one in steps]
        for name in parts[0]:
            layer = int(name.rsplit("_", 1)[1])
            yield CurvePoint("layer_loss", blocks, fmean(part[name] for part in parts), n, layer)
