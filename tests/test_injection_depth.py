"""The injection experiment: the label leak, training that resumes, paired conditions, and the result on disk."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny import WIDTH, prompts, tiny_draft, tiny_target
from torch import Tensor

from dspine_probe.config import DSPINE
from dspine_probe.decoding.continuous import generate_greedy
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.arena import build_arena
from dspine_probe.experiments.injection_depth.arms import DEPTHS, Arm, ArmModule, borrowed, build
from dspine_probe.experiments.injection_depth.blocks import BlockPass, every_slot, one_slot
from dspine_probe.experiments.injection_depth.injectors import Codes
from dspine_probe.experiments.injection_depth.measure import InjectionConfig, families, injection_depth
from dspine_probe.experiments.injection_depth.objective import ArmObjective, InjectionPlan
from dspine_probe.experiments.injection_depth.result import InjectionDepthResult
from dspine_probe.experiments.injection_depth.store import InjectorSet
from dspine_probe.experiments.injection_depth.table import FLOOR, NO_OP, TRUE, spearman
from dspine_probe.experiments.injection_depth.training import train_injectors
from dspine_probe.files import data_dir
from dspine_probe.plots.injection_depth import by_depth, by_reliability
from dspine_probe.prompts import Prompt
from dspine_probe.training.anchors import Batch
from dspine_probe.training.batches import StepBatches
from dspine_probe.training.features import FeatureMeta, FeatureStore
from dspine_probe.training.objectives.base import Progress
from dspine_probe.training.optimization import TrainConfig
from dspine_probe.training.validation import split

TARGET = tiny_target(stop_ids=(2, 9))
SLOTS, LENGTH, PROMPT = 4, 24, 3
SMALL = InjectionPlan(
    blocks=64, trial_blocks=16, held_out_blocks=16, sequences=2, anchors=4, rates=(3e-3, 3e-2), rank=8, message=6
)
LETTERS = 8
"""Tokens used by made-up texts, few enough that guessing shows."""


def ids(train: int, held_out: int) -> list[str]:
    """Names of which the usual split holds out `held_out`."""
    names = [f"text/{n}" for n in range(60 * (held_out + 1) + train)]
    for_training, for_checking = split(names)
    return [names[i] for i in (*for_training[:train], *for_checking[:held_out])]


def store_of(texts: Tensor, held_out: int = 4) -> FeatureStore:
    """Texts with random states, so that nothing but the injected code speaks of the labels."""
    count, length = texts.shape
    generator = torch.Generator().manual_seed(8)
    taps = torch.randn(count * length, 2 * WIDTH, generator=generator)
    names = tuple(ids(count - held_out, held_out))
    meta = FeatureMeta("tiny", (0, 2), WIDTH, names, (length,) * count, (PROMPT,) * count)
    return FeatureStore([(meta, (texts.flatten(), taps, torch.randn(count * length, WIDTH)))])


def random_texts(count: int = 40) -> Tensor:
    """Tokens that nothing predicts."""
    return torch.randint(10, 10 + LETTERS, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def chained_texts(count: int = 40) -> Tensor:
    """Every token is the last one's successor in a ring."""
    start = torch.randint(0, LETTERS, (count, 1), generator=torch.Generator().manual_seed(1))
    return 10 + (start + torch.arange(LENGTH)) % LETTERS


def held_out_top1(arms: InjectorSet, name: str) -> float:
    return arms.records[name]["held_out"][-1]["top1"]


LEARN = dataclasses.replace(
    SMALL, blocks=64 * 100, trial_blocks=64, held_out_blocks=640, sequences=4, anchors=16, rates=(1e-2,), slow=0.5
)


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> InjectorSet:
    """Texts that nothing predicts, and drafts free to learn whatever helps: one slot a block, and all at once."""
    arms = [Arm(1, unfrozen=True), *(Arm(d, unfrozen=True, leak=True) for d in (1, 2))]
    folder = tmp_path_factory.mktemp("learned")
    return train_injectors(tiny_draft(TARGET), TARGET, store_of(random_texts()), folder, LEARN, arms=arms)


def test_the_naive_set_up_shows_a_gain_that_is_all_leak_and_only_at_shallow_depth(learned: InjectorSet):
    """No code predicts these tokens, so whatever exceeds chance was read from a neighbour who holds the label."""
    assert held_out_top1(learned, "depth-1-unfrozen-leak") > 2 / LETTERS
    assert held_out_top1(learned, "depth-2-unfrozen-leak") < 1.5 / LETTERS


