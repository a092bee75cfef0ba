"""Supervision of intermediate layers: what each arm asks for, what it must leave alone, and that it resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_training import CONFIG, batch_of
from tiny import WIDTH, tiny_target
from torch.nn import functional as F
from toy import D_MODEL, LAYERS, VOCAB, seeded, toy_draft, toy_store

from dspine_probe.drafts.checkpoint import WEIGHTS
from dspine_probe.errors import UsageError
from dspine_probe.target import Target
from dspine_probe.training import intermediate, trainer
from dspine_probe.training.features import FeatureMeta, FeatureStore
from dspine_probe.training.intermediate import (
    ARMS,
    CODE_ARMS,
    READOUTS,
    Intermediate,
    Supervision,
    expected_codes,
    load_readouts,
)
from dspine_probe.training.objectives.base import Progress, objective_for
from dspine_probe.training.objectives.dflash import DFlashObjective
from dspine_probe.training.records import VALIDATION, read_rows, trim_rows
from dspine_probe.training.run import PLAN, DraftPlan, train_draft
from dspine_probe.training.trainer import train
from dspine_probe.transfer import TransferSpace

RANK = 8
SUPERVISED = [arm for arm in ARMS if arm != "none"]


def arm_of(arm: str, **changes: float) -> Intermediate:
    head = toy_draft("dflash").head
    return Intermediate(Supervision(arm, rank=RANK, **changes), head, LAYERS)


def step(objective: DFlashObjective, at: int = 1000):  # type: ignore[no-untyped-def]
    _, batch = batch_of([[3, 6, 8], [4, 5, 6]], [12, 12])
    batch = dataclasses.replace(batch, weight=batch.weight / batch.weight.sum())
    return batch, objective(batch, Progress(at, 2000, seeded()))


def by_hand(arm: str) -> torch.Tensor:
    """The losses of layers 1…L−1 from their definitions, over whole tensors."""
    draft = toy_draft("dflash")
    objective = DFlashObjective(draft)
    batch, _ = step(objective)
    states = draft.run(draft.encode_context(batch.taps), batch.anchor_tokens, batch.anchors)
    assert len(states.residuals) == LAYERS
    torch.testing.assert_close(draft.ln_final(states.residuals[-1]), states.hidden)
    space = TransferSpace.fit(draft.head, RANK)
    labels, weight = batch.tokens[:, 1:], batch.weight
    codes = space.codes(draft.head)
    rows = F.normalize(draft.head, dim=-1) - space.mean
    wanted = {
        "cosine": codes[labels],
        "code-mse": codes[labels] * RANK**0.5,
        "cosine-unwhitened": F.normalize(rows @ space.basis, dim=-1)[labels],
        "expected-code": (batch.teacher @ draft.head.T).softmax(-1) @ codes,
    }
    losses = []
    for h in states.residuals[:-1]:
        h = h[:, 1:]
        if arm == "token-ce":
            logits = draft.logits(draft.ln_final(h))
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(weight)
        elif arm == "code-mse":
            unit = h / h.square().mean(-1, keepdim=True).sqrt()
            loss = (unit @ space.basis - wanted[arm]).square().mean(-1)
        else:
            loss = 1 - F.cosine_similarity(h @ space.basis, wanted[arm], dim=-1)
        losses.append((weight * loss).sum())
    return torch.stack(losses)


@pytest.mark.parametrize("arm", SUPERVISED)
def test_an_arm_adds_what_its_definition_says(arm: str) -> None:
    expected = by_hand(arm)
    objective = DFlashObjective(toy_draft("dflash"), intermediate=arm_of(arm, weight=0.3))
    _, plain = step(DFlashObjective(toy_draft("dflash")))
    _, outcome = step(objective)
    got = torch.stack([outcome.parts[f"layer_{layer}"] for layer in range(1, LAYERS)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    factor = 0.3 / (LAYERS - 1) if arm == "token-ce" else 0.3 * plain.cross_entropy
    torch.testing.assert_close(outcome.loss, plain.loss + factor * expected.sum(), rtol=1e-4, atol=1e-5)
    assert outcome.cross_entropy == plain.cross_entropy


def test_the_weight_warms_up_and_its_cross_entropy_has_no_gradient() -> None:
    cosine = arm_of("cosine", weight=0.5, warmup_steps=10)
    ce = torch.tensor(4.0, requires_grad=True)
    warmed = [Progress(at, 2000, seeded()).warmed_up(10) for at in (0, 4, 9, 500)]
    assert [float(cosine.strength(share, ce)) for share in warmed] == pytest.approx([0.2, 1.0, 2.0, 2.0])
    assert not cosine.strength(1.0, ce).requires_grad


@pytest.mark.parametrize("arm", SUPERVISED)
def test_intermediate_layers_get_a_gradient_and_so_do_the_readouts(arm: str) -> None:
    """The last layer's own weights must feel nothing of it."""
    draft, module = toy_draft("dflash"), arm_of(arm)
    batch, _ = step(DFlashObjective(draft))
    states = draft.run(draft.encode_context(batch.taps), batch.anchor_tokens, batch.anchors)
    module(draft, states.residuals, batch, batch.tokens[:, 1:], batch.weight).sum().backward()
    touched = [any(bool((p.grad != 0).any()) for p in b.parameters() if p.grad is not None) for b in draft.blocks]
    assert touched == [True] * (LAYERS - 1) + [False]
    assert all(p.grad is not None and p.grad.any() for p in module.readouts)
    assert len(module.readouts) == (LAYERS - 1 if arm in CODE_ARMS else 0)


