"""The saved state of a run: draft, optimisers, what is trained beside the draft, and the settings it belongs to."""

from __future__ import annotations

import zipfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically
from dspine_probe.training.intermediate import READOUTS
from dspine_probe.training.objective import Objective
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.records import METRICS, VALIDATION, trim_rows

STATE = "state.pt"


def beside_draft(objective: Objective) -> dict[str, nn.Parameter]:
    """Parameters that serve the objective and are no part of the draft."""
    return {name: p for name, p in objective.named_parameters() if not name.startswith("draft.")}


def save_state(
    folder: Path,
    config: TrainConfig,
    objective: Objective,
    optimizers: list[torch.optim.Optimizer],
    step: int,
) -> None:
    """Write what the run needs to go on after `step`, and what is trained beside the draft as its own file."""
    beside = {name: p.detach().cpu() for name, p in beside_draft(objective).items()}
    state = {
        "step": step,
        "config": asdict(config),
        "draft": objective.draft.state_dict(),
        "beside": beside,
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    write_atomically(folder / STATE, lambda path: torch.save(state, path))
    if beside:
        write_atomically(folder / READOUTS, lambda path: save_file(beside, path))


def resume(
    folder: Path, config: TrainConfig, objective: Objective, optimizers: list[torch.optim.Optimizer]
) -> int:
    """Load a saved state into objective and optimisers; returns the step to go on with."""
    path = folder / STATE
    if not path.exists():
        return 0
    if not zipfile.is_zipfile(path):
        raise ProbeError(f"{path} is damaged or was cut short; delete it to start over.")
    state = torch.load(path, map_location="cpu", weights_only=True)
    before, now = asdict(TrainConfig(**state["config"])), asdict(config)
    changed = [name for name in now if now[name] != before[name]]
    beside, saved_beside = beside_draft(objective), state.get("beside", {})
    if beside.keys() != saved_beside.keys():
        changed.append("supervision")
    if changed:
        raise UsageError(
            f"{folder} was trained with other settings ({', '.join(changed)}); choose another output folder."
        )
    objective.draft.load_state_dict(state["draft"])
    with torch.no_grad():
        for name, parameter in beside.items():
            parameter.copy_(saved_beside[name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for name in (METRICS, VALIDATION):
        trim_rows(folder / name, state["step"])
    return int(state["step"])
