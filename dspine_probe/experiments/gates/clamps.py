"""Gates held at a value: shut, open, at their mean, or at what they were on some other block.

A clamp acts at one place: the gates of one layer, those of the last write (which rank the candidates), or all of them.
"mean" holds every channel at its mean over the arena and its slots, so what is lost is that the gate responds; "drawn"
gives every slot the gates the same slot had on a block drawn at random, so that their spread stays and only the match
is lost. Entry points: `clamps`, `clamped_scores`, `clamped_rounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.decoding.offline import simulate_rounds
from dspine_probe.experiments.acceptance import RequestCounts, count_rounds
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.progress import Progress
from dspine_probe.experiments.gates.readings import (
    LAST_WRITE_GATE,
    GateReadings,
    Outcome,
    contexts,
    gate_names,
    outcome,
    spine_of,
)
from dspine_probe.hook_checks import Hook
from dspine_probe.hooks import HookedDraft

ALL, LAST_WRITE, UNTOUCHED = "all", "last write", "untouched"
VALUES = ("0", "1", "mean", "drawn")


@dataclass(frozen=True)
class Clamp:
    """One place ("1"…"L", "last write", "all"), one value, and the hooks that hold it there."""

    place: str
    value: str
    hooks: Sequence[tuple[str, Hook]]


NO_CLAMP = Clamp(ALL, UNTOUCHED, ())


def clamps(readings: GateReadings, values: Sequence[str], seed: int) -> list[Clamp]:
    """No clamp, then every value at every layer, at the last write, and at all of them."""
    names = gate_names(len(readings.gates))
    seen: dict[str, Tensor] = dict(zip(names, readings.gates, strict=True))
    seen[LAST_WRITE_GATE] = readings.last_write
    places = {str(layer): [name] for layer, name in enumerate(names, start=1)}
    places |= {LAST_WRITE: [LAST_WRITE_GATE], ALL: list(seen)}
    held = [NO_CLAMP]
    for place, at in places.items():
        held += [Clamp(place, value, [(name, _hold(value, seen[name], seed, name)) for name in at]) for value in values]
    return held


def clamped_scores(
    hooked: HookedDraft, arena: Arena, held: Sequence[Clamp], answers_per_batch: int, report: Progress
) -> list[Outcome]:
    """Predictions for all blocks of the arena under each clamp; `report("clamps", blocks done, blocks)` is called."""
    draft, done = spine_of(hooked), 0
    parts: list[list[Outcome]] = [[] for _ in held]
    for batch, context in contexts(draft, arena, answers_per_batch):
        for clamp, scores in zip(held, parts, strict=True):
            with hooked.hooks(clamp.hooks):
                scores.append(outcome(draft, batch, context))
        done += int(batch.real.sum())
        report("clamps", done, len(arena.prompt))
    return [Outcome(*map(torch.cat, zip(*scores, strict=True))) for scores in parts]


def clamped_rounds(
    hooked: HookedDraft, arena: Arena, held: Sequence[Clamp], per_set: int, report: Progress
) -> list[RequestCounts]:
    """Rounds of the first `per_set` answers of every set under each clamp; "drafts" are the clamps' numbers."""
    by_set = ([i for i, of in enumerate(arena.sets) if of == name] for name in arena.set_names)
    chosen = [index for members in by_set for index in members[:per_set]]
    counts: list[RequestCounts] = []
    for number, clamp in enumerate(held):
        with hooked.hooks(clamp.hooks):
            rounds = simulate_rounds(hooked.draft, [arena.answers[i] for i in chosen])
        for i, one in zip(chosen, rounds, strict=True):
            answer = arena.answers[i].id
            counts.append(count_rounds(str(number), arena.sets[i], answer, one, stopped=False, slots=arena.slots))
        report("walks", number + 1, len(held))
    return counts


def _hold(value: str, seen: Float[Tensor, "block draft_slot *message"], seed: int, name: str) -> Hook:
    if value in ("0", "1"):
        return lambda gate, hook: torch.full_like(gate, float(value))
    if value == "mean":
        mean = seen.flatten(0, -2).mean(0)
        return lambda gate, hook: mean.to(gate).expand_as(gate).clone()
    generator = derive_generator(seed, f"drawn gates of {name}")

    def drawn(gate: Tensor, hook: HookPoint) -> Tensor:
        return seen[torch.randint(len(seen), (len(gate),), generator=generator)].to(gate)

    return drawn