def test_expected_codes_in_chunks_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    g = seeded()
    teacher, head, codes = (torch.randn(n, d, generator=g) for n, d in ((7, 5), (11, 5), (11, 3)))
    monkeypatch.setattr(intermediate, "_CHUNK", 3)
    torch.testing.assert_close(expected_codes(teacher, head, codes), (teacher @ head.T).softmax(-1) @ codes)


def test_expected_codes_are_those_of_the_drafts_own_vocabulary() -> None:
    """A draft that can propose one token only expects that token's code."""
    vocabulary = torch.tensor([5])
    module = Intermediate(Supervision("expected-code", rank=RANK), toy_draft("dflash").head, LAYERS)
    batch, _ = step(DFlashObjective(toy_draft("dflash")))
    wanted = module._wanted(toy_draft("dflash", vocabulary=vocabulary), batch)
    torch.testing.assert_close(wanted, module.codes[5].expand_as(wanted))


@pytest.mark.parametrize("arm", ["cosine", "token-ce"])
def test_a_supervised_run_resumes_to_the_bit(arm: str, tmp_path: Path) -> None:
    store, drafts = toy_store(), [toy_draft("dflash") for _ in range(3)]
    modules = [arm_of(arm) for _ in drafts]
    for draft, module, folder, stop in zip(drafts, modules, ("whole", "cut", "cut"), (None, 9, None), strict=True):
        objective = objective_for(draft, module)
        train(draft, store, CONFIG, tmp_path / folder, held_out=[0], objective=objective, stop_after=stop)
    for name, value in drafts[0].state_dict().items():
        assert torch.equal(value, drafts[2].state_dict()[name]), name
    for ours, theirs in zip(modules[0].readouts, modules[2].readouts, strict=True):
        assert torch.equal(ours, theirs)
    kept = load_readouts(tmp_path / "cut")
    assert len(kept) == len(modules[0].readouts)
    assert all(torch.equal(a, b) for a, b in zip(kept, modules[0].readouts, strict=True))
    assert (tmp_path / "cut" / READOUTS).exists() == (arm == "cosine")
    assert all(not torch.equal(a, b) for a, b in zip(kept, kept[1:], strict=False)), "one readout for each layer"
    whole, cut = (read_rows(tmp_path / name / VALIDATION) for name in ("whole", "cut"))
    assert [row["step"] for row in whole] == ["4", "8", "12", "16", "20"]
    assert [row for row in cut if row["step"] != "9"] == whole
    assert whole[0]["blocks"] == str(4 * CONFIG.sequences * CONFIG.anchors)
    assert 1.0 <= float(whole[-1]["tokens_per_anchor"]) <= 4.0


def test_a_kill_after_the_last_state_leaves_no_row_twice(tmp_path: Path) -> None:
    (tmp_path / VALIDATION).write_text("step,blocks\n4,24\n8,48\n12,7")
    trim_rows(tmp_path / VALIDATION, 8)
    assert [row["step"] for row in read_rows(tmp_path / VALIDATION)] == ["4", "8"]


