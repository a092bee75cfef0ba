"""Gates held at a value: shut, open, at their mean, or at what they were on some other block.

A clamp acts at one place: the gates of one layer, those of the last write (which rank the candidates), or all of them.
"mean" holds every channel at its mean over the arena and its slots, so what is lost is that the gate responds; "drawn"
gives every slot the gates the same slot had on a block drawn at random, so that their spread stays and only the match
is lost. Entry points: `clamps`, `under_clamp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.decoding.offline import Rounds, walk
from dspine_probe.drafts import Context
from dspine_probe.errors import UsageError
from dspine_probe.experiments.contrast import Scores
from dspine_probe.experiments.gates.readings import LAST_WRITE_GATE, GateReadings, outcome, spine_of
from dspine_probe.hook_checks import Hook
from dspine_probe.hooks import HookedDraft
from dspine_probe.training.anchors import Batch
from dspine_probe.training.features import Sequence as Answer

ALL, LAST_WRITE = "all", "last write"
VALUES = ("0", "1", "mean", "drawn")


@dataclass(frozen=True)
class Clamp:
    """One place ("1"…"L", "last write", "all"), one value, and the hooks that hold it there."""

    place: str
    value: str
    hooks: Sequence[tuple[str, Hook]]


@dataclass(frozen=True)
class ClampScores:
    """What a clamp leaves right: by unary scores, by the walk, and the label's log-probability."""

    right: Scores
    right_walked: Scores
    log_prob: Scores


def clamps(readings: GateReadings, values: Sequence[str], seed: int) -> list[Clamp]:
    """Every value at every layer, at the last write, and at all of them.

    Raises:
        UsageError: a value is none of `VALUES`.
    """
    unknown = [value for value in values if value not in VALUES]
    if unknown or not values:
        raise UsageError(f"gates cannot be clamped to {unknown}; choose from {', '.join(VALUES)}.")
    names = [f"blocks.{layer}.inject.hook_gate" for layer in range(len(readings.gates))]
    seen: dict[str, Tensor] = dict(zip(names, readings.gates, strict=True)) | {
        LAST_WRITE_GATE: readings.last_write
    }
    at = {str(layer): [name] for layer, name in enumerate(names, start=1)}
    at |= {LAST_WRITE: [LAST_WRITE_GATE], ALL: list(seen)}
    return [
        Clamp(place, value, [(name, _hold(value, seen[name], seed, name)) for name in held])
        for place, held in at.items()
        for value in values
    ]


def under_clamp(hooked: HookedDraft, clamp: Clamp, batch: Batch, context: Context) -> ClampScores:
    """Predictions for a batch's real blocks while the clamp holds."""
    with hooked.hooks(clamp.hooks):
        found = outcome(spine_of(hooked), batch, context)
    labels = batch.tokens[batch.real.flatten(), 1:].cpu()
    return ClampScores(found.right, (found.walked == labels).float(), found.log_prob)


def walk_clamped(hooked: HookedDraft, clamp: Clamp, answers: Sequence[Answer]) -> list[Rounds]:
    """The rounds in which the clamped draft would have decoded each answer."""
    with hooked.hooks(clamp.hooks):
        return walk(hooked.draft, answers)


def _hold(value: str, seen: Float[Tensor, "block draft_slot *message"], seed: int, name: str) -> Hook:
    if value in ("0", "1"):
        return _constant(float(value))
    if value == "mean":
        mean = seen.flatten(0, -2).mean(0)
        return lambda gate, hook: mean.to(gate).expand_as(gate).clone()
    return _drawn(seen, derive_generator(seed, f"drawn gates of {name}"))


def _constant(value: float) -> Callable[[Tensor, HookPoint], Tensor]:
    return lambda gate, hook: torch.full_like(gate, value)


def _drawn(
    seen: Float[Tensor, "block draft_slot *message"], generator: torch.Generator
) -> Callable[[Tensor, HookPoint], Tensor]:
    def hook(gate: Float[Tensor, "row draft_slot *message"], hook: HookPoint) -> Tensor:
        return seen[torch.randint(len(seen), (len(gate),), generator=generator)].to(gate)

    return hook
