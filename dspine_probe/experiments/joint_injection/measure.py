"""What is the predecessor's code worth, by the depth at which it enters a draft that was trained to use it?

Finished arms are read on held-out sequences: accuracy of every slot when slots 2…T receive the true code of the token
before them, and when they receive a wrong one, the draft's own guess, or noise. Contrasts between arms are taken on the
same blocks. Readings, estimands and rules: `docs/protocols.md`, P2.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.answers import second_choices
from dspine_probe.experiments.common.intervals import Draws, Scores, difference, macro, per_slot, set_weights
from dspine_probe.experiments.common.request import Request, option
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.injection_depth.injectors import NOISE, TRANSFER
from dspine_probe.experiments.joint_injection.arms import JointPlan, load_joint, train_joint
from dspine_probe.experiments.joint_injection.objective import ALL_SLOTS, FIRST_SLOT, ONE_SLOT, JointArm, JointObjective
from dspine_probe.experiments.joint_injection.table import (
    ACCURACY,
    CONTRAST,
    DRAFT,
    FACTORS,
    GUESS,
    HELD_OUT,
    HISTORY,
    OVER_NOISE,
    TRUE,
    WRONG,
    JointInjectionResult,
)
from dspine_probe.precision import Precision
from dspine_probe.target import Target
from dspine_probe.training.anchors import Batch, make_batch
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.validation import held_out_anchors, split

SHALLOW = 1
"""The shallow depth of the contrast."""
_PER_SEQUENCE = 16


@dataclass(frozen=True)
class JointOptions:
    """What `probe joint-injection` takes as options."""

    arms: Path | None = option(None, "Folder of trained arms, one folder each.")
    features: tuple[Path, ...] = option((), "A folder made by `features`; repeatable. Its held-out part is read.")
    blocks: int = option(51_200, "Blocks that each arm is trained on.", min=1)
    seeds: int = option(3, "Seeds 0…n−1 of every arm.", min=1)
    depth: tuple[int, ...] = option((0, 1, 3, 5), "A depth of injection; repeatable. The contrast is 1 minus the last.")
    one_slot: bool = option(True, "Also with codes that one slot sees alone, at the two depths of the contrast.")
    noise: bool = option(True, "Also with noise in place of codes, at the two depths of the contrast.")
    lr: float = option(1e-3, "Peak learning rate of the draft.")
    injector_rate: float = option(1.0, "The injector's rate as a share of the draft's.")
    train: bool = option(True, "Train arms that are missing.")


def arms_of(options: JointOptions) -> list[JointArm]:
    """The arms of a request, all of one seed before the next."""
    ends = (SHALLOW, max(options.depth))
    kinds: list[tuple[int | None, str, str]] = [(depth, ALL_SLOTS, TRANSFER) for depth in (None, *options.depth)]
    kinds += [(depth, ONE_SLOT, TRANSFER) for depth in ends if options.one_slot]
    kinds += [(depth, ALL_SLOTS, NOISE) for depth in ends if options.noise]
    return [JointArm(*kind, seed) for seed in range(options.seeds) for kind in kinds]


def run(request: Request, options: JointOptions) -> JointInjectionResult:
    """Train what is missing and measure all arms on the held-out sequences of the features."""
    if options.arms is None or not options.features:
        raise UsageError("name the folder of trained arms with --arms, and the features they are trained and read on.")
    if SHALLOW not in options.depth or max(options.depth) <= SHALLOW:
        raise UsageError(f"the contrast needs depth {SHALLOW} and a later one; give both with --depth.")
    precision = request.precision or Precision.resolve()
    target = Target.load(request.target.name, dtype=precision.dtype, device=request.target.device)
    store = FeatureStore.open(*options.features)
    training = TrainConfig(blocks=options.blocks, lr=options.lr, mixed_precision=precision.accelerate)
    plan = JointPlan(training, injector_rate=options.injector_rate)
    arms = arms_of(options)
    if options.train:
        train_joint(
            arms,
            plan,
            target,
            store,
            options.arms,
            on_log=lambda name, report: request.on_progress(name, report.step, report.total_steps),
        )
    modules = {arm: partial(load_joint, arm, plan, target, store, options.arms) for arm in arms}
    return measure(modules, target, store, plan, seed=request.seed)


def measure(
    arms: Mapping[JointArm, Callable[[], JointObjective]],
    target: Target,
    store: FeatureStore,
    plan: JointPlan,
    *,
    seed: int = 0,
) -> JointInjectionResult:
    """Read arms, loaded one after another, on the held-out sequences of `store`.

    Raises:
        UsageError: fewer than two held-out sequences are long enough for a block.
    """
    began = time.monotonic()
    batches = held_out_blocks(store, plan.draft.block_size)
    group = torch.cat([torch.full((len(b.tokens),), i) for i, b in enumerate(batches)])
    found = {arm: _read(load(), batches, target, seed) for arm, load in arms.items()}
    draws = sequence_draws(group, seed=seed)
    rows = RowBuilder(FACTORS)
    for arm, by_given in found.items():
        for given, scores in by_given.items():
            _add(rows, draws, arm, given, scores)
    _contrasts(rows, draws, {arm: by_given[_own(arm)] for arm, by_given in found.items()})
    return JointInjectionResult(
        rows.table(),
        config={"plan": asdict(plan), "seed": seed, "anchors_per_sequence": _PER_SEQUENCE},
        drafts={DRAFT: {"target": target.name, "block_size": plan.draft.block_size, "layers": plan.draft.layers}},
        data={"sequences": len(batches), "blocks": len(group), "features": store.fingerprint},
        seconds=time.monotonic() - began,
    )


def held_out_blocks(store: FeatureStore, block_size: int) -> list[Batch]:
    """One batch for every held-out sequence: up to 16 evenly spaced anchors with a full block of text ahead."""
    batches = []
    for index in split(store.meta.ids)[1]:
        sequence = store[index]
        anchors = held_out_anchors(sequence, block_size - 1, _PER_SEQUENCE)
        if count := len(anchors):
            batches.append(
                make_batch([sequence], [anchors], block_size=block_size, gamma=1.0, anchors_per_sequence=count)
            )
    if len(batches) < 2:
        raise UsageError(f"{len(batches)} held-out sequences are long enough for a block; give more features.")
    return batches


def sequence_draws(group: Int[Tensor, "block"], *, seed: int) -> Draws:
    """Draws that resample whole sequences, of which block i belongs to number `group[i]`."""
    count = int(group.max()) + 1
    return Draws(group, torch.zeros_like(group), (HELD_OUT,), set_weights([HELD_OUT] * count, seed=seed))


@torch.no_grad()
def _read(module: JointObjective, batches: Sequence[Batch], target: Target, seed: int) -> dict[str, Scores]:
    """Where an arm is right, by what its slots receive."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {}
    for batch in batches:
        batch = batch.to(target.device, torch.float32)
        received = {_own(module.arm): batch.tokens}
        if module.arm.depth is not None and module.arm.code == TRANSFER:
            second = second_choices(target, batch.teacher, batch.tokens[:, 1:])
            wrong = torch.cat([batch.tokens[:, :1], second], dim=1)
            received |= {WRONG: wrong, GUESS: _chosen(module, batch, None), NOISE: batch.tokens}
        for given, tokens in received.items():
            code = NOISE if given == NOISE else TRANSFER
            chosen = _chosen(module, batch, module.message(code, tokens, generator))
            found.setdefault(given, []).append((chosen == batch.tokens)[:, 1:].double().cpu())
    return {given: torch.cat(parts) for given, parts in found.items()}