def test_another_arm_does_not_go_on_from_the_state_of_this_one(tmp_path: Path) -> None:
    draft = toy_draft("dflash")
    train(draft, toy_store(), CONFIG, tmp_path, objective=objective_for(draft, arm_of("cosine")), stop_after=1)
    with pytest.raises(UsageError, match=r"other settings \(supervision\)"):
        train(toy_draft("dflash"), toy_store(), CONFIG, tmp_path)


def test_readouts_do_not_make_the_drafts_steps_smaller(tmp_path: Path) -> None:
    """The clipping limit holds for the draft alone, and the logged norm is the draft's."""
    draft, module = toy_draft("dflash"), arm_of("cosine")
    objective = DFlashObjective(draft, intermediate=module)
    for p in draft.parameters():
        p.grad = torch.full_like(p, 1e-3)
    for p in module.parameters():
        p.grad = torch.full_like(p, 1e3)
    before = draft.fc.weight.grad.clone()
    norm = trainer._clip(trainer.Accelerator(cpu=True), objective, 1.0)
    assert norm < 1
    assert torch.equal(draft.fc.weight.grad, before)
    assert torch.cat([p.grad.flatten() for p in module.parameters()]).norm() <= 1.001


def tiny_run(plan: DraftPlan, folder: Path, store: FeatureStore, target: Target) -> dict[str, torch.Tensor]:
    config = dataclasses.replace(CONFIG, blocks=6, lr=0.0)
    train_draft(plan, target, store, config, folder / "run", folder / "out")
    return load_file(folder / "out" / WEIGHTS)


def tiny_store() -> FeatureStore:
    """A store whose widths are those of the tiny target."""
    lengths = (12,) * 60
    total, g = sum(lengths), seeded()
    meta = FeatureMeta("t", (0, 2), WIDTH, tuple(f"a/{i}" for i in range(60)), lengths, (3,) * 60)
    tokens = torch.randint(0, 60, (total,), generator=g)
    arrays = tokens, torch.randn(total, 2 * WIDTH, generator=g), torch.randn(total, WIDTH, generator=g)
    return FeatureStore([(meta, arrays)])


def test_every_arm_starts_from_the_same_weights_and_sees_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learning rate of zero the checkpoint is the start; the public layout holds no readout."""
    target = tiny_target()
    store, seen, starts = tiny_store(), [], []
    real = DFlashObjective.forward

    def watch(self: DFlashObjective, batch, progress):  # type: ignore[no-untyped-def]
        seen[-1].append((batch.tokens, batch.anchors))
        return real(self, batch, progress)

    monkeypatch.setattr(DFlashObjective, "forward", watch)
    for arm in ARMS:
        seen.append([])
        plan = DraftPlan("dflash", 2, 5, 40, supervision=Supervision(arm), mask_token_id=63, warm=False)
        torch.manual_seed(len(arm))
        starts.append(tiny_run(plan, tmp_path / arm, store, target))
    for start, blocks in zip(starts[1:], seen[1:], strict=True):
        assert start.keys() == starts[0].keys()
        assert all(torch.equal(start[name], starts[0][name]) for name in start)
        for ours, theirs in zip(blocks, seen[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_plans_are_kept_and_a_causal_trunk_is_recorded(tmp_path: Path) -> None:
    target = tiny_target()
    store = tiny_store()
    plan = DraftPlan("dflash", 2, 5, 40, mask_token_id=63, causal=True)
    tiny_run(plan, tmp_path, store, target)
    assert '"is_causal": true' in (tmp_path / "out" / "config.json").read_text()
    assert "| causal | True |" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "run" / PLAN).exists()
    with pytest.raises(UsageError, match=r"another plan \(causal\)"):
        tiny_run(dataclasses.replace(plan, causal=False), tmp_path, store, target)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="use one of none, token-ce"):
        Supervision("cosin")
    with pytest.raises(UsageError, match="must be positive"):
        Supervision("cosine", weight=0.0)
    with pytest.raises(UsageError, match="no intermediate one"):
        Intermediate(Supervision("cosine", rank=4), torch.randn(VOCAB, D_MODEL), 1)
    with pytest.raises(UsageError, match="has no losses"):
        Intermediate(Supervision("none"), torch.randn(VOCAB, D_MODEL), 3)
    with pytest.raises(UsageError, match="is for dflash, not for dspine"):
        objective_for(toy_draft("dspine"), arm_of("cosine"))
