"""The bench: sums, predictions and words that follow from what was measured, and files that come back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny import tiny_draft, tiny_target

from dspine_probe.config import DSPINE
from dspine_probe.decoding.clock import Timing
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.errors import UsageError
from dspine_probe.experiments.bench.costs import PassCosts, pass_costs
from dspine_probe.experiments.bench.measure import BenchConfig, bench
from dspine_probe.experiments.bench.result import ALL, PARTS, BatchRun, BenchResult
from dspine_probe.plots import speed
from dspine_probe.prompts import Prompt
from dspine_probe.sampling import GREEDY, Sampling
from dspine_probe.target import Target

WARM = Sampling(1.0)
PROMPTS = [Prompt(f"p{i}", "ab"[i % 2], "word" * (i + 1)) for i in range(5)]
CONFIG = BenchConfig(max_new_tokens=8, samplings=(GREEDY, WARM), rows=(1, 2), cost_repeats=1)


@pytest.fixture(scope="module")
def target() -> Target:
    target = tiny_target(stop_ids=(2, 9))
    target.encode_chat = lambda text: [3 + ord(c) % 50 for c in text]
    return target


@pytest.fixture(scope="module")
def measured(target: Target) -> BenchResult:
    drafts = {"dflash": tiny_draft(target), "dspine": tiny_draft(target, DSPINE)}
    return bench(target, drafts, PROMPTS, config=CONFIG)


def made(same: bool = True, spine_trunk: float = 0.003) -> BenchResult:
    """Four prompts of 40 tokens; a step takes 10 ms, a verification 12."""

    def run(draft: str, number: int, rounds: int, timing: Timing) -> BatchRun:
        return BatchRun(draft, GREEDY, ("a",), (str(number),), (40,), (rounds,), timing, same)

    runs = []
    for number in range(4):
        runs += [
            run("plain", number, 40, Timing(prefill=1.0, verify=0.4)),
            run("flash", number, 20, Timing(1.0, 0.04, 0.02, 0.24, 0.0)),
            run("spine", number, 16, Timing(1.0, 0.05, 0.03, 0.19, 0.01)),
        ]
    costs = (
        PassCosts("flash", GREEDY, 1, 100, 8, step=0.01, verify=0.012, trunk=0.002, head=0.001),
        PassCosts("spine", GREEDY, 1, 100, 8, step=0.01, verify=0.012, trunk=spine_trunk, head=0.002),
    )
    kinds = {"flash": "DFlashDraftModel", "spine": DSPINE}
    config = {
        "drafts": kinds,
        "dtype": "fp32",
        "device": "cpu",
        "threads": 1,
        "engines": {"compute": "made up", "block": 3},
    }
    return BenchResult(tuple(runs), costs, config, resamples=50)


def test_sums_follow_from_the_runs():
    result = made()
    assert float(result.acceptance_length("spine", GREEDY, 1).value) == 2.5
    assert float(result.tokens_per_second("plain", GREEDY, 1).value) == pytest.approx(100)
    assert float(result.speedup("flash", GREEDY, 1).value) == pytest.approx(0.4 / 0.3)
    assert result.predicted("flash", GREEDY, 1) == pytest.approx(2 * 0.01 / 0.015)
    assert result.predicted("spine", GREEDY, 1) == pytest.approx(2.5 * 0.01 / 0.017)
    line = result.to_frame().set_index(["draft", "set"]).loc[("spine", ALL)]
    assert line["measured_over_predicted"] == pytest.approx((0.4 / 0.28) / (2.5 / 1.7))
    assert sum(line[f"{part}_ms_per_token"] for part in PARTS) == pytest.approx(1000 * 0.28 / 40)
    assert sum(line[f"{part}_share"] for part in PARTS) == pytest.approx(1)
    with pytest.raises(UsageError, match="'spine' was not measured with T = 1, 1 rows"):
        result.speedup("spine", WARM, 1)


def test_injection_pays_only_while_it_costs_less_than_it_brings():
    (claim,) = made().claims()
    assert claim.id == "speed" and claim.holds and "+1.00 ms, +6.7 % of a round" in claim.here
    assert claim.here.endswith("1 threads, made up)")
    assert {control.name: control.passed for control in claim.controls}["the passes account for the time"]
    (dear,) = made(spine_trunk=0.002 + 0.26 * 0.015).claims()
    assert not dear.holds
    (unequal,) = made(same=False).claims()
    assert False in {control.passed for control in unequal.controls}
    assert any("0 of 8 batches" in sentence for sentence in made(same=False).findings())


def test_every_way_is_measured(measured: BenchResult):
    assert measured.modes == ("plain", "dflash", "dspine") and measured.rows == (1, 2)
    assert measured.same_tokens
    frame = measured.to_frame()
    whole = frame[frame["set"] == ALL]
    assert len(whole) == 3 * 2 * 2
    assert set(frame[frame["set"] != ALL]["rows"]) == {1} and set(frame["set"]) == {ALL, "a", "b"}
    assert whole[whole["rows"] == 2]["batches"].eq(2).all(), "the fifth prompt has no company"
    assert whole[whole["draft"] == "plain"]["acceptance_length"].eq(1).all()
    assert frame[frame["sampling"] == "T = 1"]["same_tokens"].isna().all()
    assert (whole["predicted_speedup"] > 0).all() and (whole["tokens_per_second"] > 0).all()
    two = [run for run in measured.runs if run.rows == 2 and run.draft == "dflash"]
    assert two and all(len(run.tokens) == len(run.rounds) == 2 for run in two)
    sentences = measured.findings()
    assert len(sentences) == 1 + 4 + 4 + 1 and "tokens of plain decoding" in sentences[0]
    assert "nan" not in " ".join(sentences)


def test_results_come_back(measured: BenchResult, tmp_path: Path):
    measured.save(tmp_path)
    again = BenchResult.load(tmp_path)
    assert again.runs == measured.runs and again.costs == measured.costs
    assert again.to_frame().equals(measured.to_frame()) and again.findings() == measured.findings()


def test_figures_say_what_they_show(measured: BenchResult):
    for draw in (speed.time_per_token, speed.speedup_by_rows, speed.speedup_by_set):
        block = draw(measured)
        assert len(block.table) and block.alt.count("dspine") >= 2 and "nan" not in block.alt
    assert measured.figure().data
    lone = dataclasses.replace(measured, runs=tuple(run for run in measured.runs if run.rows == 2))
    with pytest.raises(UsageError, match="1 among the rows"):
        speed.speedup_by_set(lone)


def test_passes_are_timed_apart(target: Target):
    draft = tiny_draft(target, DSPINE)
    options = {"name": "x", "rows": 2, "context": 20, "engines": REFERENCE, "repeats": 3}
    for sampling in (GREEDY, WARM, Sampling(1.0, draft_temperature=0.0)):
        costs = pass_costs(target, draft, sampling=sampling, **options)
        assert min(costs.step, costs.verify, costs.trunk, costs.head) > 0
        assert costs.round == pytest.approx(costs.verify + costs.trunk + costs.head)


def test_refusals(target: Target):
    with pytest.raises(UsageError, match="a draft is named 'plain'"):
        bench(target, {"plain": tiny_draft(target)}, PROMPTS, config=CONFIG)
    with pytest.raises(UsageError, match="8 rows at once need as many prompts, but there are 5"):
        bench(target, {}, PROMPTS, config=dataclasses.replace(CONFIG, rows=(1, 8)))