def _chosen(module: JointObjective, batch: Batch, message: Tensor | None) -> Int[Tensor, "block slot"]:
    """The token that scores best at every slot, behind the anchor."""
    scores = module.draft.logits(module.hidden(batch, message).to(module.draft.head.dtype))
    return torch.cat([batch.tokens[:, :1], module.draft.to_tokens(scores.argmax(dim=-1))], dim=1)


def _own(arm: JointArm) -> str:
    """What an arm was trained to receive."""
    return NOISE if arm.code == NOISE else TRUE


def _add(rows: RowBuilder, draws: Draws, arm: JointArm, given: str, scores: Scores) -> None:
    slots = range(1, scores.shape[1] + 1)
    about: dict[str, Any] = {"draft": DRAFT, "depth": arm.depth, "metric": ACCURACY, "set": HELD_OUT, "n": len(scores)}
    factors: dict[str, Any] = {"sites": arm.sites, "code": arm.code, "given": given, "seed": arm.seed}
    receiving = macro(scores, draws, slots[FIRST_SLOT - 1 :])
    rows.add(receiving, slot=f"{FIRST_SLOT}-{slots[-1]}", **about, **factors)
    each = per_slot(scores, draws)
    for slot in slots:
        rows.add(each.at(slot - 1), slot=slot, **about, **factors)


def _contrasts(rows: RowBuilder, draws: Draws, own: Mapping[JointArm, Scores]) -> None:
    """Shallow minus late in every reading; that over the same with noise; and what all slots gain over one alone."""
    late = max((arm.depth for arm in own if arm.depth is not None), default=SHALLOW)
    differences: dict[tuple[str, str, int], Scores] = {}
    for sites, code, seed in itertools.product((ALL_SLOTS, ONE_SLOT), (TRANSFER, NOISE), {a.seed for a in own}):
        pair = [own.get(JointArm(depth, sites, code, seed)) for depth in (SHALLOW, late)]
        if pair[0] is not None and pair[1] is not None:
            differences[sites, code, seed] = (pair[0] - pair[1])[:, FIRST_SLOT - 1 :]
    for (sites, code, seed), scores in differences.items():
        slots = f"{FIRST_SLOT}-{scores.shape[1] + 1}"
        about: dict[str, Any] = {"draft": DRAFT, "set": HELD_OUT, "n": len(scores), "slot": slots}
        about |= {"sites": sites, "code": code, "given": NOISE if code == NOISE else TRUE, "seed": seed}
        rows.add(macro(scores, draws), metric=CONTRAST, **about)
        against = {OVER_NOISE: (sites, NOISE, seed), HISTORY: (ONE_SLOT, code, seed)}
        for metric, other in against.items():
            if sites == ALL_SLOTS and code == TRANSFER and other in differences:
                rows.add(difference(scores, differences[other], draws), metric=metric, **about)
