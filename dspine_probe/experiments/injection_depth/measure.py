"""Does the true predecessor help its successor more when it is injected early in the draft than late?

The trained injectors stand at one depth each of a frozen draft and all receive the same thing: the transfer code of
the true token one slot before. In a bidirectional block each slot is injected and scored alone, because its neighbour
would read its own label otherwise; in a causal block all slots are injected at once. Every condition sees the same
blocks, so all differences are paired. Entry point: `injection_depth`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import Draws, Scores
from dspine_probe.experiments.common.progress import Progress, silent
from dspine_probe.experiments.common.records import plain
from dspine_probe.experiments.injection_depth.arms import MARKOV, Arm, ArmModule, build
from dspine_probe.experiments.injection_depth.blocks import FIRST_SLOT, refuse_leak
from dspine_probe.experiments.injection_depth.question import Question, SiteScores
from dspine_probe.experiments.injection_depth.result import InjectionDepthResult
from dspine_probe.experiments.injection_depth.store import InjectorSet
from dspine_probe.experiments.injection_depth.table import (
    FLOOR_CONDITION,
    NO_OP,
    RANK_2,
    TRUE,
    Condition,
    mixed,
    tabulate,
)
from dspine_probe.precision import Precision
from dspine_probe.target import Target
from dspine_probe.training.anchors import Batch

SKIPPED = {
    "held-out token types": "labels are the target's own tokens; injectors are scored on held-out prompts, not types",
    "decoding": "true predecessors are not known when drafting, so no acceptance length belongs to these arms",
    "training from scratch": "unfrozen arms go on from the same trained draft, since a draft a depth is out of budget",
}
_FREE = ("seed", "save_every", "log_every")
"""In what the training records of one family's seeds may differ."""


@dataclass(frozen=True)
class InjectionConfig:
    """What is measured.

    shares: reliabilities below one at which the injectors trained on true codes receive the draft's own guess
        otherwise.
    fast: the arms of every depth alone, with the true token or the target's second choice; no other arm, no sweep.
    """

    shares: tuple[float, ...] = (0.0, 0.5, 0.75)
    fast: bool = False
    answers_per_batch: int = 8
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        bad = [share for share in self.shares if not 0 <= share < 1]
        if bad:
            raise UsageError(f"shares of true codes are {bad}; give numbers from 0 to below 1.")


def injection_depth(
    drafts: Mapping[str, Draft],
    injectors: Mapping[str, InjectorSet],
    target: Target,
    arena: Arena,
    *,
    config: InjectionConfig | None = None,
    precision: Precision | None = None,
    on_progress: Progress | None = None,
) -> InjectionDepthResult:
    """Score every trained arm of each draft on the arena.

    Args:
        drafts: by name; those whose own records differ in the seed alone are averaged besides being reported one by
            one.
        injectors: of each draft, under the same name.
        target: gives the second choice that a wrong code stands for.
        arena: held-out blocks of the drafts' width.
        precision: by default what `auto` gives.
        on_progress: called with (draft, answers done, answers in all).

    Raises:
        UsageError: a draft without injectors, or of another block width than the arena's.
    """
    config = config or InjectionConfig()
    _check(drafts, injectors, arena)
    precision = precision or Precision.resolve("auto", target.device)
    began = time.perf_counter()
    draws = Draws.of(arena, seed=config.seed, resamples=config.resamples)
    found = {}
    with precision.matmul(), torch.no_grad():
        for name, draft in drafts.items():
            reader = _Reader(draft, injectors[name], target, config)
            found[name] = reader.all(arena, partial(on_progress or silent, name))
    family = families(drafts)
    layers = next(iter(drafts.values())).config.num_hidden_layers
    return InjectionDepthResult(
        table=tabulate(found, family, draws, layers),
        config=plain(config) | precision.record(),
        drafts={name: _about(draft, injectors[name], family[name]) for name, draft in drafts.items()},
        data=plain({**arena.about, "skipped": SKIPPED}),
        seconds=time.perf_counter() - began,
    )


def families(drafts: Mapping[str, Draft]) -> dict[str, str]:
    """The family of every draft: those whose training records differ in the seed alone share one.

    A draft that has no such record, or no sibling, is a family by its own name. Families are called by what the
    members' names begin with.
    """
    groups: dict[str, list[str]] = {}
    for name, draft in drafts.items():
        recipe = {key: value for key, value in draft.training_record.items() if key not in _FREE}
        key = str(sorted(recipe.items())) if "seed" in draft.training_record else name
        groups.setdefault(key, []).append(name)
    found: dict[str, str] = {}
    for names in groups.values():
        family = commonprefix(names).rstrip("-_/ 0123456789") if len(names) > 1 else names[0]
        if len(names) > 1 and (not family or family in drafts):
            family = f"mean of {', '.join(names)}"
        found |= dict.fromkeys(names, family)
    return {name: found[name] for name in drafts}


