"""The joint experiment: what a code can reach, that plain and shielded passes agree, training, and the result."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from test_injection_depth import LENGTH, LETTERS, SLOTS, random_texts, store_of
from tiny import tiny_draft, tiny_target
from torch import Tensor

from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.intervals import macro
from dspine_probe.experiments.injection_depth.injectors import TRANSFER, Codes
from dspine_probe.experiments.joint_injection.arms import JointPlan, load_joint, train_joint
from dspine_probe.experiments.joint_injection.measure import JointOptions, arms_of, measure, sequence_draws
from dspine_probe.experiments.joint_injection.objective import ALL_SLOTS, ONE_SLOT, JointArm, JointObjective
from dspine_probe.experiments.joint_injection.table import ACCURACY, CONTRAST, TRUE, WRONG, JointInjectionResult
from dspine_probe.plots.joint_injection import by_depth
from dspine_probe.training.anchors import Batch
from dspine_probe.training.batches import StepBatches
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.run import DraftPlan

TARGET = tiny_target(stop_ids=(2, 9))
CODES = Codes.of(TARGET.head, 8, 0)


def some_batch() -> Batch:
    config = TrainConfig(blocks=6, sequences=2, anchors=3)
    (batch,) = StepBatches(store_of(random_texts()), None, config, SLOTS + 1).at(0)
    return batch


def objective(arm: JointArm, *, open_write: bool = True) -> JointObjective:
    made = JointObjective(tiny_draft(TARGET, is_causal=True), arm, CODES, message=6)
    if open_write:
        made.injector.write.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    return made


def hidden(made: JointObjective, batch: Batch, message: Tensor) -> Tensor:
    with torch.no_grad():
        return made.hidden(batch, message)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("sites", [ALL_SLOTS, ONE_SLOT])
def test_an_untrained_injector_leaves_the_plain_block(depth: int, sites: str):
    batch, made = some_batch(), objective(JointArm(depth, sites), open_write=False)
    message = made.message(TRANSFER, batch.tokens, torch.Generator())
    torch.testing.assert_close(hidden(made, batch, message), hidden(made, batch, None))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_code_reaches_its_own_slot_and_in_the_all_slots_reading_those_behind_it(depth: int):
    """Exactly nothing else: later codes have no gradient at earlier slots, shielded codes none at any other."""
    batch = some_batch()
    for sites in (ALL_SLOTS, ONE_SLOT):
        made = objective(JointArm(depth, sites))
        message = made.message(TRANSFER, batch.tokens, torch.Generator()).requires_grad_()
        states = made.hidden(batch, message)
        for slot in range(1, SLOTS + 1):
            (gradient,) = torch.autograd.grad(states[:, slot - 1].square().sum(), message, retain_graph=True)
            reached = [slot - 2 - index for index in range(SLOTS - 1) if gradient[:, index].abs().max() > 0]
            passed_on = sites == ALL_SLOTS and depth < 2
            expected = [] if slot == 1 else list(range(slot - 2, -1, -1)) if passed_on else [0]
            assert reached == expected, f"{sites}, depth {depth}, slot {slot}"


def test_after_the_last_layer_both_readings_are_the_same():
    batch = some_batch()
    shared, alone = (objective(JointArm(2, sites)) for sites in (ALL_SLOTS, ONE_SLOT))
    message = shared.message(TRANSFER, batch.tokens, torch.Generator())
    torch.testing.assert_close(hidden(shared, batch, message), hidden(alone, batch, message))


def test_a_shielded_slot_is_what_a_block_with_this_one_code_would_hold():
    batch, alone = some_batch(), objective(JointArm(1, ONE_SLOT))
    shared = objective(JointArm(1, ALL_SLOTS))
    message = alone.message(TRANSFER, batch.tokens, torch.Generator())
    found = hidden(alone, batch, message)
    layers = shared.draft.run_layers
    context = shared.draft.encode_context(batch.taps)
    inputs = shared.draft.block_inputs(context, batch.anchor_tokens, batch.anchors, SLOTS + 1)
    with torch.no_grad():
        x = layers(shared.draft.embed_block(batch.anchor_tokens, SLOTS + 1), inputs, 0, 1).residuals[-1]
        for slot in range(2, SLOTS + 1):
            one = x.clone()
            one[:, slot] = shared.injector(x[:, slot], message[:, slot - 2])
            expected = shared.draft.ln_final(layers(one, inputs, 1, 2).residuals[-1])[:, slot]
            torch.testing.assert_close(found[:, slot - 1], expected)


def test_a_bidirectional_draft_and_an_unknown_depth_are_refused():
    with pytest.raises(UsageError, match="bidirectional"):
        JointObjective(tiny_draft(TARGET), JointArm(1), CODES, 6)
    with pytest.raises(UsageError, match="0…2"):
        JointObjective(tiny_draft(TARGET, is_causal=True), JointArm(3), CODES, 6)


def walks(count: int = 40) -> Tensor:
    """Steps of 1 in a ring, four times in five, else a jump: the last token says more than the anchor before it."""
    generator = torch.Generator().manual_seed(1)
    jumps = torch.randint(0, LETTERS, (count, LENGTH), generator=generator)
    stays = torch.rand(count, LENGTH, generator=generator) < 0.8
    return 10 + torch.where(stays, 1, jumps).cumsum(dim=1) % LETTERS


PLAN = JointPlan(
    TrainConfig(blocks=64 * 60, sequences=4, anchors=16, lr=1e-2, mixed_precision="no"),
    DraftPlan("dflash", layers=2, block_size=SLOTS + 1, draft_vocab=None, warm=False, mask_token_id=63, causal=True),
)
ARMS = arms_of(JointOptions(depth=(1, 2), seeds=1, noise=False))


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> JointInjectionResult:
    """Arms on texts in which a token follows from the last one."""
    folder, store = tmp_path_factory.mktemp("joint"), store_of(walks(80))
    train_joint(ARMS, PLAN, TARGET, store, folder)
    return measure({arm: partial(load_joint, arm, PLAN, TARGET, store, folder) for arm in ARMS}, TARGET, store, PLAN)


def accuracy(result: JointInjectionResult, **wanted: object) -> float:
    (row,) = result.select(metric=ACCURACY, slot=f"2-{SLOTS}", **wanted)["mean"]
    return float(row)


def test_arms_learn_what_the_predecessor_tells_and_a_wrong_code_misleads_them(result: JointInjectionResult):
    assert len(ARMS) == 5
    for depth in (1, 2):
        told = accuracy(result, depth=depth, sites=ALL_SLOTS, given=TRUE)
        assert told > accuracy(result, depth=None) + 0.15
        assert told > accuracy(result, depth=depth, sites=ALL_SLOTS, given=WRONG) + 0.3


def test_the_contrast_is_paired_and_the_result_survives_the_disk(result: JointInjectionResult, tmp_path: Path):
    row = result.select(metric=CONTRAST, sites=ALL_SLOTS).iloc[0]
    shallow, late = (accuracy(result, depth=depth, sites=ALL_SLOTS, given=TRUE) for depth in (1, 2))
    assert row["mean"] == pytest.approx(shallow - late) and row["low"] <= row["mean"] <= row["high"]
    result.save(tmp_path)
    again = JointInjectionResult.load(tmp_path)
    (claim,) = again.claims()
    assert claim == result.claims()[0], "before and after the disk"
    assert claim.verdict.effect in ("undecided", "negligible in 1 seed", "shown in 1 seed", "reversed in 1 seed")
    assert "1 seed" in claim.here and len(again.findings()) == 3
    assert by_depth(again).figure.data


def test_training_is_not_repeated_and_other_settings_are_refused(tmp_path: Path):
    store, arm = store_of(walks()), JointArm(1)
    short = dataclasses.replace(PLAN, training=dataclasses.replace(PLAN.training, blocks=64))
    train_joint([arm], short, TARGET, store, tmp_path)
    before = (tmp_path / arm.name / "arm.safetensors").stat().st_mtime_ns
    train_joint([arm], short, TARGET, store, tmp_path)
    assert (tmp_path / arm.name / "arm.safetensors").stat().st_mtime_ns == before
    longer = dataclasses.replace(PLAN, training=dataclasses.replace(PLAN.training, blocks=128))
    with pytest.raises(UsageError, match="blocks"):
        train_joint([arm], longer, TARGET, store, tmp_path)
    with pytest.raises(UsageError, match="no finished arm"):
        load_joint(JointArm(2), short, TARGET, store, tmp_path)


def test_intervals_resample_whole_sequences():
    """Blocks of a sequence that are all alike are worth one observation."""
    group = torch.arange(10).repeat_interleave(50)
    by_sequence = (torch.arange(10) % 2).repeat_interleave(50)[:, None].float()
    alike = macro(by_sequence, sequence_draws(group, seed=0))
    spread = macro(by_sequence, sequence_draws(torch.arange(500), seed=0))
    assert float(alike.high - alike.low) > 4 * float(spread.high - spread.low)
