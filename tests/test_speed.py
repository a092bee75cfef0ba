"""Real decoding: sums, predictions and words that follow from what was measured, and files that come back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny import tiny_draft, tiny_target

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.decoding.clock import Timing
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.request import Request
from dspine_probe.experiments.speed import SpeedConfig, SpeedResult, speed
from dspine_probe.experiments.speed.costs import PassCosts, pass_costs
from dspine_probe.experiments.speed.table import ALL, PARTS, BatchRun, tabulate
from dspine_probe.plots import speed as plots
from dspine_probe.prompts import Prompt
from dspine_probe.sampling import GREEDY, Sampling
from dspine_probe.target import Target

WARM = Sampling(1.0)
PROMPTS = [Prompt(f"p{i}", "ab"[i % 2], "word" * (i + 1)) for i in range(5)]
CONFIG = SpeedConfig(rows=(1, 2), engine="reference", cost_repeats=1)


@pytest.fixture(scope="module")
def target() -> Target:
    target = tiny_target(stop_ids=(2, 9))
    target.encode_chat = lambda text: [3 + ord(c) % 50 for c in text]
    return target


@pytest.fixture(scope="module")
def measured(target: Target) -> SpeedResult:
    drafts = {"dflash": tiny_draft(target), "dspine": tiny_draft(target, DSPINE)}
    return speed(Request(target, drafts, PROMPTS, max_new_tokens=8), CONFIG)


def made(same: bool = True, spine_trunk: float = 0.003) -> SpeedResult:
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
    drafts = {"flash": {"architecture": DFLASH}, "spine": {"architecture": DSPINE}}
    config = {
        "target": "toy",
        "dtype": "fp32",
        "device": "cpu",
        "threads": 1,
        "engines": {"compute": "made up", "block": 3},
    }
    return SpeedResult(tabulate(runs, costs, resamples=50), config, drafts, {}, 1.0)


def test_sums_follow_from_the_runs():
    result = made()

    def mean(draft: str, metric: str) -> float:
        return result.row(draft, metric)["mean"]

    assert mean("spine", "acceptance_length") == 2.5
    assert mean("plain", "tokens_per_second") == pytest.approx(100)
    assert mean("flash", "speedup") == pytest.approx(0.4 / 0.3)
    assert mean("flash", "predicted_speedup") == pytest.approx(2 * 0.01 / 0.015)
    assert mean("spine", "predicted_speedup") == pytest.approx(2.5 * 0.01 / 0.017)
    assert mean("spine", "measured_over_predicted") == pytest.approx((0.4 / 0.28) / (2.5 / 1.7))
    assert sum(mean("spine", f"{part}_ms_per_token") for part in PARTS) == pytest.approx(1000 * 0.28 / 40)
    assert sum(mean("spine", f"{part}_share") for part in PARTS) == pytest.approx(1)
    assert mean("spine", "trunk_ms") == pytest.approx(3) and mean("plain", "same_tokens") == 1


def test_what_injection_costs_stands_beside_what_it_brings():
    faster, claim = made().claims()
    assert faster.id == "faster" and "flash 1.33" in faster.here and "spine 1.43" in faster.here
    assert claim.id == "speed" and "+1.00 ms, +6.7 % of a round" in claim.here
    assert claim.here.endswith("1 thread, made up)")
    assert {control.name: control.passed for control in claim.controls}["the passes account for the time"]
    assert claim.verdict.effect == "undecided", "passes are timed without an interval"
    assert faster.verdict[:2] == ("shown", "shown")
    slower, unequal = made(same=False).claims()
    assert slower.verdict.specificity == "reversed", "other tokens are no speedup"
    assert False in {control.passed for control in unequal.controls}
    assert any("0 of 8 batches" in sentence for sentence in made(same=False).findings())


def test_every_method_is_measured(measured: SpeedResult):
    assert measured.methods == ["plain", "dflash", "dspine"] and measured.fewest == "1"
    assert measured.same_tokens
    frame = measured.frame()
    whole = frame[frame["set"] == ALL]
    assert len(whole.drop_duplicates(["draft", "condition"])) == 3 * 2 * 2
    assert set(frame[frame["set"] != ALL]["rows"]) == {"1"} and set(frame["set"]) == {ALL, "a", "b"}
    assert whole[whole["rows"] == "2"]["n"].eq(2).all(), "the fifth prompt has no company"
    assert measured.select(draft="plain", metric="acceptance_length")["mean"].eq(1).all()
    assert set(measured.select(metric="same_tokens")["sampling"]) == {"T = 0"}
    assert (measured.select(metric=["predicted_speedup", "tokens_per_second"])["mean"] > 0).all()
    few = whole[(whole["rows"] == "2") & (whole["metric"] == "speedup")]
    assert few["low"].isna().all(), "two batches give no interval"
    two = [run for run in measured.data["runs"] if len(run["ids"]) == 2 and run["draft"] == "dflash"]
    assert two and all(len(run["tokens"]) == len(run["rounds"]) == 2 for run in two)
    sentences = measured.findings()
    assert len(sentences) == 1 + 4 + 4 + 1 and "tokens of plain decoding" in sentences[0]
    assert "nan" not in " ".join(sentences)


def test_without_timed_passes_nothing_is_predicted(target: Target):
    """The short comparison of the main job."""
    config = SpeedConfig((1,), (0.0,), "reference", cost_repeats=0, prompts=3, max_new_tokens=8)
    result = speed(Request(target, {"dflash": tiny_draft(target)}, PROMPTS), config)
    assert result.config["prompts"] == 3 and result.config["max_new_tokens"] == 8
    assert result.same_tokens and [claim.id for claim in result.claims()] == ["faster"]
    assert result.row("plain", "acceptance_length")["mean"] == 1 <= result.row("dflash", "acceptance_length")["mean"]
    rates = [result.row(name, "tokens_per_second")["mean"] for name in ("dflash", "plain")]
    assert result.row("dflash", "speedup")["mean"] == pytest.approx(rates[0] / rates[1])
    assert not len(result.select(metric=["predicted_speedup", "trunk_ms"]))
    assert len(result.findings()) == 2 and "predicted" not in " ".join(result.findings())
    assert plots.speedup_by_rows(result) is None and plots.speedup_by_set(result) is not None


def test_results_come_back(measured: SpeedResult, tmp_path: Path):
    measured.save(tmp_path)
    again = SpeedResult.load(tmp_path)
    assert again.data == measured.data and again.drafts == measured.drafts
    assert again.frame().equals(measured.frame()) and again.findings() == measured.findings()


@pytest.mark.parametrize(
    "draw", [plots.tokens_per_second, plots.time_per_token, plots.speedup_by_rows, plots.speedup_by_set]
)
def test_figures_say_what_they_show(measured: SpeedResult, draw):
    block = draw(measured)
    assert len(block.table) and block.alt.count("dspine") == 2 and "nan" not in block.alt
    assert sum(len(trace.x) for trace in block.figure.data) == len(block.table)


def test_bars_of_time_per_token_say_the_speedup():
    labels = [note.text for note in plots.time_per_token(made()).figure.layout.annotations]
    assert labels[-3:] == ["1.00×", "1.33×", "1.43×"]


def test_passes_are_timed_apart(target: Target):
    draft = tiny_draft(target, DSPINE)
    options = {"name": "x", "rows": 2, "context": 20, "engines": REFERENCE, "repeats": 3}
    for sampling in (GREEDY, WARM, Sampling(1.0, draft_temperature=0.0)):
        costs = pass_costs(target, draft, sampling=sampling, **options)
        assert min(costs.step, costs.verify, costs.trunk, costs.head) > 0
        assert costs.round == pytest.approx(costs.verify + costs.trunk + costs.head)


def test_refusals(target: Target):
    with pytest.raises(UsageError, match="a draft is named 'plain'"):
        speed(Request(target, {"plain": tiny_draft(target)}, PROMPTS), CONFIG)
    with pytest.raises(UsageError, match="8 rows at once need as many prompts, but there are 5"):
        speed(Request(target, {}, PROMPTS), dataclasses.replace(CONFIG, rows=(1, 8)))
    with pytest.raises(UsageError, match="but there are 0"):
        speed(Request(target, {}, []), CONFIG)
