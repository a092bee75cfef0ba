"""The saved state of a run: draft, optimisers, auxiliary parameters, and the settings it belongs to.

`RunState` is what a run continues from; `locked` keeps a second run out of its folder; `kept_state` finds the states
that a stable run kept for decays to begin with.
"""

from __future__ import annotations

import fcntl
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically
from dspine_probe.training.intermediate import READOUTS
from dspine_probe.training.objectives.base import Objective
from dspine_probe.training.optimization import TrainConfig

STATE, LOCK = "state.pt", "run.lock"


def auxiliary_parameters(objective: Objective) -> dict[str, nn.Parameter]:
    """Parameters that serve the objective and are no part of the draft."""
    named = objective.named_parameters()
    return {name: p for name, p in named if p.requires_grad and not name.startswith("draft.")}


def kept_state(run: Path, blocks: int) -> Path:
    """The state that a stable run kept at that many blocks, in its folder; or `run` itself, if it is a file.

    Raises:
        UsageError: it kept none there.
    """
    path = run / f"state-{blocks}.pt"
    if run.is_file() or path.is_file():
        return run if run.is_file() else path
    kept = sorted(int(p.stem.removeprefix("state-")) for p in run.glob("state-*.pt"))
    raise UsageError(
        f"{run} kept no state at {blocks:,} blocks (kept: {', '.join(map(str, kept)) or 'none'}); give its "
        f"--keep-states {blocks}, or another number of --blocks: the decay begins at four fifths of it"
    )


class RunState:
    """What a run in `folder` continues from.

    step: the next step.
    rates: the peak rates it was given, each with the step from which it held.
    """

    def __init__(
        self, folder: Path, config: TrainConfig, objective: Objective, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        self.folder, self.config = folder, config
        self.objective, self.optimizers = objective, optimizers
        self.step, self.rates = 0, [(0, config.lr)]

    def save(self, step: int, name: str = STATE) -> None:
        """Write what the run needs to continue after `step`; auxiliary parameters also become a file of their own."""
        auxiliary = {key: p.detach().cpu() for key, p in auxiliary_parameters(self.objective).items()}
        state = {
            "step": step,
            "config": asdict(self.config),
            "rates": self.rates,
            "draft": self.objective.draft.state_dict(),
            "beside": auxiliary,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        write_atomically(self.folder / name, lambda path: torch.save(state, path))
        if auxiliary:
            write_atomically(self.folder / READOUTS, lambda path: save_file(auxiliary, path))

    def resume(self, origin: Path | None = None, *, processes: int = 1) -> None:
        """Load the folder's state, or else that of `origin`, where a decay begins; without either, start afresh.

        Raises:
            UsageError: it belongs to other settings, or `origin` does not stand where the decay is to begin.
            ProbeError: it is damaged.
        """
        path = self.folder / STATE
        if not path.exists():
            if origin is None:
                return
            path = origin
        if not zipfile.is_zipfile(path):
            raise ProbeError(f"{path} is damaged or was cut short; delete it to start over.")
        state = torch.load(path, map_location="cpu", weights_only=True)
        step, before = int(state["step"]), TrainConfig(**state["config"])
        changed = self.config.unlike(before)
        auxiliary, saved = auxiliary_parameters(self.objective), state.get("beside", {})
        if auxiliary.keys() != saved.keys():
            changed.append("supervision")
        if changed:
            raise UsageError(
                f"{path.parent} was trained with other settings ({', '.join(changed)}); choose another output folder."
            )
        begin = self.config.steps(processes, blocks=self.config.decay_from or 0)
        if path == origin and step != begin:
            raise UsageError(
                f"{path} stands at step {step}, and a decay over the last fifth of {self.config.blocks:,} blocks "
                f"begins at step {begin}; give the state of that step, or other --blocks."
            )
        self.objective.draft.load_state_dict(state["draft"])
        with torch.no_grad():
            for name, parameter in auxiliary.items():
                parameter.copy_(saved[name])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.rates = step, [tuple(pair) for pair in state.get("rates", [(0, before.lr)])]
        if self.rates[-1][1] != self.config.lr:
            self.rates.append((step, self.config.lr))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock of a process that died is free again.

    Raises:
        UsageError: another process holds it.
    """
    with open(folder / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UsageError(
                f"{folder} is in use by process {file.read().strip() or 'unknown'}; wait for it or stop it, or choose "
                "another output folder"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
