"""What the files of a finished training run say: its settings, and how it went against blocks trained.

`refuse_unlike` sees to it that arms differ in supervision alone; `curve` gives rows of a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any

from dspine_probe.errors import UsageError
from dspine_probe.experiments.supervision.arms import ArmRun, Runs
from dspine_probe.training.records import METRICS, VALIDATION, read_rows

_MAY_DIFFER = ("lr", "seed", "save_every", "log_every")


def refuse_unlike(runs: Runs, settings: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    """Arms may differ in supervision, seeds and learning rate, and in nothing else."""
    first: tuple[str, dict[str, Any]] | None = None
    for arm, by_seed in runs.items():
        for seed in by_seed:
            found = settings[arm][seed]
            if found["training"]["seed"] != seed:
                raise UsageError(
                    f"the draft given as seed {seed} of {arm} was trained with seed {found['training']['seed']}; "
                    "name it by its own."
                )
            fixed = {k: v for k, v in found["plan"].items() if not k.startswith("supervision_")}
            fixed |= {k: v for k, v in found["training"].items() if k not in _MAY_DIFFER}
            first = first or (arm, fixed)
            unlike = [name for name, value in fixed.items() if first[1].get(name) != value]
            if unlike:
                name = unlike[0]
                raise UsageError(
                    f"{arm} (seed {seed}) was trained with {name} {fixed[name]} and {first[0]} with "
                    f"{first[1].get(name)}; arms must be trained alike to be compared."
                )


def curve(run: ArmRun, clip: float) -> Iterator[dict[str, Any]]:
    """Rows (metric, blocks, layer, value) for every validation of a run and the steps logged since the one before.

    `validation` is held-out tokens per anchor. `cross_entropy`, `loss` and `layer_loss` are means, `grad_norm` is the
    median norm of the draft's gradient before clipping, `clipped` the share of steps in which it was above `clip`.
    """
    logged = read_rows(run.run / METRICS)
    before = 0
    for row in read_rows(run.run / VALIDATION):
        step, blocks = int(row["step"]), int(row["blocks"])
        yield {"metric": "validation", "blocks": blocks, "value": float(row["tokens_per_anchor"])}
        steps = [one for one in logged if before < int(one["step"]) <= step]
        before = step
        if not steps:
            continue
        norms = [float(one["grad_norm"]) for one in steps]
        yield {"metric": "grad_norm", "blocks": blocks, "value": median(norms)}
        yield {"metric": "clipped", "blocks": blocks, "value": fmean(norm > clip for norm in norms)}
        for metric in ("cross_entropy", "loss"):
            yield {"metric": metric, "blocks": blocks, "value": fmean(float(one[metric]) for one in steps)}
        parts = [json.loads(one["parts"]) for one in steps]
        for name in parts[0]:
            value = fmean(part[name] for part in parts)
            layer = int(name.rsplit("_", 1)[1])
            yield {"metric": "layer_loss", "blocks": blocks, "layer": layer, "value": value}
