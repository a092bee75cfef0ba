"""Saved results of corruption, speed and acceptance: they load and say what was measured."""

import math
from pathlib import Path

import pandas as pd
import pytest

from dspine_probe.decoding.clock import Timing
from dspine_probe.experiments.acceptance import AcceptanceResult
from dspine_probe.experiments.corruption import CorruptionResult
from dspine_probe.experiments.joint_injection.table import JointInjectionResult
from dspine_probe.experiments.speed import SpeedResult
from dspine_probe.experiments.speed.costs import PassCosts
from dspine_probe.experiments.speed.table import BatchRun, tabulate
from dspine_probe.sampling import Sampling

RESULTS = Path(__file__).parents[1] / "data" / "results"


@pytest.mark.parametrize(
    ("folder", "here", "verdict", "passed"),
    [
        (
            "corruption",
            "dflash -28.7 points (-31.6, -25.5); dspine -32.5 points (-35.7, -29.3), n = 140 prompts",
            ("shown in 1 seed", "shown in 1 seed", "dflash smaller, dspine as published"),
            11,
        ),
        ("corruption_seeds", "over 3 seeds (-14.6, -17.3, -14.8), n =", ("shown", "undecided", "smaller"), 15),
        ("corruption_seeds_102400", "(-17.9, -21.9), n =", ("shown in 2 seeds", "undecided", "smaller"), 8),
    ],
)
def test_corruption_says_what_was_measured(folder, here, verdict, passed):
    result = CorruptionResult.load(RESULTS / folder)
    (claim,) = result.claims()
    assert here in claim.here and claim.verdict == verdict
    assert sum(control.passed is True for control in claim.controls) == passed
    for draft in result.drafts:
        (cost,) = result.cost(draft)["mean"]
        assert any(draft in said and f"{100 * cost:+.1f} points" in said for said in result.findings())
        assert f"{100 * cost:+.1f}" in claim.here


def test_seeds_are_said_by_the_record_and_not_by_names():
    seeds = CorruptionResult.load(RESULTS / "corruption_seeds").drafts
    assert {(about["family"], about["seed"]) for about in seeds.values()} == {("dflash", seed) for seed in range(3)}
    assert not any("seed" in about for about in CorruptionResult.load(RESULTS / "corruption").drafts.values())


@pytest.mark.parametrize(
    ("folder", "here", "accounted"),
    [
        ("speed", "dspine takes 5.17 ms, that of dflash 4.48 (+0.69 ms, +1.8 % of a round of dflash", "0.96"),
        ("speed_rows", "dspine takes 3.76 ms, that of dflash 3.15 (+0.61 ms, +2.7 % of a round of dflash", "0.96"),
    ],
)
def test_speed_says_what_was_measured(folder, here, accounted):
    result = SpeedResult.load(RESULTS / folder)
    faster, claim = result.claims()
    assert faster.id == "faster" and "dspine 1.4" in faster.here
    assert faster.verdict[:2] == ("shown", "shown") and claim.verdict.effect == "undecided"
    assert here in claim.here and result.same_tokens
    assert claim.controls[1].outcome == f"{accounted} of the predicted speedup"
    assert claim.here in result.findings()


@pytest.mark.parametrize("folder", ["speed", "speed_rows"])
def test_the_table_of_speeds_follows_from_its_batches(folder):
    result = SpeedResult.load(RESULTS / folder)
    lists = ("sets", "ids", "tokens", "rounds")
    runs = [
        BatchRun(
            **{
                **raw,
                **{name: tuple(raw[name]) for name in lists},
                "sampling": Sampling(**raw["sampling"]),
                "timing": Timing(**raw["timing"]),
            }
        )
        for raw in result.data["runs"]
    ]
    costs = [PassCosts(**{**raw, "sampling": Sampling(**raw["sampling"])}) for raw in result.data["costs"]]
    again = tabulate(runs, costs, seed=result.config["seed"], resamples=2000)
    keys = ["draft", "condition", "metric", "set"]
    pd.testing.assert_frame_equal(
        again.sort_values(keys, ignore_index=True), result.table.sort_values(keys, ignore_index=True), rtol=1e-12
    )


def test_acceptance_says_what_was_measured():
    result = AcceptanceResult.load(RESULTS / "acceptance_public")
    (claim,) = result.claims()
    assert "dspine over dflash: 2.12 / 2.00 = 1.06 (1.05, 1.08), mean of 7 sets, n = 210 prompts" in claim.here
    assert claim.verdict == ("shown in 1 seed", "not measured", "smaller")
    assert [control.passed for control in claim.controls] == [False, None]
    again = AcceptanceResult.of(result.counts, result.config, result.drafts)
    pd.testing.assert_frame_equal(again.table, result.table, rtol=1e-12)
    assert math.isclose(result.select(draft="dspine", metric="al", set="mean")["mean"].item(), 2.1218, abs_tol=1e-3)


def test_joint_injection_says_what_was_measured():
    result = JointInjectionResult.load(RESULTS / "joint_injection")
    (claim,) = result.claims()
    assert claim.here.endswith("depth 1 − last: +5.7 points (+5.0, +6.3), 3 seeds")
    assert claim.verdict == ("shown", "not measured", "smaller")
    each = result.select(metric="shallow − late")
    curve = result.curve().set_index("depth")["mean"]
    assert math.isclose(each["mean"].mean(), curve[1] - curve[5], abs_tol=1e-9)
