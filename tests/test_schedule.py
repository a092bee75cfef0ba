"""Runs in absolute blocks: one stable run, and decays that branch off its kept states."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from test_intermediate import tiny_store
from test_training import CONFIG
from tiny import tiny_target
from toy import seeded, toy_draft, toy_store

from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.errors import UsageError
from dspine_probe.training.objectives.base import Progress
from dspine_probe.training.objectives.dspine import replacement_probability
from dspine_probe.training.optimization import WSD, TrainConfig, learning_rate
from dspine_probe.training.records import METRICS, read_rows
from dspine_probe.training.run import PLAN, DraftPlan, train_draft
from dspine_probe.training.state import STATE, kept_state
from dspine_probe.training.trainer import train

STABLE = dataclasses.replace(CONFIG, schedule=WSD, warmup_blocks=24, keep_states=(48, 96), replacement_blocks=(30, 60))


def test_the_stable_rate_does_not_know_where_the_run_will_end() -> None:
    short, long = (TrainConfig(blocks=blocks, schedule=WSD, warmup_blocks=640) for blocks in (6400, 64_000))
    assert [learning_rate(short, s) for s in range(100)] == [learning_rate(long, s) for s in range(100)]
    assert learning_rate(short, 0) == pytest.approx(1e-4)
    assert learning_rate(short, 9) == learning_rate(short, 99) == 1e-3
    assert learning_rate(short, 4, processes=2) == 1e-3, "blocks count, not steps"


def test_the_decay_is_linear_to_zero_over_its_blocks() -> None:
    config = TrainConfig(blocks=6400, schedule=WSD, warmup_blocks=640, decay_from=5120)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[:81] == [learning_rate(dataclasses.replace(config, decay_from=None), s) for s in range(81)]
    assert rates[80:] == pytest.approx([1e-3 * left / 20 for left in range(20, 0, -1)])


def test_the_curriculum_is_in_blocks_under_wsd_and_in_shares_under_cosine() -> None:
    spine, step_blocks = DSpineConfig(), 64
    for blocks in (320_000, 640_000):
        config = TrainConfig(blocks=blocks, schedule=WSD)

        def at(done: int, config: TrainConfig = config) -> Progress:
            return Progress(done // step_blocks, config.steps(), seeded(), config.step_blocks(), config.curriculum)

        chances = [replacement_probability(spine, at(done)) for done in (0, 52_992, 80_000, 107_008)]
        assert chances == pytest.approx([0.5, 0.5, 0.25, 0.0])
        assert at(0).warmed_up(146) == pytest.approx(1 / 146)
        assert at(146 * 64).warmed_up(1) == 1.0
    assert TrainConfig(blocks=320_000).curriculum is None


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
def test_a_decay_goes_on_from_a_kept_state_and_resumes_to_the_bit(kind: str, tmp_path: Path) -> None:
    store, stable = toy_store(), toy_draft(kind)
    train(stable, store, STABLE, tmp_path / "stable")
    assert {p.name for p in (tmp_path / "stable").glob("*.pt")} == {STATE, "state-48.pt", "state-96.pt"}
    decay = dataclasses.replace(STABLE, keep_states=(), blocks=120, decay_from=96)
    origin = kept_state(tmp_path / "stable", 96)
    whole, cut, resumed = (toy_draft(kind) for _ in range(3))
    train(whole, store, decay, tmp_path / "whole", origin=origin)
    rows = read_rows(tmp_path / "whole" / METRICS)
    assert [int(row["blocks"]) for row in rows] == [102, 108, 114, 120]
    assert [float(row["lr"]) for row in rows] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    train(cut, store, decay, tmp_path / "cut", origin=origin, stop_after=18)
    train(resumed, store, decay, tmp_path / "cut")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert not torch.equal(whole.fc.weight, stable.fc.weight)


def test_a_stable_run_may_be_told_to_go_further(tmp_path: Path) -> None:
    store, whole, short, longer = toy_store(), *(toy_draft("dspine") for _ in range(3))
    train(whole, store, STABLE, tmp_path / "whole")
    train(short, store, dataclasses.replace(STABLE, blocks=60, keep_states=()), tmp_path / "run")
    train(longer, store, STABLE, tmp_path / "run")
    assert all(torch.equal(value, longer.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_decayed_checkpoint_from_plan_to_card(tmp_path: Path) -> None:
    target, store = tiny_target(), tiny_store()
    plan = DraftPlan("dspine", 2, 5, 40, mask_token_id=63)
    stable = tmp_path / "stable", tmp_path / "out"
    train_draft(plan, target, store, STABLE, *stable)
    config = dataclasses.replace(STABLE, keep_states=())
    for source, name in ((stable[0], "by-run"), (stable[0] / "state-96.pt", "by-state")):
        run = tmp_path / name, tmp_path / f"{name}-out"
        made = train_draft(plan, target, store, config, *run, decay_from=source)
        card = (run[1] / "README.md").read_text()
        assert "| decay_from | 96 |" in card
        assert json.loads((run[0] / PLAN).read_text())["precision"] == "fp32"
        assert made.kind.name == "dspine"
    with pytest.raises(UsageError, match=r"another plan \(layers\)"):
        train_draft(
            dataclasses.replace(plan, layers=3), target, store, config, tmp_path / "x", tmp_path / "y",
            decay_from=stable[0],
        )  # fmt: skip


def test_refusals(tmp_path: Path) -> None:
    store = toy_store()
    train(toy_draft("dflash"), store, STABLE, tmp_path / "stable")
    with pytest.raises(UsageError, match=r"no state at 160 blocks \(kept: 48, 96\); give its --keep-states 160"):
        kept_state(tmp_path / "stable", 160)
    decay = dataclasses.replace(STABLE, keep_states=(), blocks=120, decay_from=96)
    with pytest.raises(UsageError, match=r"stands at step 8, and a decay .* begins at step 16"):
        train(toy_draft("dflash"), store, decay, tmp_path / "d", origin=tmp_path / "stable" / "state-48.pt")
    with pytest.raises(UsageError, match=r"other settings \(gamma\)"):
        changed = dataclasses.replace(decay, gamma=1.0)
        train(toy_draft("dflash"), store, changed, tmp_path / "d", origin=kept_state(tmp_path / "stable", 96))
    train(toy_draft("dflash"), store, decay, tmp_path / "d", origin=kept_state(tmp_path / "stable", 96))
    with pytest.raises(UsageError, match=r"other settings \(blocks\)"):
        train(toy_draft("dflash"), store, dataclasses.replace(decay, blocks=180), tmp_path / "d")
    with pytest.raises(UsageError, match="schedule 'linear' is unknown"):
        TrainConfig(blocks=1000, schedule="linear")
    with pytest.raises(UsageError, match="give --schedule wsd"):
        TrainConfig(blocks=1000, keep_states=(500,))
    with pytest.raises(UsageError, match="end no earlier"):
        TrainConfig(blocks=1000, replacement_blocks=(5, 4))
