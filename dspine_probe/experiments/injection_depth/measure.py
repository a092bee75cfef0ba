"""Does the true predecessor help its successor more when it is told early in the draft than late?

The trained injectors of `training.py` stand at one depth each of a frozen draft and are told the same thing:
the transfer code of the true token one slot before. In a bidirectional block each slot is injected and scored alone,
because its neighbour would read its own label otherwise; in a causal block all slots are injected at once. Every
condition sees the same blocks, so all differences are paired.

Entry point: `injection_depth`. The table and what it says are in `result.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.contrast import Draws, Scores
from dspine_probe.experiments.injection_depth.arms import MARKOV, Arm, ArmModule, build
from dspine_probe.experiments.injection_depth.block_pass import FIRST_SLOT, refuse_leak
from dspine_probe.experiments.injection_depth.reading import Question
from dspine_probe.experiments.injection_depth.result import SKIPPED, InjectionDepthResult
from dspine_probe.experiments.injection_depth.store import InjectorSet
from dspine_probe.experiments.injection_depth.table import (
    FLOOR,
    NO_OP,
    NOTHING,
    RANK_2,
    TRUE,
    Condition,
    mixed,
    tabulate,
)
from dspine_probe.experiments.progress import Progress, silent
from dspine_probe.experiments.results import plain
from dspine_probe.precision import fast_matmul
from dspine_probe.target import Target
from dspine_probe.training.anchors import Batch

Found = dict[Condition, Scores]


@dataclass(frozen=True)
class InjectionConfig:
    """What is measured.

    shares: reliabilities below one at which the injectors trained on true codes are told the draft's own guess
        otherwise.
    fast: the arms of every depth alone, told the true token or the target's second choice; no other arm, no sweep.
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
    on_progress: Progress | None = None,
) -> InjectionDepthResult:
    """Score every trained arm of each draft on the arena.

    Args:
        drafts: by name; names that differ in a number at the end ("dflash-0", "dflash-1") are seeds of one draft and
            are averaged besides being reported one by one.
        injectors: of each draft, under the same name.
        target: gives the second choice that a wrong code stands for.
        arena: held-out blocks of the drafts' width.
        on_progress: called with (draft, answers done, answers in all).

    Raises:
        UsageError: a draft without injectors, or of another block width than the arena's.
    """
    config = config or InjectionConfig()
    _check(drafts, injectors, arena)
    began = time.perf_counter()
    draws = Draws.of(arena, seed=config.seed, resamples=config.resamples)
    found = {}
    with fast_matmul(), torch.no_grad():
        for name, draft in drafts.items():
            reader = _Reader(draft, injectors[name], target, config)
            tell = partial(on_progress or silent, name)
            found[name] = reader.all(arena, tell)
    layers = next(iter(drafts.values())).config.num_hidden_layers
    return InjectionDepthResult(
        table=tabulate(found, draws, layers),
        config=plain(config),
        drafts={name: _about(drafts[name], injectors[name]) for name in drafts},
        data=plain({**arena.about, "skipped": SKIPPED}),
        seconds=time.perf_counter() - began,
    )


class _Reader:
    """All conditions of one draft."""

    def __init__(self, draft: Draft, injectors: InjectorSet, target: Target, config: InjectionConfig) -> None:
        self.draft, self.injectors, self.target, self.config = draft, injectors, target, config
        refuse_leak(draft, all_slots=injectors.all_slots)
        self.modules = [m for m in injectors.modules.values() if not config.fast or _plain(m.arm)]
        self.no_op = build(Arm(1), draft, injectors.codes, message=injectors.message, seed=0)

    def all(self, arena: Arena, on_answers: Callable[[int, int], None]) -> Found:
        """Whether each slot of each block is right (0 or 1, NaN in slot 1), by condition."""
        parts: dict[Condition, list[Tensor]] = {}
        done = 0
        for number, batch in enumerate(arena.batches(answers_per_batch=self.config.answers_per_batch)):
            batch = batch.to(self.draft.head.device)
            for condition, scores in self._batch(batch, number):
                parts.setdefault(condition, []).append(_padded(scores, batch))
            done += len(batch.anchors)
            on_answers(done, len(arena.answers))
        return {condition: torch.cat(rows) for condition, rows in parts.items()}

    def _batch(self, batch: Batch, number: int) -> Iterator[tuple[Condition, Float[Tensor, "site"]]]:
        ask = Question.of(
            self.draft,
            batch,
            self.injectors.codes,
            self.target,
            all_slots=self.injectors.all_slots,
            seed=self.config.seed,
            number=number,
        )
        yield Condition(FLOOR, None, NOTHING), _right(ask.floor(), ask)
        yield Condition(NO_OP, 1, TRUE), _right(ask.answer(self.no_op, ask.true), ask)
        for module in self.modules:
            yield from self._told(ask, module)

    def _told(self, ask: Question, module: ArmModule) -> Iterator[tuple[Condition, Float[Tensor, "site"]]]:
        """One arm with everything that it is told."""
        arm = module.arm
        if arm.reliability < 1:
            yield Condition.of(arm, mixed(arm.reliability)), self._mixed(ask, module, arm.reliability)
            return
        true = _right(ask.answer(module, ask.true), ask)
        yield Condition.of(arm), true
        if _plain(arm) or arm.late == MARKOV:
            yield Condition.of(arm, RANK_2), _right(ask.answer(module, ask.second), ask)
        if not _plain(arm) or self.config.fast:
            return
        # Sites that are injected alone need no run for each share: what they say depends on their own code only.
        alone = self.config.shares and not self.injectors.all_slots
        guessed = _right(ask.answer(module, ask.guess), ask) if alone else None
        for share in self.config.shares:
            if guessed is None:
                yield Condition.of(arm, mixed(share)), self._mixed(ask, module, share)
            else:
                yield Condition.of(arm, mixed(share)), torch.where(ask.chance < share, true, guessed)

    def _mixed(self, ask: Question, module: ArmModule, share: float) -> Float[Tensor, "site"]:
        return _right(ask.answer(module, ask.mixture(share)), ask)


def _plain(arm: Arm) -> bool:
    """An injector on the frozen draft, trained on true codes, and nothing else."""
    return arm == Arm(arm.depth)


def _right(scores: Float[Tensor, "site draft_vocab"], ask: Question) -> Float[Tensor, "site"]:
    """1 where the best-scored token is the label; a label that the draft cannot propose is never met."""
    return (scores.argmax(dim=-1) == ask.labels).float()


def _padded(hits: Float[Tensor, "site"], batch: Batch) -> Scores:
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
            raise UsageError(
                f"the draft {name!r} has no injectors; injectors were given for {sorted(injectors)}."
            )
        if draft.config.num_slots != arena.slots:
            raise UsageError(
                f"the draft {name!r} has {draft.config.num_slots} slots and the arena {arena.slots}; build the arena "
                "for this draft."
            )


def _about(draft: Draft, injectors: InjectorSet) -> dict[str, Any]:
    config = draft.config
    kept = ("rate", "trials", "held_out", "parameters", "plan")
    return {
        "architecture": config.architecture,
        "layers": config.num_hidden_layers,
        "causal": config.is_causal,
        "all_slots": injectors.all_slots,
        "rank": injectors.codes.rank,
        "arms": {name: {k: record[k] for k in kept} for name, record in injectors.records.items()},
    }
