"""Batches, schedules and the loop: deterministic, resumable to the bit, and aimed at the right labels."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import BLOCK, VOCAB, seeded, toy_draft, toy_sequence, toy_store

from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.training.anchors import make_batch, sample_anchors, slot_weights, valid_anchors, visiting_order
from dspine_probe.training.objectives.base import Progress, objective_for, supervised
from dspine_probe.training.objectives.dflash import DFlashObjective
from dspine_probe.training.objectives.dspine import DSpineObjective, replacement_probability
from dspine_probe.training.optimization import TrainConfig, learning_rate
from dspine_probe.training.state import LOCK, locked
from dspine_probe.training.trainer import train

CONFIG = TrainConfig(blocks=120, sequences=2, anchors=3, lr=1e-2, save_every=4, log_every=1, mixed_precision="no")


def batch_of(anchors: list[list[int]], lengths: list[int], per_sequence: int = 3):  # type: ignore[no-untyped-def]
    sequences = [toy_sequence(length, 3, seed) for seed, length in enumerate(lengths)]
    chosen = [torch.tensor(a) for a in anchors]
    return sequences, make_batch(sequences, chosen, block_size=BLOCK, gamma=4.0, anchors_per_sequence=per_sequence)


def test_anchors_are_response_positions_with_a_next_token() -> None:
    sequence = toy_sequence(10, 4)
    assert valid_anchors(sequence).tolist() == [4, 5, 6, 7, 8]
    drawn = sample_anchors(sequence, 3, seeded(1))
    assert torch.equal(drawn, sample_anchors(sequence, 3, seeded(1)))
    assert len(set(drawn.tolist())) == 3
    assert drawn.tolist() == sorted(drawn.tolist())


def test_a_batch_holds_what_its_anchors_say() -> None:
    sequences, batch = batch_of([[3, 6, 8], [4]], [10, 9])
    assert batch.taps.shape[1] == 9, "rows past the last anchor are dropped"
    for row, (sequence, anchors) in enumerate(zip(sequences, [[3, 6, 8], [4, None, None]], strict=True)):
        for column, anchor in enumerate(anchors):
            block = row * 3 + column
            assert batch.real[row, column] == (anchor is not None)
            if anchor is None:
                assert not batch.weight[block].any()
                continue
            for slot in range(1, BLOCK):
                inside = anchor + slot < len(sequence)
                expected = slot_weights(BLOCK - 1, 4.0)[slot - 1] if inside else 0.0
                assert batch.weight[block, slot - 1] == expected
                if inside:
                    assert batch.tokens[block, slot] == sequence.tokens[anchor + slot]
                    assert torch.equal(batch.teacher[block, slot - 1], sequence.final[anchor + slot - 1])


def test_supervision_stops_at_the_first_token_the_draft_cannot_propose() -> None:
    _, batch = batch_of([[3, 6], [4]], [12, 12], per_sequence=2)
    banned = batch.tokens[0, 2]
    vocabulary = torch.tensor([v for v in range(VOCAB) if v != banned])
    labels, weight = supervised(toy_draft("dflash", vocabulary=vocabulary), batch)
    assert labels[0, 1] == -1
    assert weight[0, 0] > 0
    assert not weight[0, 1:].any()


def test_the_visiting_order_covers_every_sequence_once_and_depends_on_the_epoch() -> None:
    lengths = list(range(5, 25))
    first, again, second = (visiting_order(lengths, 2, 7, epoch) for epoch in (0, 0, 1))
    assert first == again != second
    assert sorted(i for group in first for i in group) == list(range(20))
    assert all(abs(lengths[a] - lengths[b]) <= 1 for a, b in first)


def test_labels_do_not_reach_the_draft_without_replacement() -> None:
    """Scores are the same whatever the labels are; with replacement on they are not."""
    draft = toy_draft("dspine")
    _, batch = batch_of([[3, 6, 8], [4, 5, 6]], [12, 12])
    other = batch.tokens.clone()
    other[:, 1:] = (other[:, 1:] + 5) % VOCAB
    moved = dataclasses.replace(batch, tokens=other)
    seen: list[torch.Tensor] = []
    draft.ln_final.hook_normalized.register_forward_hook(lambda _m, _i, out: seen.append(out.detach()))
    objective = DSpineObjective(draft)
    for item in (batch, moved):
        objective(item, Progress(90, 100, seeded()))
    assert torch.equal(seen[0], seen[1])
    for item in (batch, moved):
        objective(item, Progress(0, 100, seeded()))
    assert not torch.equal(seen[2], seen[3])


def test_the_replacement_curriculum_holds_then_fades() -> None:
    spine = DSpineConfig()
    chances = [replacement_probability(spine, Progress(step, 600, seeded())) for step in (0, 100, 150, 200, 599)]
    assert chances == pytest.approx([0.5, 0.5, 0.25, 0.0, 0.0])


def test_every_part_of_the_spine_is_trained() -> None:
    draft = toy_draft("dspine")
    _, batch = batch_of([[3, 6, 8], [4, 5, 6]], [12, 12])
    DSpineObjective(draft)(batch, Progress(0, 100, seeded())).loss.backward()
    still = [name for name, p in draft.named_parameters() if p.grad is None or not p.grad.any()]
    assert not still


def test_uneven_processes_weigh_as_one() -> None:
    """Sums over parts divided by the weight of the whole equal the loss of the whole batch."""
    objective = DFlashObjective(toy_draft("dflash"))
    _, whole = batch_of([[3, 6, 8], [4]], [12, 12])
    total = whole.weight.sum()
    full = objective(dataclasses.replace(whole, weight=whole.weight / total), Progress(0, 1, seeded())).loss
    parts = []
    for row in range(2):
        blocks = slice(row * 3, row * 3 + 3)
        part = dataclasses.replace(
            whole,
            taps=whole.taps[row : row + 1],
            anchors=whole.anchors[row : row + 1],
            anchor_tokens=whole.anchor_tokens[row : row + 1],
            tokens=whole.tokens[blocks],
            weight=whole.weight[blocks] / total,
            teacher=whole.teacher[blocks],
        )
        parts.append(objective(part, Progress(0, 1, seeded())).loss)
    torch.testing.assert_close(full, torch.stack(parts).sum())


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_run_resumes_to_the_bit(kind: str, optimizer: str, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    store, whole, killed, resumed = toy_store(), *(toy_draft(kind) for _ in range(3))
    train(whole, store, config, tmp_path / "whole")
    train(killed, store, config, tmp_path / "cut", stop_after=9)
    reports = []
    train(resumed, store, config, tmp_path / "cut", on_log=reports.append)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert [r.step for r in reports] == list(range(10, 21))
    rows = (tmp_path / "cut" / "metrics.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows[1:]] == list(range(1, 21))


@pytest.mark.parametrize("kind", ["dflash", "dspine"])
def test_runs_of_either_precision_follow_each_other_in_one_process(kind: str, tmp_path: Path) -> None:
    found = []
    for precision in ("no", "bf16", "no"):
        draft = toy_draft(kind)
        config = dataclasses.replace(CONFIG, mixed_precision=precision)
        train(draft, toy_store(), config, tmp_path / str(len(found)), stop_after=2)
        found.append(draft.fc.weight)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[1], atol=3e-2, rtol=0.1)


def test_training_learns_a_repeated_token(tmp_path: Path) -> None:
    """On text that says one token over and over the loss must collapse."""
    store = toy_store()
    store._arrays[0][0].fill_(7)
    draft, losses = toy_draft("dflash"), []
    config = dataclasses.replace(CONFIG, blocks=600)
    train(draft, store, config, tmp_path, on_log=lambda r: losses.append(r.cross_entropy))
    assert losses[-1] < 0.05 < losses[0]


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    config = dataclasses.replace(CONFIG, blocks=600, lr=1.0, warmup=0.1)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[-1] < 1e-3


def test_the_rate_may_be_lowered_on_resume_and_is_recorded(tmp_path: Path) -> None:
    draft, lowered, reports = toy_draft("dflash"), dataclasses.replace(CONFIG, lr=5e-3), []
    train(draft, toy_store(), CONFIG, tmp_path, stop_after=8)
    state = train(toy_draft("dflash"), toy_store(), lowered, tmp_path, on_log=reports.append)
    assert [r.lr for r in reports] == pytest.approx([learning_rate(lowered, step) for step in range(8, 20)])
    assert state.rates == [(0, 1e-2), (8, 5e-3)]
    kept = torch.load(tmp_path / "state.pt", weights_only=True)
    assert kept["rates"] == state.rates
    assert kept["config"]["lr"] == 5e-3


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_not_taken(where: str, tmp_path: Path) -> None:
    """The draft keeps the weights of the step before, and so does what is on disk."""

    class Broken(DFlashObjective):
        def forward(self, batch, progress):  # type: ignore[no-untyped-def]
            outcome = super().forward(batch, progress)
            if progress.step < 5:
                return outcome
            bad = outcome.loss * torch.nan
            if where == "gradient":
                bad = outcome.loss + (self.draft.fc.weight * 1e-30).square().sum().sqrt() * 0
            return dataclasses.replace(outcome, loss=bad)

    good, draft = toy_draft("dflash"), toy_draft("dflash")
    train(good, toy_store(), CONFIG, tmp_path / "good", stop_after=5)
    with pytest.raises(ProbeError, match=r"at step 5, which was not taken; run .* with a lower --lr"):
        train(draft, toy_store(), CONFIG, tmp_path / "run", objective=Broken(draft))
    assert all(torch.equal(v, draft.state_dict()[name]) for name, v in good.state_dict().items())
    train(toy_draft("dflash"), toy_store(), dataclasses.replace(CONFIG, lr=1e-3), tmp_path / "run")


def test_anchors_and_replacement_draw_from_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[torch.Tensor] = []

    def watch(self: DFlashObjective, batch, progress):  # type: ignore[no-untyped-def]
        seen.append(torch.rand(8, generator=progress.generator))
        return real(self, batch, progress)

    real = DFlashObjective.forward
    monkeypatch.setattr(DFlashObjective, "forward", watch)
    train(toy_draft("dflash"), toy_store(), CONFIG, tmp_path, stop_after=3)
    of_anchors = [torch.rand(8, generator=seeded(CONFIG.seed * 1_000_003 + number)) for number in range(3)]
    for drawn, anchors in zip(seen, of_anchors, strict=True):
        assert not torch.equal(drawn, anchors)
    assert len({tuple(drawn.tolist()) for drawn in seen}) == 3


def test_a_folder_in_use_is_refused_and_a_dead_lock_is_not(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("99999999\n")
    train(toy_draft("dflash"), toy_store(), CONFIG, tmp_path, stop_after=1)
    with locked(tmp_path), pytest.raises(UsageError, match=f"in use by process {os.getpid()}; wait for it"):
        train(toy_draft("dflash"), toy_store(), CONFIG, tmp_path)
    train(toy_draft("dflash"), toy_store(), CONFIG, tmp_path, stop_after=2)


@pytest.mark.parametrize("mode", [lambda: torch.set_grad_enabled(False), torch.inference_mode])
def test_training_does_not_mind_the_mode_that_others_set(mode: Any, tmp_path: Path) -> None:
    draft, plain = toy_draft("dspine"), toy_draft("dspine")
    with mode():
        train(draft, toy_store(), CONFIG, tmp_path / "a", held_out=[0], stop_after=2)
    train(plain, toy_store(), CONFIG, tmp_path / "b", held_out=[0], stop_after=2)
    assert all(torch.equal(v, draft.state_dict()[name]) for name, v in plain.state_dict().items())


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="adamw or muon"):
        TrainConfig(blocks=1000, optimizer="sgd")
    with pytest.raises(UsageError, match="do not fill one step"):
        TrainConfig(blocks=10)
    with pytest.raises(UsageError, match="do not fill one batch"):
        train(toy_draft("dflash"), toy_store((9,)), CONFIG, tmp_path / "few")
    train(toy_draft("dflash"), toy_store(), CONFIG, tmp_path / "run", stop_after=1)
    with pytest.raises(UsageError, match=r"other settings \(gamma\)"):
        train(toy_draft("dflash"), toy_store(), dataclasses.replace(CONFIG, gamma=1.0), tmp_path / "run")
    (tmp_path / "run" / "state.pt").write_bytes(b"half")
    with pytest.raises(ProbeError, match="delete it to start over"):
        train(toy_draft("dflash"), toy_store(), CONFIG, tmp_path / "run")
    assert isinstance(objective_for(toy_draft("dspine")), DSpineObjective)
