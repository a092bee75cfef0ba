"""Domino: identity start, its head by `torch.nn.GRU`, what a proposal has read, the public layout, training, hooks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_intermediate import tiny_store
from test_training import CONFIG
from tiny import MASK, PARTS, prompts, tiny_config, tiny_draft, tiny_target
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.gru import GRUHead, gru_reference
from dspine_probe.config import DFLASH
from dspine_probe.decoding.generate import generate
from dspine_probe.drafts import DFlash, Domino
from dspine_probe.drafts.checkpoint import CONFIG as FILE
from dspine_probe.drafts.checkpoint import MANIFEST, WEIGHTS, load_draft, save_draft
from dspine_probe.errors import UsageError
from dspine_probe.hooks import HookedDraft
from dspine_probe.training.anchors import make_batch
from dspine_probe.training.objectives.base import Progress, objective_for, supervised
from dspine_probe.training.objectives.domino import DominoObjective
from dspine_probe.training.run import DraftPlan, train_draft

AT = torch.tensor([[3, 5, 9]])
SHIFTS = pytest.mark.parametrize("shifted", [True, False])


def domino(*, shifted: bool = True, prefix: int = 1, trimmed: int | None = None) -> Domino:
    part = dataclasses.replace(PARTS["domino"], shift_label=shifted, pure_draft_prefix_len=prefix)
    return tiny_draft(tiny_target(), "DominoDraftModel", part=part, trimmed=trimmed)  # type: ignore[return-value]


def taps() -> Tensor:
    return torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))


@SHIFTS
def test_the_identity_start_is_the_plain_backbone_bit_for_bit(shifted: bool) -> None:
    draft, target = domino(shifted=shifted, prefix=0), tiny_target()
    plain = DFlash(tiny_config(target, DFLASH), target.embedding, target.head)
    plain.load_state_dict(draft.state_dict(), strict=False)
    states = plain.run(plain.encode_context(taps()), AT, AT, width=draft.config.block_size - shifted)
    scores = plain.logits(draft.drafting(states.hidden))
    draft.embed_proj[2].weight.data *= 100
    assert not torch.equal(draft.draft_greedy(draft.encode_context(taps()), AT, AT), scores.argmax(-1))
    draft.zero_writes()
    noise = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    found = draft.run(draft.encode_context(taps()), AT, AT)
    assert torch.equal(found.hidden, states.hidden)
    assert torch.equal(draft.propose(found, AT).tokens, scores.argmax(-1))
    q = draft.propose(found, AT, noise=noise).q
    assert q is not None and torch.equal(q.probs, (scores - scores.amax(-1, keepdim=True)).softmax(-1))
    fresh = Domino(tiny_config(target, "DominoDraftModel"), target.embedding, target.head)
    assert not fresh.embed_proj[2].weight.any()


@SHIFTS
@pytest.mark.parametrize("trimmed", [None, 40])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_proposals_follow_the_published_head(shifted: bool, trimmed: int | None, prefix: int) -> None:
    """q of each proposal is U, or U + W₂ silu(W₁ [h; s]) with s of a torch GRU over anchor and earlier proposals."""
    draft = domino(shifted=shifted, prefix=prefix, trimmed=trimmed)
    theirs = nn.GRU(32, 5, batch_first=True, bias=False)
    theirs.load_state_dict(draft.prefix_gru.state_dict())
    states = draft.run(draft.encode_context(taps()), AT, AT)
    drawn = draft.propose(states, AT, temperature=0.7, noise=torch.rand(3, 4))
    assert drawn.q is not None
    read = torch.cat([AT.T, drawn.tokens[:, :-1]], dim=1)
    hidden, prefixes = draft.drafting(states.hidden), theirs(F.embedding(read, draft.embedding))[0]
    scores, correction = draft.logits(hidden), draft.embed_proj(torch.cat([hidden, prefixes], dim=-1))
    scores[:, prefix:] += correction[:, prefix:]
    torch.testing.assert_close(drawn.q.probs, (scores / 0.7).softmax(-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(draft.reads(hidden, read), draft.embed_proj[:2](torch.cat([hidden, prefixes], dim=-1)))


@SHIFTS
def test_a_checkpoint_comes_back_bit_for_bit(shifted: bool, tmp_path: Path) -> None:
    draft, target = domino(shifted=shifted), tiny_target()
    save_draft(draft, tmp_path, dtype=torch.float32)
    raw = json.loads((tmp_path / FILE).read_text())
    assert raw["block_size"] == 5 and raw["dflash_config"]["projector_type"] == "domino"
    assert raw["dflash_config"]["shift_label"] is shifted
    loaded = load_draft(tmp_path, target)
    assert type(loaded) is Domino and loaded.config == draft.config
    for key, value in draft.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key


def test_public_variants_are_read_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    draft, target = domino(), tiny_target()
    save_draft(draft, tmp_path, dtype=torch.float32)
    (tmp_path / MANIFEST).unlink()
    raw, tensors = json.loads((tmp_path / FILE).read_text()), load_file(tmp_path / WEIGHTS)
    raw["architectures"], raw["emb_dim"] = [DFLASH], raw["dflash_config"].pop("emb_dim")
    (tmp_path / FILE).write_text(json.dumps(raw))
    head = {name for name in tensors if name.startswith(("prefix_gru", "embed_proj"))}
    assert head == {f"prefix_gru.weight_{w}_l0" for w in ("ih", "hh")} | {f"embed_proj.{i}.weight" for i in (0, 2)}
    save_file({("logit_head." if name in head else "") + name: t for name, t in tensors.items()}, tmp_path / WEIGHTS)
    loaded = load_draft(tmp_path, target)
    assert type(loaded) is Domino and torch.equal(loaded.prefix_gru.weight_hh_l0, draft.prefix_gru.weight_hh_l0)
    save_file(tensors | {"prefix_gru.bias_ih_l0": torch.zeros(15)}, tmp_path / WEIGHTS)
    with pytest.raises(UsageError, match="unknown tensors prefix_gru.bias_ih_l0"):
        load_draft(tmp_path, target)
    raw["dflash_config"]["gru_hidden_dim"] = 7
    (tmp_path / FILE).write_text(json.dumps(raw))
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(UsageError, match="embed_proj.0.weight is|prefix_gru.weight_.h_l0 is"):
        load_draft(tmp_path, target)
    with pytest.raises(UsageError, match="gru_hidden_dim is 0"):
        dataclasses.replace(PARTS["domino"], gru_hidden_dim=0)


@SHIFTS
def test_the_loss_fades_from_the_backbone_to_the_corrected_scores(shifted: bool) -> None:
    draft = domino(shifted=shifted)
    store = tiny_store()
    sequences = [store[0], store[1]]
    chosen = [torch.tensor([s.prompt_length, s.prompt_length + 1]) for s in sequences]
    batch = make_batch(sequences, chosen, block_size=5, gamma=4.0, anchors_per_sequence=2)
    states = draft.run(draft.encode_context(batch.taps), batch.anchor_tokens, batch.anchors)
    hidden, (labels, weight) = draft.drafting(states.hidden), supervised(draft, batch)
    unary = draft.logits(hidden)
    scores = unary + draft.embed_proj[2](draft.reads(hidden, batch.tokens[:, :-1])) * (torch.arange(4) > 0)[:, None]
    base, final = (
        (F.cross_entropy(s.flatten(0, 1), labels.flatten(), reduction="none") * weight.flatten()).sum()
        for s in (unary, scores)
    )
    objective = objective_for(draft)
    assert isinstance(objective, DominoObjective)
    for step, share in ((0, 1.0), (25, 0.75), (100, 0.0)):
        found = objective(batch, Progress(step, 100, torch.Generator()))
        torch.testing.assert_close(found.loss, share * base + (1 - share) * final)


def test_two_steps_train_every_part_and_the_result_decodes(tmp_path: Path) -> None:
    target, store = tiny_target(), tiny_store()
    plan, config = DraftPlan("domino", 2, 5, 40, mask_token_id=MASK), dataclasses.replace(CONFIG, blocks=12)
    made = train_draft(plan, target, store, config, tmp_path / "run", tmp_path / "draft")
    assert type(made) is Domino and made.embed_proj[2].weight.any(), "the identity start was left"
    loaded, ids = load_draft(tmp_path / "draft", target), prompts(1)[0]
    plain = generate(target, None, ids, max_new_tokens=20).tokens
    assert generate(target, loaded, ids, max_new_tokens=20).tokens == plain
    with HookedDraft(loaded) as hooked:
        assert all(row.about for row in hooked.hook_table())
        _, cache = hooked.run_with_cache(store[0].taps[None], AT, AT)
        assert not any("corrections" in name for name in cache)
        kept, hooks, _ = hooked.get_caching_hooks(lambda name: name.startswith("corrections.1"))
        with hooked.hooks(hooks):
            hooked.draft_greedy(hooked.encode_context(store[0].taps[None]), AT, AT)
        assert {name.split(".")[-1]: tuple(v.shape) for name, v in kept.items()} == {
            "hook_prefix": (3, loaded.domino.gru_hidden_dim),
            "hook_correction": (3, 40),
        }


@torch.no_grad()
def test_the_head_timed_on_the_gpu_is_this_one() -> None:
    draft = domino()
    states = draft.run(draft.encode_context(taps()), AT, AT)
    hidden, (first, _, last) = draft.drafting(states.hidden), draft.embed_proj
    head = GRUHead(
        inputs=draft.embedding @ draft.prefix_gru.weight_ih_l0.T,
        recurrent=draft.prefix_gru.weight_hh_l0,
        of_hidden=first.weight[:, :32],  # type: ignore[index, union-attr]
        of_state=first.weight[:, 32:],  # type: ignore[index, union-attr]
        out=last.weight,  # type: ignore[arg-type, union-attr]
    )
    last.weight.mul_(20)  # type: ignore[operator, union-attr]
    tokens = draft.propose(states, AT).tokens
    assert not torch.equal(tokens, draft.logits(hidden).argmax(-1))
    assert torch.equal(tokens, gru_reference(draft.logits(hidden), hidden, AT[0], head))