def test_the_shielded_set_up_stays_at_chance_where_the_naive_one_is_inflated(learned: InjectorSet):
    assert held_out_top1(learned, "depth-1-unfrozen") < 1.5 / LETTERS


def test_shielded_injectors_learn_what_the_predecessor_does_tell(tmp_path: Path):
    plan = dataclasses.replace(LEARN, groups=(DEPTHS,), depths=(2,))
    arms = train_injectors(tiny_draft(TARGET), TARGET, store_of(chained_texts()), tmp_path, plan)
    assert held_out_top1(arms, "depth-2") > 6 / LETTERS


def some_batch(anchors: int = 3) -> Batch:
    """Two sequences of the store; with many anchors some blocks are dummies."""
    config = TrainConfig(blocks=2 * anchors, sequences=2, anchors=anchors)
    (batch,) = StepBatches(store_of(random_texts()), None, config, SLOTS + 1).at(0)
    return batch


def test_a_label_reaches_its_own_slot_in_the_naive_set_up_and_never_in_the_shielded_one():
    draft = tiny_draft(TARGET)
    codes = Codes.of(TARGET.head, 8, 0)
    batch, label_slot = some_batch(), 3
    other = dataclasses.replace(batch, tokens=batch.tokens.clone())
    other.tokens[:, label_slot] = (batch.tokens[:, label_slot] - 9) % LETTERS + 10
    with torch.no_grad():
        for depth in (0, 1, 2):
            module = build(Arm(depth), draft, codes, message=6, seed=0)
            module.injector.write.weight.normal_(generator=torch.Generator().manual_seed(0))
            changed = {}
            for name, sites in (
                ("naive", every_slot(*batch.tokens.shape)),
                ("shielded", one_slot(torch.full((len(batch.tokens),), label_slot))),
            ):
                here = sites.slots == label_slot
                scores = []
                for version in (batch, other):
                    predecessors = sites.before(version.tokens)
                    message = codes.message("transfer", predecessors, torch.Generator())
                    scores.append(module(BlockPass.of(draft, version), sites, predecessors, message)[here])
                changed[name] = not torch.equal(*scores)
            assert changed == {"naive": depth < 2, "shielded": False}, f"depth {depth}"


class Watched(torch.nn.Module):
    """Keeps what an arm's module is given."""

    def __init__(self, module: ArmModule) -> None:
        super().__init__()
        self.inner, self.arm, self.slow, self.own = module, module.arm, module.slow, module.own

    def pass_over(self, shared: BlockPass) -> BlockPass:
        return self.inner.pass_over(shared)

    def forward(self, blocks, sites, predecessors, codes):
        self.given = sites, predecessors, codes
        self.scores = self.inner(blocks, sites, predecessors, codes)
        return self.scores


@pytest.mark.parametrize("arm", [Arm(1), Arm(1, reliability=0.0), Arm(2, late="markov"), Arm(1, leak=True)])
def test_the_objective_draws_from_its_generator_and_scores_only_what_the_draft_can_say(arm: Arm):
    draft = tiny_draft(TARGET, trimmed=40)
    codes, batch = Codes.of(TARGET.head, 8, 0), some_batch(anchors=30)
    plan = SMALL.for_draft(draft)
    watched = Watched(build(arm, draft, codes, message=6, seed=0))
    objective = ArmObjective(watched, draft, codes, plan)

    def at(seed: int):
        found = objective(batch, Progress(0, 1, torch.Generator().manual_seed(seed)))
        return found, *watched.given

    found, sites, predecessors, _ = at(3)
    again, same, *_ = at(3)
    assert torch.equal(found.loss, again.loss) and torch.equal(sites.slots, same.slots)
    assert sites.slots.min() >= 2 and sites.slots.max() <= SLOTS
    true, guesses = sites.before(batch.tokens), sites.before(BlockPass.of(draft, batch).guesses())
    assert torch.equal(predecessors, guesses if arm.reliability < 1 else true)
    real = batch.real.flatten()[sites.blocks] & (batch.weight[sites.blocks, sites.slots - 1] > 0)
    labels = draft.to_index(batch.tokens[sites.blocks, sites.slots])
    counted = real & (labels >= 0)
    assert not real.all() and float(found.slot_counts.sum()) == float(counted.sum()) > 0
    by_hand = torch.nn.functional.cross_entropy(watched.scores[counted], labels[counted])
    torch.testing.assert_close(found.loss, by_hand)
    assert arm.leak or not torch.equal(sites.slots, at(4)[1].slots)


