"""Blocks that show a prefix: none changes nothing, one is what slots see, and only what lies behind it is trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from test_intermediate import tiny_store
from test_training import CONFIG, batch_of
from tiny import MASK, tiny_draft, tiny_target
from toy import BLOCK, VOCAB, seeded, toy_draft, toy_store

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.drafts.checkpoint import load_draft, save_draft
from dspine_probe.errors import UsageError
from dspine_probe.training.anchors import show_prefixes
from dspine_probe.training.objectives.base import Progress, objective_for, supervised
from dspine_probe.training.run import DraftPlan, train_draft
from dspine_probe.training.trainer import train

SLOTS = BLOCK - 1
KINDS = ["dflash", "dspine"]


def hidden(kind: str, visible: torch.Tensor | None, *, causal: bool = True) -> torch.Tensor:
    draft = toy_draft(kind, causal=causal)
    _, batch = batch_of([[3, 6, 8], [4, 5, 6]], [12, 12])
    context = draft.encode_context(batch.taps)
    return draft.run(context, batch.anchor_tokens, batch.anchors, visible=visible).hidden


def shown(slot: int, token: int) -> torch.Tensor:
    visible = torch.full((6, SLOTS), -1)
    visible[:, slot - 1] = token
    return visible


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_shown_is_the_plain_pass_to_the_bit(kind: str) -> None:
    plain = hidden(kind, None)
    assert torch.equal(plain, hidden(kind, torch.full((6, SLOTS), -1)))
    mask = toy_draft(kind).config.mask_token_id
    assert torch.equal(plain, hidden(kind, shown(2, mask))), "showing the mask is showing nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_shown_token_reaches_its_slot_and_those_behind_it(kind: str) -> None:
    """In a causal block not those before it; in a bidirectional one all."""
    changed = (hidden(kind, shown(2, 7)) - hidden(kind, None)).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == [False, False, True, True]
    if kind == "dflash":
        both_ways = hidden(kind, shown(2, 7), causal=False) - hidden(kind, None, causal=False)
        assert (both_ways.abs().amax(dim=(0, 2)) > 1e-6).all()


def test_a_shown_token_is_embedded_as_the_anchor_is() -> None:
    draft = toy_draft("dflash")
    rows = draft.embed_block(torch.tensor([[9]]), BLOCK, torch.tensor([[4, -1, 9]]))[0]
    assert torch.equal(rows, draft.embedding[torch.tensor([9, 4, draft.config.mask_token_id, 9])])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_prefixes_are_uniform_and_take_the_weight_of_what_they_show(share: float) -> None:
    sequences, plain = batch_of([[3, 6, 8], [4]], [20, 20])
    counts = torch.zeros(SLOTS)
    generator = seeded(4)
    for _ in range(300):
        batch = show_prefixes(plain, share, generator)
        assert batch.visible is not None
        seen = batch.visible >= 0
        assert torch.equal(seen, seen.long().cumprod(1).bool()), "a prefix"
        assert torch.equal(batch.visible[seen], batch.tokens[:, 1:][seen])
        assert torch.equal(batch.weight, plain.weight * ~seen)
        counts += torch.bincount(seen.sum(1), minlength=SLOTS)
    assert len(counts) == SLOTS, "the last slot is always drafted"
    expected = torch.tensor([1 - share + share / SLOTS] + [share / SLOTS] * (SLOTS - 1))
    assert (counts / counts.sum() - expected).abs().max() < 0.04


def test_a_shown_token_outside_the_drafts_vocabulary_does_not_end_supervision() -> None:
    _, batch = batch_of([[3, 6], [4]], [14, 14], per_sequence=2)
    banned = batch.tokens[0, 1]
    draft = toy_draft("dflash", vocabulary=torch.tensor([v for v in range(VOCAB) if v != banned]))
    _, without = supervised(draft, batch)
    assert not without[0].any()
    visible = torch.full_like(batch.tokens[:, 1:], -1)
    visible[0, 0] = banned
    weight = batch.weight * (visible < 0)
    labels, found = supervised(draft, dataclasses.replace(batch, visible=visible, weight=weight))
    known = (labels[0, 1:] >= 0).long().cumprod(0)
    assert torch.equal(found[0], torch.cat([torch.zeros(1), batch.weight[0, 1:] * known]))
    assert known[0], "the next label can be proposed, or this test shows nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_objectives_see_the_prefix_and_leave_shown_slots_alone(kind: str) -> None:
    """The loss moves with a shown token, and labels of shown slots do not count."""
    draft = toy_draft(kind, causal=True)
    objective = objective_for(draft)
    _, plain = batch_of([[3, 6, 8], [4, 5, 6]], [12, 12])
    visible = torch.where(torch.arange(SLOTS) < 2, plain.tokens[:, 1:], -1)
    weight = plain.weight * (visible < 0)
    batch = dataclasses.replace(plain, visible=visible, weight=weight)
    at = Progress(90, 100, seeded())
    with_prefix = objective(batch, at)
    without = objective(dataclasses.replace(batch, visible=torch.where(visible >= 0, 0, -1)), at)
    assert with_prefix.loss != without.loss
    assert with_prefix.slot_counts.tolist() == [0.0, 0.0, 6.0]
    relabelled = plain.tokens.clone()
    relabelled[:, 1] = (relabelled[:, 1] + 1) % VOCAB
    again = objective(dataclasses.replace(batch, tokens=relabelled), at)
    assert again.loss == with_prefix.loss


def test_a_prefix_run_draws_the_same_anchors_and_resumes_to_the_bit(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, visible_prefix=0.5)
    store, whole, killed, resumed, plain = toy_store(), *(toy_draft("dflash") for _ in range(4))
    train(whole, store, config, tmp_path / "whole")
    train(killed, store, config, tmp_path / "cut", stop_after=7)
    train(resumed, store, config, tmp_path / "cut")
    assert all(torch.equal(whole.state_dict()[n], v) for n, v in resumed.state_dict().items())
    train(plain, store, CONFIG, tmp_path / "plain")
    assert not torch.equal(whole.fc.weight, plain.fc.weight)
    with pytest.raises(UsageError, match=r"other settings \(visible_prefix\)"):
        train(toy_draft("dflash"), store, CONFIG, tmp_path / "cut")


@pytest.mark.parametrize("architecture", [DFLASH, DSPINE])
def test_training_goes_on_from_a_checkpoint_and_says_from_which(architecture: str, tmp_path: Path) -> None:
    """Without a step of any size the new checkpoint is the old one; geometry and card are the checkpoint's."""
    target = tiny_target()
    store, start = tiny_store(), tmp_path / "begun"
    save_draft(tiny_draft(target, architecture, trimmed=40), start)
    kind = "dspine" if architecture == DSPINE else "dflash"
    config = dataclasses.replace(CONFIG, blocks=6, lr=0.0, visible_prefix=0.5)
    run = tmp_path / "run", tmp_path / "out"
    train_draft(DraftPlan(kind, init=str(start)), target, store, config, *run)
    before, after = (load_draft(folder, target) for folder in (start, run[1]))
    assert before.config == after.config
    assert all(torch.equal(v, after.state_dict()[name]) for name, v in before.state_dict().items())
    card = (run[1] / "README.md").read_text()
    assert "| init | begun, sha256 of the weights " in card
    assert "| visible_prefix | 0.5 |" in card
    assert "| block_size | 5 |" in card
    assert str(tmp_path) not in card
    with pytest.raises(UsageError, match="another plan"):
        train_draft(DraftPlan(kind, 2, 5, 40, mask_token_id=MASK), target, store, config, *run)


def test_refusals(tmp_path: Path) -> None:
    draft = toy_draft("dflash")
    with pytest.raises(UsageError, match=r"visible tokens are \(1, 2\) but the blocks have \(1, 3\)"):
        draft.embed_block(torch.tensor([[9]]), BLOCK, torch.tensor([[4, -1]]))
    with pytest.raises(UsageError, match="−1 or one of 0…31"):
        draft.embed_block(torch.tensor([[9]]), BLOCK, torch.tensor([[4, -1, VOCAB]]))
    target = tiny_target()
    store = tiny_store()
    save_draft(tiny_draft(target), tmp_path / "flash")
    run = tmp_path / "run", tmp_path / "out"
    with pytest.raises(UsageError, match="holds a DFlashDraftModel, not a dspine"):
        train_draft(DraftPlan("dspine", init=str(tmp_path / "flash")), target, store, CONFIG, *run)
    save_draft(tiny_draft(target, target_layer_ids=(1, 3)), tmp_path / "tapped")
    with pytest.raises(UsageError, match=r"reads taps \[1, 3\] but the features hold \[0, 2\]"):
        train_draft(DraftPlan("dflash", init=str(tmp_path / "tapped")), target, store, CONFIG, *run)