class _Reader:
    """All conditions of one draft."""

    def __init__(self, draft: Draft, injectors: InjectorSet, target: Target, config: InjectionConfig) -> None:
        self.draft, self.injectors, self.target, self.config = draft, injectors, target, config
        refuse_leak(draft, all_slots=injectors.all_slots)
        self.modules = [m for m in injectors.modules.values() if not config.fast or _plain(m.arm)]
        self.no_op = build(Arm(1), draft, injectors.codes, message=injectors.message, seed=0)

    def all(self, arena: Arena, on_answers: Callable[[int, int], None]) -> dict[Condition, Scores]:
        """Whether each slot of each block is right (0 or 1, NaN in slot 1), by condition."""
        parts: dict[Condition, list[Tensor]] = {}
        done = 0
        for number, batch in enumerate(arena.batches(answers_per_batch=self.config.answers_per_batch)):
            batch = batch.to(self.draft.head.device)
            ask = Question(self.draft, batch, self.injectors, self.target, self.config.seed, number)
            for condition, hits in self._batch(ask):
                parts.setdefault(condition, []).append(_padded(hits, batch))
            done += len(batch.anchors)
            on_answers(done, len(arena.answers))
        return {condition: torch.cat(rows) for condition, rows in parts.items()}

    def _batch(self, ask: Question) -> Iterator[tuple[Condition, SiteScores]]:
        yield FLOOR_CONDITION, ask.floor()
        yield Condition(NO_OP, 1, TRUE), ask.right(self.no_op, ask.true)
        for module in self.modules:
            yield from self._arm(ask, module)

    def _arm(self, ask: Question, module: ArmModule) -> Iterator[tuple[Condition, SiteScores]]:
        """One arm with everything that it receives."""
        arm = module.arm
        if arm.reliability < 1:
            yield Condition.of(arm, mixed(arm.reliability)), ask.right(module, ask.mixture(arm.reliability))
            return
        true = ask.right(module, ask.true)
        yield Condition.of(arm), true
        if _plain(arm) or arm.late == MARKOV:
            yield Condition.of(arm, RANK_2), ask.right(module, ask.second)
        if not _plain(arm) or self.config.fast:
            return
        # Sites that are injected alone need no run for each share: what they say depends on their own code only.
        alone = self.config.shares and not self.injectors.all_slots
        guessed = ask.right(module, ask.guess) if alone else None
        for share in self.config.shares:
            mixture = (
                ask.right(module, ask.mixture(share))
                if guessed is None
                else torch.where(ask.chance < share, true, guessed)
            )
            yield Condition.of(arm, mixed(share)), mixture


def _plain(arm: Arm) -> bool:
    """An injector on the frozen draft, trained on true codes, and nothing else."""
    return arm == Arm(arm.depth)


def _padded(hits: SiteScores, batch: Batch) -> Scores:
    """Rows of the real blocks, slot 1 unmeasured."""
    rows = hits.view(len(batch.tokens), -1)
    rows = torch.cat([rows.new_full((len(rows), FIRST_SLOT - 1), float("nan")), rows], dim=1)
    return rows[batch.real.flatten()].cpu()


def _check(drafts: Mapping[str, Draft], injectors: Mapping[str, InjectorSet], arena: Arena) -> None:
    if not drafts:
        raise UsageError("no draft was given; give one or more, with injectors under the same names.")
    depths = {draft.config.num_hidden_layers for draft in drafts.values()}
    if len(depths) > 1:
        raise UsageError(f"the drafts have {sorted(depths)} layers; give drafts of one depth.")
    for name, draft in drafts.items():
        if name not in injectors:
            raise UsageError(f"the draft {name!r} has no injectors; injectors were given for {sorted(injectors)}.")
        if draft.config.num_slots != arena.slots:
            raise UsageError(
                f"the draft {name!r} has {draft.config.num_slots} slots and the arena {arena.slots}; build the arena "
                "for this draft."
            )


def _about(draft: Draft, injectors: InjectorSet, family: str) -> dict[str, Any]:
    config, unsaid = draft.config, ("arm", "losses")
    arms = {
        name: {key: value for key, value in record.items() if key not in unsaid}
        for name, record in injectors.records.items()
    }
    return {
        "architecture": config.architecture,
        "family": family,
        "seed": draft.training_record.get("seed"),
        "layers": config.num_hidden_layers,
        "causal": config.is_causal,
        "all_slots": injectors.all_slots,
        "rank": injectors.codes.rank,
        "arms": arms,
    }