@pytest.fixture(scope="module", params=["dflash", "dspine"])
def trained(request, tmp_path_factory):
    """All arms of a bidirectional and of a causal draft, trained a little."""
    folder = tmp_path_factory.mktemp(request.param)
    causal = request.param == "dspine"
    draft = tiny_draft(TARGET, DSPINE, trimmed=40) if causal else tiny_draft(TARGET, trimmed=40)
    arms = train_injectors(draft, TARGET, store_of(random_texts()), folder, SMALL)
    return draft, folder, arms


def test_a_second_run_trains_only_what_is_missing_and_gives_the_same_arm(trained, tmp_path: Path):
    draft, folder, arms = trained
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert len(times) == len(arms.modules)
    lost = {name: (folder / name).read_bytes() for name in ("depth-1.safetensors", "markov.safetensors")}
    for name in lost:
        (folder / name).unlink()
    again = train_injectors(draft, TARGET, store_of(random_texts()), folder, SMALL)
    assert again.modules.keys() == arms.modules.keys()
    for name, before in times.items():
        path = folder / name
        assert (path.stat().st_mtime_ns == before) == (name not in lost)
    for name, content in lost.items():
        assert (folder / name).read_bytes() == content


def test_the_chosen_rate_is_the_best_tried_and_the_draft_is_left_alone(trained):
    draft, _, arms = trained
    for record in arms.records.values():
        assert len(record["trials"]) == 2
        assert record["trials"][str(record["rate"])] == min(record["trials"].values())
    fresh = tiny_draft(TARGET, DSPINE, trimmed=40) if draft.config.is_causal else tiny_draft(TARGET, trimmed=40)
    for ours, theirs in zip(draft.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.requires_grad
    moved = arms.modules["depth-1-unfrozen"].own.fc.weight
    assert not torch.allclose(moved, draft.fc.weight, atol=1e-3)


def test_work_of_another_draft_store_or_plan_and_damaged_files_are_refused(trained, tmp_path: Path):
    draft, folder, _ = trained
    store = store_of(random_texts())
    other = tiny_draft(TARGET, seed=5, trimmed=40)
    with pytest.raises(UsageError, match="trained with other settings: draft"):
        train_injectors(other, TARGET, store, folder, SMALL)
    with pytest.raises(UsageError, match="trained on another draft"):
        InjectorSet.load(folder, other, TARGET)
    with pytest.raises(UsageError, match="other settings: features;"):
        train_injectors(draft, TARGET, store_of(chained_texts()), folder, SMALL)
    for name, value, said in (
        ("blocks", 128, r"blocks \(64, not 128\)"),
        ("trial_blocks", 32, r"trial_blocks \(16, not 32\)"),
        ("seed", 1, r"seed \(0, not 1\)"),
        ("rates", (3e-3,), r"rates \(\[0\.003, 0\.03\], not \[0\.003\]\)"),
    ):
        with pytest.raises(UsageError, match=f"other settings: {said}"):
            train_injectors(draft, TARGET, store, folder, dataclasses.replace(SMALL, **{name: value}))
    with pytest.raises(UsageError, match="holds no injectors"):
        InjectorSet.load(tmp_path, draft, TARGET)
    with pytest.raises(UsageError, match="no injector 'depth-9'"):
        InjectorSet.load(folder, draft, TARGET, names=["depth-9"])
    (tmp_path / "depth-1.json").write_bytes((folder / "depth-1.json").read_bytes())
    (tmp_path / "depth-1.safetensors").write_bytes((folder / "depth-1.safetensors").read_bytes()[:99])
    with pytest.raises(ProbeError, match="delete it and train the arm again"):
        InjectorSet.load(tmp_path, draft, TARGET)


def test_stale_trials_of_unknown_origin_are_refused(tmp_path: Path):
    (tmp_path / "trials.json").write_text('{"depth-1": {"0.003": 0.0, "0.03": 1.0}}')
    with pytest.raises(UsageError, match=r"holds work without a plan\.json"):
        train_injectors(tiny_draft(TARGET), TARGET, store_of(random_texts()), tmp_path, SMALL)


def test_impossible_plans_are_refused(tmp_path: Path):
    draft, store = tiny_draft(TARGET), store_of(random_texts())
    with pytest.raises(UsageError, match="depth 7 lies outside"):
        train_injectors(draft, TARGET, store, tmp_path, dataclasses.replace(SMALL, depths=(1, 7)))
    with pytest.raises(UsageError, match="read its own label from slot t"):
        train_injectors(draft, TARGET, store, tmp_path, dataclasses.replace(SMALL, all_slots=True))
    with pytest.raises(UsageError, match="less than one step"):
        dataclasses.replace(SMALL, blocks=7)
    with pytest.raises(UsageError, match="do not fill one batch"):
        train_injectors(draft, TARGET, store_of(random_texts(3), 1), tmp_path, SMALL)


@pytest.fixture(scope="module")
def arena():
    asked = [Prompt(f"p{i}", f"set{i % 2}", "text") for i in range(8)]
    answers = generate_greedy(TARGET, prompts(8), max_new_tokens=24, batch_size=4)
    return build_arena(TARGET, asked, taps=(0, 2), slots=SLOTS, answers=answers, per_answer=4)


def as_seed(draft, seed: int):
    """The draft with a record that says its seed."""
    made = borrowed(draft)
    made.training_record = {"blocks": 100, "seed": seed}
    return made


@pytest.fixture(scope="module")
def measured(trained, arena) -> InjectionDepthResult:
    draft, _, arms = trained
    both = {name: as_seed(draft, seed) for seed, name in enumerate(("toy-0", "toy-1"))}
    config = InjectionConfig(resamples=40, answers_per_batch=3)
    return injection_depth(both, dict.fromkeys(both, arms), TARGET, arena, config=config)


def test_every_arm_is_scored_and_an_untrained_injector_changes_nothing(measured, trained):
    _, _, arms = trained
    top = measured.rows("toy", "top1")
    assert set(top["arm"]) == {*arms.modules, FLOOR, NO_OP} and list(measured.members("toy")) == ["toy-0", "toy-1"]
    given = set(top[top["arm"] == "depth-1"]["predecessor"])
    assert given == {"true", "rank-2", "rho 0.00", "rho 0.50", "rho 0.75"}
    nothing = measured.rows("toy", "difference", arm=f"{NO_OP} − {FLOOR}").iloc[0]
    assert nothing["mean"] == nothing["low"] == nothing["high"] == 0
    assert set(measured.select(metric="top1", arm="depth-1", predecessor=TRUE)["slot"]) == {"", "2", "3", "4"}


def test_differences_and_contrasts_are_those_of_the_accuracies(measured):
    top = measured.rows("toy-0", "top1", predecessor=TRUE).set_index("arm")["mean"]
    contrast = measured.rows("toy-0", "shallow_minus_late", predecessor=TRUE).iloc[0]
    assert contrast["arm"] == "depth 1 − depth 2"
    assert contrast["mean"] == pytest.approx(top["depth-1"] - top["depth-2"])
    for a, b in (("depth-1", "depth-1-random"), ("all", "depth-2"), ("depth-1-unfrozen", "depth-2-unfrozen")):
        row = measured.rows("toy-0", "difference", arm=f"{a} − {b}").iloc[0]
        assert row["mean"] == pytest.approx(top[a] - top[b]) and row["low"] <= row["mean"] <= row["high"]
    same = measured.rows("toy", "top1", predecessor=TRUE).set_index("arm")["mean"]
    pd.testing.assert_series_equal(same, top, check_names=False)


def test_what_is_said_can_be_saved_drawn_and_read_aloud(measured, trained, tmp_path: Path):
    draft, _, _ = trained
    measured.save(tmp_path)
    again = InjectionDepthResult.load(tmp_path)
    pd.testing.assert_frame_equal(again.frame(), measured.frame())
    text = " ".join(again.findings())
    assert "depth 1 − depth 2" in text and "by seed: toy-0" in text and "markov" in text
    assert ("leak" in text) == (not draft.config.is_causal)
    (claim,) = again.claims()
    assert claim.id == "P2" and any(control.name.startswith(NO_OP) and control.passed for control in claim.controls)
    missing = {control.name for control in claim.controls if control.outcome == "not measured"}
    assert missing == (set() if draft.config.is_causal else {"a causal trunk"})
    for block in (by_depth(again), by_reliability(again)):
        assert len(block.figure.data) >= 1 and "toy" in block.alt and len(block.table)


def test_a_causal_draft_of_the_same_result_stands_as_a_control_of_the_bidirectional_one(measured):
    alone = measured.table[measured.table["draft"] == "toy-0"]
    table = pd.concat([alone.assign(draft=name) for name in ("wide", "narrow")])
    drafts = {
        name: {**measured.drafts["toy-0"], "family": name, "causal": name == "narrow"} for name in ("wide", "narrow")
    }
    wide, narrow = dataclasses.replace(measured, table=table, drafts=drafts).claims()
    (control,) = (one for one in wide.controls if one.name == "a causal trunk")
    assert control.outcome.startswith("narrow, depth 1 − depth 2: ")
    assert not any(one.name == "a causal trunk" for one in narrow.controls)


def test_the_fast_run_measures_depths_floor_and_wrong_code_alone(trained, arena):
    draft, _, arms = trained
    config = InjectionConfig(fast=True, resamples=20)
    found = injection_depth({"toy": draft}, {"toy": arms}, TARGET, arena, config=config)
    top = found.rows("toy", "top1")
    assert set(top["arm"]) == {FLOOR, NO_OP, "depth-0", "depth-1", "depth-2", "all"}
    assert set(top["predecessor"]) == {"nothing", "true", "rank-2"}
    assert by_depth(found).figure.data and by_reliability(found) is None


def test_drafts_that_do_not_fit_are_refused(trained, arena):
    draft, _, arms = trained
    with pytest.raises(UsageError, match="'toy' has no injectors"):
        injection_depth({"toy": draft}, {}, TARGET, arena)
    wide = dataclasses.replace(arena, slots=3)
    with pytest.raises(UsageError, match="has 4 slots and the arena 3"):
        injection_depth({"toy": draft}, {"toy": arms}, TARGET, wide)
    with pytest.raises(UsageError, match="from 0 to below 1"):
        InjectionConfig(shares=(1.0,))


def test_rank_correlation_agrees_with_pandas():
    values = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)).double()
    values[1, 2] = values[1, 3]
    for row, found in zip(values, spearman(values), strict=True):
        expected = pd.Series(row.numpy()).corr(pd.Series(range(6)), method="spearman")
        assert float(found) == pytest.approx(expected)


