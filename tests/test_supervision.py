"""The supervision experiment on tiny drafts: trained, measured and told, with numbers checked by other means."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from test_arena import tiny_arena
from test_intermediate import tiny_store
from test_training import CONFIG
from tiny import MASK
from torch.nn import functional as F
from toy import seeded, toy_store

from dspine_probe.decoding.offline import simulate_rounds
from dspine_probe.drafts.checkpoint import load_draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.acceptance import AcceptanceCounts, count_rounds
from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.common.intervals import Estimate
from dspine_probe.experiments.common.rows import RowBuilder
from dspine_probe.experiments.common.schema import MEAN
from dspine_probe.experiments.supervision import arms as arms_module
from dspine_probe.experiments.supervision.arms import (
    ArmsPlan,
    SupervisionArm,
    headline_arms,
    rates_tried,
    train_arms,
    trained,
    variant_arms,
)
from dspine_probe.experiments.supervision.measure import SupervisionConfig, supervision
from dspine_probe.experiments.supervision.readings import FITTED, FIXED, OWN, SHUFFLED, effective_rank, fitted_readout
from dspine_probe.experiments.supervision.result import SupervisionResult
from dspine_probe.experiments.supervision.runs import ArmRun
from dspine_probe.experiments.supervision.table import ALL, OVER_SEEDS
from dspine_probe.files import data_dir
from dspine_probe.plots import supervision as plots
from dspine_probe.target import Target
from dspine_probe.training.intermediate import Supervision, load_readouts
from dspine_probe.training.run import DraftPlan
from dspine_probe.training.validation import Validation
from dspine_probe.transfer import TransferSpace

ARMS = {
    **headline_arms((1, 2)),
    "token-ce": SupervisionArm(Supervision("token-ce"), (1,)),
    "cosine-unwhitened": SupervisionArm(Supervision("cosine-unwhitened"), (1,)),
}
PLAN = ArmsPlan(
    ARMS,
    dataclasses.replace(CONFIG, blocks=72, lr=1e-2, save_every=6),
    DraftPlan("dflash", 3, 5, 40, warm=False, mask_token_id=MASK),
    rates=(1e-2,),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Arena, Path]:
    folder = tmp_path_factory.mktemp("arms")
    target, arena = tiny_arena(10, per_answer=3)
    train_arms(PLAN, target, tiny_store(), folder)
    return target, arena, folder


@pytest.fixture(scope="module")
def result(place: tuple[Target, Arena, Path]) -> SupervisionResult:
    target, arena, folder = place
    return supervision(target, trained(PLAN, folder), arena, config=SupervisionConfig(resamples=200))


def value(result: SupervisionResult, column: str = "mean", **wanted: object) -> float:
    rows = result.select(**wanted)
    assert len(rows) == 1, wanted
    return float(rows[column].iloc[0])


def test_acceptance_is_that_of_the_evaluation(place: tuple[Target, Arena, Path], result: SupervisionResult) -> None:
    """The same rounds through the acceptance result that `evaluate` uses."""
    target, arena, folder = place
    runs, counts = trained(PLAN, folder), []
    for arm, seed in (("none", 1), ("cosine", 1)):
        draft = load_draft(runs[arm][seed].checkpoint, target)
        for answer, name, rounds in zip(arena.answers, arena.sets, simulate_rounds(draft, arena.answers), strict=True):
            counts.append(count_rounds(arm, name, answer.id, rounds, stopped=False, slots=4))
    other = AcceptanceCounts(tuple(counts), resamples=10)
    for arm in ("none", "cosine"):
        for name in (*arena.set_names, MEAN):
            want = float(other.acceptance_length(arm, name).value)
            assert value(result, draft=arm, metric="al", seed="1", set=name) == pytest.approx(want)
    gain = value(result, draft="cosine − none", metric="al", seed="1", set=MEAN)
    each = [float(other.acceptance_length(arm).value) for arm in ("none", "cosine")]
    assert gain == pytest.approx(each[1] - each[0])
    both = result.select(draft="none", metric="al", set=MEAN).set_index("seed")["mean"]
    assert both[ALL] == pytest.approx((both["1"] + both["2"]) / 2)
    survival = result.select(draft="cosine-unwhitened", metric="survival")["mean"].tolist()
    assert survival == sorted(survival, reverse=True)


def test_gains_are_paired_and_use_common_seeds_alone(result: SupervisionResult) -> None:
    gain = result.select(draft="cosine-unwhitened − none", metric="al", set=MEAN).set_index("seed")
    al = result.select(metric="al", set=MEAN).set_index(["draft", "seed"])["mean"]
    assert gain.loc[ALL, "mean"] == pytest.approx(al["cosine-unwhitened", "1"] - al["none", "1"])
    assert pd.isna(gain.loc[OVER_SEEDS, "low"]), "one seed has no spread"
    over = result.select(draft="cosine − none", metric="al", seed=OVER_SEEDS).iloc[0]
    each = [value(result, draft="cosine − none", metric="al", set=MEAN, seed=s) for s in ("1", "2")]
    assert over["mean"] == pytest.approx(sum(each) / 2)
    # Student's 97.5 % point for one degree of freedom, times |a − b| / 2.
    assert over["high"] - over["mean"] == pytest.approx(12.706 * abs(each[0] - each[1]) / 2, rel=1e-3)
    assert not len(result.select(draft="none − none", metric="al"))


@torch.no_grad()
def test_cosines_and_hits_by_hand(place: tuple[Target, Arena, Path], result: SupervisionResult) -> None:
    """One block after the other, from the plain forward of the draft."""
    target, arena, folder = place
    run = trained(PLAN, folder)["cosine"][1]
    draft, space = load_draft(run.checkpoint, target), TransferSpace.fit(target.head, target.hidden_size // 3)
    codes, readout = space.codes(target.head), load_readouts(run.run)[1]
    assert not torch.equal(readout, space.basis.T), "trained"
    cells: dict[str, list[tuple[int, torch.Tensor]]] = {"fixed": [], "own": [], "hits": []}
    for index, (answer, anchors) in enumerate(zip(arena.answers, arena.anchors, strict=True)):
        for anchor in anchors.tolist():
            at = torch.tensor([[anchor]])
            context = draft.encode_context(answer.taps[None])
            states = draft.run(context, answer.tokens[at], at)  # type: ignore[call-arg]
            labels = answer.tokens[anchor + 1 : anchor + 5]
            h = states.residuals[1][0, 1:]  # type: ignore[union-attr]
            where = arena.set_names.index(arena.sets[index])
            cells["fixed"].append((where, F.cosine_similarity(h @ space.basis, codes[labels], dim=-1)))
            cells["own"].append((where, F.cosine_similarity(h @ readout.T, codes[labels], dim=-1)))
            best = draft.to_tokens(draft.logits(states.hidden[0, 1:]).argmax(-1))
            cells["hits"].append((where, (best == labels).float()))
    want = {
        name: torch.stack([torch.stack([v for s, v in rows if s == at]).mean() for at in (0, 1)]).mean()
        for name, rows in cells.items()
    }
    keys = {"draft": "cosine", "seed": "1", "depth": 2}
    assert value(result, metric=f"cosine, {FIXED}", **keys) == pytest.approx(float(want["fixed"]), abs=1e-5)
    assert value(result, metric=f"cosine, {OWN}", **keys) == pytest.approx(float(want["own"]), abs=1e-5)
    top1 = result.select(draft="cosine", metric="top1", slot="")["mean"].iloc[0]
    other = supervision(target, {"none": trained(PLAN, folder)["none"], "cosine": {1: run}}, arena)
    alone = other.select(draft="cosine", metric="top1", slot="")["mean"].iloc[0]
    assert alone == pytest.approx(float(want["hits"]), abs=1e-6)
    assert 0 <= top1 <= 1


def test_own_readouts_belong_to_code_arms_and_supervised_layers(result: SupervisionResult) -> None:
    own = result.select(metric=f"cosine, {OWN}", seed=ALL)
    assert set(own["draft"]) == {"cosine", "cosine-unwhitened"}
    assert set(own["depth"]) == {1, 2}
    for reader in (FIXED, FITTED, FIXED + SHUFFLED, FITTED + SHUFFLED):
        assert len(result.select(metric=f"cosine, {reader}", seed=ALL)) == 3 * len(ARMS)


def test_a_fitted_readout_finds_what_is_there_and_nothing_that_is_not() -> None:
    """Codes hidden in the stream by an unknown map are found on other prompts; noise is not."""
    g = seeded(5)
    codes = F.normalize(torch.randn(400, 4, 6, generator=g) + 2, dim=-1)
    prompt = torch.arange(400) // 4
    hidden = (codes - codes.mean((0, 1))) @ torch.randn(6, 12, generator=g)

    def cosine(stream: torch.Tensor, wanted: torch.Tensor) -> float:
        read, mean = fitted_readout(stream, codes, prompt)
        return float(F.cosine_similarity(read, wanted - mean, dim=-1).mean())

    assert cosine(hidden, codes) > 0.9
    assert abs(cosine(hidden, codes.roll(37, 0))) < 0.1, "the common direction of codes earns nothing"
    assert abs(cosine(torch.randn(400, 4, 12, generator=g), codes)) < 0.1


def test_a_fitted_readout_never_sees_the_prompts_it_reads() -> None:
    """Changing the codes of half of the prompts leaves what is read from that half as it was."""
    g = seeded(6)
    hidden, codes = torch.randn(40, 4, 12, generator=g), torch.randn(40, 4, 6, generator=g)
    prompt = torch.arange(40) // 2
    before = fitted_readout(hidden, codes, prompt)[0]
    moved = torch.where((prompt % 2 == 0)[:, None, None], -codes, codes)
    after = fitted_readout(hidden, moved, prompt)[0]
    assert torch.equal(before[prompt % 2 == 0], after[prompt % 2 == 0])
    assert not torch.equal(before[prompt % 2 == 1], after[prompt % 2 == 1])


def test_effective_rank_counts_equal_directions() -> None:
    rows = torch.cat([torch.eye(6), -torch.eye(6)])
    assert float(effective_rank(rows)) == pytest.approx(6)
    assert float(effective_rank(rows[:, :3])) == pytest.approx(3)
    assert float(effective_rank(rows + 100)) == pytest.approx(6), "the mean does not count"
    line = torch.linspace(-1, 1, 9)[:, None] * torch.ones(1, 4)
    assert float(effective_rank(line)) == pytest.approx(1, abs=1e-4)


def test_curves_come_from_the_runs_files(place: tuple[Target, Arena, Path], result: SupervisionResult) -> None:
    *_, folder = place
    rows = pd.read_csv(folder / "runs" / "cosine-1" / "validation.csv")
    logged = pd.read_csv(folder / "runs" / "cosine-1" / "metrics.csv")
    keys = {"draft": "cosine", "seed": "1"}
    curve = result.select(metric="validation", **keys)
    assert curve["blocks"].astype(int).tolist() == rows["blocks"].tolist()
    assert curve["mean"].tolist() == pytest.approx(rows["tokens_per_anchor"].tolist())
    at = int(rows["blocks"].iloc[1])
    between = logged[(logged["step"] > rows["step"].iloc[0]) & (logged["step"] <= rows["step"].iloc[1])]
    assert value(result, metric="grad_norm", blocks=str(at), **keys) == pytest.approx(between["grad_norm"].median())
    layer_2 = between["parts"].map(lambda text: json.loads(text)["layer_2"]).mean()
    assert value(result, metric="layer_loss", blocks=str(at), depth=2, **keys) == pytest.approx(layer_2)
    assert not len(result.select(draft="none", metric="layer_loss"))


def test_a_rerun_trains_nothing_and_workers_share_the_arms(
    place: tuple[Target, Arena, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, _, folder = place
    store, begun = tiny_store(), []
    monkeypatch.setattr(arms_module, "train_draft", lambda *a, **k: begun.append(a[4].name))
    train_arms(PLAN, target, store, folder)
    assert begun == []
    for worker in (0, 1):
        train_arms(PLAN, target, store, tmp_path, worker=worker, workers=2)
    assert begun == ["none-1", "none-2", "token-ce-1", "cosine-1", "cosine-2", "cosine-unwhitened-1"]
    assert trained(PLAN, tmp_path) == {}


def test_the_learning_rate_is_chosen_once_for_each_arm(
    place: tuple[Target, Arena, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, *_ = place
    store, used = tiny_store(), []

    def fake(plan, _target, _store, training, run, output, **_):  # type: ignore[no-untyped-def]
        used.append((run.name, training.lr, training.seed, training.blocks))

    def found(draft, *_, precision):  # type: ignore[no-untyped-def]
        return Validation(2.0 + ("0.002" in draft), (), 0)

    monkeypatch.setattr(arms_module, "train_draft", fake)
    monkeypatch.setattr(arms_module, "load_draft", lambda folder, *_: folder.name)
    monkeypatch.setattr(arms_module, "validate", found)
    arms = {"none": SupervisionArm(Supervision(), (7,)), "cosine": SupervisionArm(Supervision("cosine"), (7,), lr=0.5)}
    plan = dataclasses.replace(PLAN, arms=arms, rates=(1e-3, 2e-3), tuning_blocks=60)
    train_arms(plan, target, store, tmp_path)
    assert used == [
        ("none-tuning-0.001", 1e-3, 1000, 60),
        ("none-tuning-0.002", 2e-3, 1000, 60),
        ("none-7", 2e-3, 7, 72),
        ("cosine-7", 0.5, 7, 72),
    ]
    train_arms(plan, target, store, tmp_path)
    assert [name for name, *_ in used[4:]] == ["none-7", "cosine-7"], "chosen already"
    assert rates_tried(tmp_path, list(arms))["none"]["chosen"] == 2e-3


def test_arms_of_another_rate_budget_or_store_are_refused_by_name(place: tuple[Target, Arena, Path]) -> None:
    target, _, folder = place
    arms = {"none": SupervisionArm(Supervision(), (1,), lr=0.5)}
    with pytest.raises(UsageError, match=r"none-1 was trained with other settings: lr \(0\.01, not 0\.5\)"):
        train_arms(dataclasses.replace(PLAN, arms=arms), target, tiny_store(), folder)
    longer = dataclasses.replace(PLAN, training=dataclasses.replace(PLAN.training, blocks=144))
    with pytest.raises(UsageError, match=r"none-1 was trained with other settings: blocks \(72, not 144\)"):
        train_arms(longer, target, tiny_store(), folder)
    wide = dataclasses.replace(PLAN, draft=dataclasses.replace(PLAN.draft, draft_vocab=30))
    with pytest.raises(UsageError, match=r"none-1 was trained with other settings: draft_vocab \(40, not 30\)"):
        train_arms(wide, target, tiny_store(), folder)
    with pytest.raises(UsageError, match="none-1 was trained with other settings: features;"):
        train_arms(PLAN, target, toy_store(), folder)


def test_a_run_that_was_resumed_at_another_rate_is_refused(place: tuple[Target, Arena, Path], tmp_path: Path) -> None:
    target, _, folder = place
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    state = tmp_path / "runs" / "none-1" / "state.pt"
    saved = torch.load(state, weights_only=True)
    torch.save({**saved, "config": {**saved["config"], "lr": 1e-3}}, state)
    with pytest.raises(UsageError, match=r"none-1 was trained with other settings: lr \(0\.001, not 0\.01\)"):
        train_arms(PLAN, target, tiny_store(), tmp_path)
    torch.save({**saved, "rates": [(0, 1e-3), (4, 1e-2)]}, state)
    with pytest.raises(UsageError, match=r"at the rate 0\.001, then 0\.01, and an arm has one"):
        train_arms(PLAN, target, tiny_store(), tmp_path)


def test_finished_work_that_does_not_say_what_it_depends_on_is_refused(
    place: tuple[Target, Arena, Path], tmp_path: Path
) -> None:
    target, _, folder = place
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs" / "none-1" / "depends.json").unlink()
    with pytest.raises(UsageError, match=r"none-1 holds work without a depends\.json"):
        train_arms(PLAN, target, tiny_store(), tmp_path)


def test_rates_chosen_on_another_budget_are_refused(place: tuple[Target, Arena, Path], tmp_path: Path) -> None:
    target, *_ = place
    arms = {"none": SupervisionArm(Supervision(), (1,))}
    plan = dataclasses.replace(PLAN, arms=arms, rates=(1e-2, 2e-2), tuning_blocks=24)
    train_arms(plan, target, tiny_store(), tmp_path)
    for name, value, said in (
        ("tuning_blocks", 48, r"blocks \(24, not 48\)"),
        ("rates", (1e-2, 3e-2), r"lr \(\[0\.01, 0\.02\], not \[0\.01, 0\.03\]\)"),
        ("tuning_seed", 7, r"seed \(1000, not 7\)"),
    ):
        with pytest.raises(UsageError, match=f"none-tuning was trained with other settings: {said}"):
            train_arms(dataclasses.replace(plan, **{name: value}), target, tiny_store(), tmp_path)


def test_variants_share_the_first_seed() -> None:
    assert {arm.seeds for arm in variant_arms().values()} == {(0,)}
    assert variant_arms()["token-ce 0.1"].supervision == Supervision("token-ce", 0.1)
    assert {arm.seeds for arm in headline_arms().values()} == {(0, 1, 2)}


def test_saved_results_say_the_same(result: SupervisionResult, tmp_path: Path) -> None:
    result.save(tmp_path)
    again = SupervisionResult.load(tmp_path)
    pd.testing.assert_frame_equal(again.frame(), result.frame())
    assert again.findings() == result.findings()
    assert again.claims() == result.claims()
    assert again.drafts["cosine"]["1"]["plan"]["supervision_arm"] == "cosine"


def test_the_shipped_result_says_what_it_said_when_it_was_measured() -> None:
    shipped = SupervisionResult.load(data_dir() / "results" / "supervision")
    (claim,) = shipped.claims()
    assert claim.here == (
        "token-ce 1.484, -0.030 (-0.049, -0.011) against none; none 1.514; cosine 1.508, -0.005 (-0.023, +0.012) "
        "against none; DFlash on embedded, 51,200 blocks a run, 3 seeds, n = 140 prompts"
    )
    assert claim.verdict.effect == "token-ce lower shown, cosine higher undecided"
    assert claim.verdict.size == "token-ce as published, cosine smaller"
    assert [control.passed for control in claim.controls] == [True, True, True, None, None, None, None, None]
    said = shipped.findings()
    assert len(said) == 41
    assert (
        "token-ce − none: -0.030 (-0.049, -0.011) tokens a round over seeds and prompts; "
        "by seed -0.041, -0.024, -0.024."
    ) in said


def with_gains(result: SupervisionResult, gains: dict[str, list[float]]) -> SupervisionResult:
    """The result with other gains, one a seed, each within ±0.01 over prompts."""
    table, rows = result.table, RowBuilder(SupervisionResult.FACTORS)
    for arm, each in gains.items():
        for seed, one in enumerate(each):
            found = Estimate(*map(torch.tensor, (one, one - 0.01, one + 0.01)))
            rows.add(found, draft=f"{arm} − none", metric="al", n=10, seed=seed, blocks="")
    kept = table[~(table["draft"].str.contains(" − ") & (table["metric"] == "al"))]
    drafts = {arm: dict.fromkeys("012", result.drafts["none"]["1"]) for arm in ("none", *gains)}
    return dataclasses.replace(result, table=pd.concat([kept, rows.table()]), drafts=drafts)


def test_each_half_of_the_order_is_judged_over_seeds(result: SupervisionResult) -> None:
    up, down, split = [0.04, 0.05, 0.045], [-0.04, -0.05, -0.045], [0.08, 0.03, -0.02]
    for ce, cosine, effect in (
        (down, up, "shown"),
        (up, down, "reversed"),
        (up, up, "token-ce lower reversed, cosine higher shown"),
        (down, split, "token-ce lower shown, cosine higher undecided"),
        (down[:2], up[:2], "shown in 2 seeds"),
    ):
        made = with_gains(result, {"token-ce": ce, "cosine": cosine})
        made = dataclasses.replace(
            made, drafts={arm: dict(list(of.items())[: len(ce)]) for arm, of in made.drafts.items()}
        )
        assert made.verdict().effect == effect


def test_findings_and_claim_carry_the_numbers_of_the_table(result: SupervisionResult) -> None:
    said = " ".join(result.findings())
    gain = value(result, draft="cosine − none", metric="al", seed=ALL, set=MEAN)
    assert f"cosine − none: {gain:+.3f} (" in said
    assert "The published order, token-ce < none < cosine: effect " in said
    (claim,) = result.claims()
    assert claim.id == "P3"
    assert f", {gain:+.3f} (" in claim.here
    rate = "not chosen; trained at token-ce 0.01, none 0.01, cosine 0.01"
    assert ("learning rate chosen for each arm", rate, False) in claim.controls
    assert ("token-ce 0.1 in its place", "not measured", None) in claim.controls
    assert result.config["skipped"]


def test_rates_pass_when_arms_were_trained_at_those_that_were_chosen(result: SupervisionResult) -> None:
    for chosen, passed in ((1e-2, True), (2e-2, False)):
        tried = {"chosen": chosen, "blocks": 60, "tokens_per_anchor": {"0.01": 1.1, "0.02": 1.0}}
        config = {**result.config, "rates": dict.fromkeys(("token-ce", "none", "cosine"), tried)}
        (claim,) = dataclasses.replace(result, config=config).claims()
        ((outcome, found),) = (rest for name, *rest in claim.controls if name.startswith("learning rate"))
        assert outcome.startswith(f"chosen on 60 blocks: token-ce {chosen} of 0.01/0.02, none {chosen} of")
        assert found is passed


def test_figures_have_words_and_every_arm(result: SupervisionResult) -> None:
    for make in (plots.arms, plots.curves, plots.cosines, plots.ranks):
        block = make(result)
        assert len(block.figure.data) >= len(ARMS)
        assert all(arm in block.alt for arm in ARMS if arm != "none")
        assert block.caption and len(block.table)
    (seeds,) = [trace for trace in plots.arms(result).figure.data if trace.text]
    assert sorted(seeds.text) == sorted(f"{arm}, seed {s}" for arm in ARMS for s in ARMS[arm].seeds)


def test_refusals(place: tuple[Target, Arena, Path], tmp_path: Path) -> None:
    target, arena, folder = place
    runs = trained(PLAN, folder)
    with pytest.raises(UsageError, match="no arm 'none'"):
        supervision(target, {"cosine": runs["cosine"]}, arena)
    with pytest.raises(UsageError, match="one seed in common"):
        supervision(target, {"none": {1: runs["none"][1]}, "cosine": {2: runs["cosine"][2]}}, arena)
    with pytest.raises(UsageError, match="was trained with seed 2"):
        supervision(target, {"none": {1: runs["none"][2]}}, arena)
    with pytest.raises(UsageError, match=r"plan\.json was not found"):
        supervision(target, {"none": {1: ArmRun(runs["none"][1].checkpoint, tmp_path)}}, arena)
    state = torch.load(runs["cosine"][1].run / "state.pt", weights_only=True)
    (tmp_path / "plan.json").write_text((runs["cosine"][1].run / "plan.json").read_text())
    torch.save({**state, "config": {**state["config"], "blocks": 999}}, tmp_path / "state.pt")
    longer = ArmRun(runs["cosine"][1].checkpoint, tmp_path)
    with pytest.raises(UsageError, match="trained with blocks 999 and none with 72"):
        supervision(target, {"none": runs["none"], "cosine": {1: longer}}, arena)
    with pytest.raises(UsageError, match="cannot report it too"):
        ArmsPlan(headline_arms((1000,)), PLAN.training)