def test_seeds_are_said_by_the_record_and_not_by_the_name():
    """Budgets in names are no seeds, and seeds need no number in their name."""
    draft = tiny_draft(TARGET)

    def of(**drafts):
        made = {}
        for name, record in drafts.items():
            made[name] = borrowed(draft)
            made[name].training_record = record
        return families(made)

    short, long = {"blocks": 51_200}, {"blocks": 320_000}
    unknown = of(**{"dflash-51200": {}, "dflash-320000": {}})
    assert unknown == {"dflash-51200": "dflash-51200", "dflash-320000": "dflash-320000"}
    budgets = of(**{"dflash-51200": {**short, "seed": 0}, "dflash-320000": {**long, "seed": 0}})
    assert len(set(budgets.values())) == 2
    assert of(d0={**short, "seed": 0}, d1={**short, "seed": 1}, other={}) == {"d0": "d", "d1": "d", "other": "other"}
    named = of(first={**short, "seed": 0}, second={**short, "seed": 1})
    assert set(named.values()) == {"mean of first, second"}


def test_depth_sorts_as_a_number_in_deep_drafts(measured):
    rows = measured.table[measured.table["condition"] == "depth-1 | true"]
    deep = pd.concat(rows.assign(depth=depth, condition=f"depth-{depth} | true") for depth in (10, 2, 1)).astype(
        {"depth": "Int64"}
    )
    made = dataclasses.replace(measured, table=deep)
    assert made.curve("toy")["depth"].tolist() == [1, 2, 10]


@pytest.mark.parametrize(
    ("name", "sentences", "here", "passed"),
    [
        (
            "injection_depth",
            19,
            "dflash, depths 1, 2 − depths 4, 5, 1 seed: +0.6 points (-0.3, +1.5), n = 6720 slots of held-out prompts",
            [True, True, True, None, True, True, None, True, None, True, True, True, None, None],
        ),
        (
            "injection_depth_seeds",
            8,
            "dflash, depths 1, 2 − depths 4, 5, 3 seeds: -0.3 points (-1.2, +0.6), n = 6720 slots of held-out prompts",
            [True, *[None] * 10],
        ),
    ],
)
def test_shipped_results_say_what_they_said_when_they_were_measured(name, sentences, here, passed):
    shipped = InjectionDepthResult.load(data_dir() / "results" / name)
    (claim,) = shipped.claims()
    assert claim.verdict.effect.startswith("negligible") and claim.here == f"frozen {here}"
    assert [control.passed for control in claim.controls] == passed
    assert len(shipped.findings()) == sentences
