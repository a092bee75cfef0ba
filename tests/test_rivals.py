"""DFlash2 and DSpark: identity starts, definitions by hand, the public layout, training, refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_intermediate import tiny_store
from test_training import CONFIG
from tiny import MASK, PARTS, prompts, tiny_config, tiny_draft, tiny_target

from dspine_probe.config import DFLASH
from dspine_probe.decoding.generate import generate
from dspine_probe.drafts import DFlash, DFlash2, DSpark
from dspine_probe.drafts.checkpoint import load_draft, save_draft
from dspine_probe.drafts.dspark import HEADS
from dspine_probe.drafts.registry import KINDS
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.request import Request
from dspine_probe.hooks import HookedDraft
from dspine_probe.training.run import DraftPlan, train_draft

RIVALS = {
    "dflash2": ("dflash2", PARTS["dflash2"]),
    **{name: ("dspark", dataclasses.replace(PARTS["dspark"], markov_head_type=name)) for name in HEADS},
    "no confidence": ("dspark", dataclasses.replace(PARTS["dspark"], enable_confidence_head=False)),
    "confidence of the state": ("dspark", dataclasses.replace(PARTS["dspark"], confidence_head_with_markov=False)),
}
AT = torch.tensor([[3, 5, 9]])


def rival(name: str, *, trimmed: int | None = None):  # type: ignore[no-untyped-def]
    kind, part = RIVALS[name]
    target = tiny_target()
    return target, tiny_draft(target, KINDS[kind].architecture, part=part, trimmed=trimmed)


def taps(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", RIVALS)
def test_the_identity_start_is_the_plain_backbone_bit_for_bit(name: str) -> None:
    target, draft = rival(name)
    plain = DFlash(tiny_config(target, DFLASH), target.embedding, target.head)
    plain.load_state_dict(draft.state_dict(), strict=False)
    if isinstance(draft, DSpark):
        draft.markov_head.markov_w2.weight.data *= 100
    assert not torch.equal(draft.draft_greedy(draft.encode_context(taps()), AT, AT), _plain(plain, draft)), (
        "what the kind adds changes proposals"
    )
    draft.zero_writes()
    # A shifted block proposes as many tokens with one slot less.
    narrow = plain.run(plain.encode_context(taps()), AT, AT, width=draft.config.block_size - draft.shifted)
    found = draft.run(draft.encode_context(taps()), AT, AT)
    assert torch.equal(found.hidden, narrow.hidden)
    assert torch.equal(draft.propose(found, AT).tokens, _plain(plain, draft))


def _plain(plain: DFlash, draft) -> torch.Tensor:  # type: ignore[no-untyped-def]
    states = plain.run(plain.encode_context(taps()), AT, AT, width=draft.config.block_size - draft.shifted)
    return plain.logits(draft.drafting(states.hidden)).argmax(-1)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_fresh_draft_is_at_its_identity_start(kind: str) -> None:
    target = tiny_target()
    draft = KINDS[kind].draft(tiny_config(target, KINDS[kind].architecture), target.embedding, target.head)
    fresh = draft.run(draft.encode_context(taps()), AT, AT)
    before = draft.propose(fresh, AT).tokens
    draft.zero_writes()
    again = draft.run(draft.encode_context(taps()), AT, AT)
    assert torch.equal(fresh.hidden, again.hidden)
    assert torch.equal(before, draft.logits(draft.drafting(again.hidden)).argmax(-1))


def test_the_convolution_is_its_definition_and_stays_in_its_block() -> None:
    _, draft = rival("dflash2")
    conv, x = draft.blocks[0].attention_conv, torch.randn(2, 4, 32)
    got, kernel = conv.wrap(x)
    closed = conv.close(got, kernel)
    for block in range(2):
        for slot in range(4):
            dyn = (conv.kernel_projection.weight @ x[block, slot]).view(2, 2, 2)
            for channel in range(32):
                for side, given, found in ((0, x, got), (1, got, closed)):
                    taken = [dyn[side, tap, channel // 16] + conv.base_kernel[side, tap, channel] for tap in (0, 1)]
                    before = given[block, slot - 1, channel] if slot else 0.0
                    expected = taken[0] * given[block, slot, channel] + taken[1] * before
                    torch.testing.assert_close(found[block, slot, channel], expected)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("trimmed", [None, 40])
def test_proposals_and_their_probabilities_are_exact(name: str, trimmed: int | None) -> None:
    """q is the softmax of the scores given the tokens really drawn; the first of them is checked by hand."""
    _, draft = rival(name, trimmed=trimmed)
    states = draft.run(draft.encode_context(taps()), AT, AT)
    noise = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    drawn = draft.propose(states, AT, temperature=0.7, noise=noise)
    assert drawn.q is not None
    torch.testing.assert_close(drawn.q.probs.sum(-1), torch.ones(3, 4))
    hidden, previous = draft.drafting(states.hidden), torch.cat([AT.T, drawn.tokens[:, :-1]], dim=1)
    unary = draft.logits(hidden)
    if isinstance(draft, DSpark):
        scores = unary + draft.markov_head.markov_w2(draft.markov_head.forced(hidden, previous))
    else:
        index = draft.to_index(drawn.q.ids)
        select = draft.candidate_selector
        read = select.predecessor_codebook[previous] * select.hidden_projection(hidden)
        scores = unary.gather(-1, index) + (read[:, :, None] * select.successor_codebook[index]).sum(-1)
    torch.testing.assert_close(drawn.q.probs, (scores / 0.7).softmax(-1), atol=1e-5, rtol=1e-4)
    assert (drawn.q.ids == drawn.tokens[..., None]).any(-1).all()


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("full", [False, True])
def test_a_checkpoint_comes_back_bit_for_bit(name: str, full: bool, tmp_path: Path) -> None:
    target, draft = rival(name)
    save_draft(draft, tmp_path / "d", dtype=torch.float32, full_codes=full)
    loaded = load_draft(tmp_path / "d", target)
    assert type(loaded) is type(draft) and loaded.config == draft.config
    for key, value in draft.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    if isinstance(draft, DSpark):
        assert config["block_size"] == 4 and config["target_layer_ids"] == [0, 2] and "dflash_config" not in config
    else:
        assert config["block_size"] == 5
        assert config["dflash_config"]["selector_rank"] == 6 and config["dflash_config"]["mask_token_id"] == MASK


def test_foreign_or_unknown_contents_are_refused(tmp_path: Path) -> None:
    target, draft = rival("vanilla")
    draft.head = draft.head + 1
    save_draft(draft, tmp_path / "d", dtype=torch.float32, full_codes=True)
    with pytest.raises(UsageError, match="lm_head.weight of the checkpoint is not the target's"):
        load_draft(tmp_path / "d", target)
    _, draft = rival("gated")
    save_draft(draft, tmp_path / "e", dtype=torch.float32)
    path = tmp_path / "e" / "config.json"
    (tmp_path / "e" / "manifest.json").unlink()
    path.write_text(path.read_text().replace('"gated"', '"vanilla"'))
    with pytest.raises(UsageError, match="unknown tensors markov_head.gate_proj"):
        load_draft(tmp_path / "e", target)
    path.write_text(path.read_text().replace('"vanilla"', '"other"'))
    with pytest.raises(UsageError, match="markov_head_type 'other' is unknown"):
        load_draft(tmp_path / "e", target)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_two_steps_train_every_new_part_and_the_result_decodes(kind: str, tmp_path: Path) -> None:
    target, store = tiny_target(), tiny_store()
    plan = DraftPlan(kind, 2, 5, 40, mask_token_id=MASK)
    config = dataclasses.replace(CONFIG, blocks=12)
    made = train_draft(plan, target, store, config, tmp_path / "run", tmp_path / "draft")
    changed = made.markov_head.markov_w2.weight if kind == "dspark" else made.candidate_selector.successor_codebook
    assert changed.abs().sum() > 0, "the identity start was left"
    loaded, ids = load_draft(tmp_path / "draft", target), prompts(1)[0]
    assert isinstance(loaded, DSpark if kind == "dspark" else DFlash2)
    plain = generate(target, None, ids, max_new_tokens=20).tokens
    assert generate(target, loaded, ids, max_new_tokens=20).tokens == plain
    with HookedDraft(loaded) as hooked:
        assert all(row.about for row in hooked.hook_table())
        _, cache = hooked.run_with_cache(store[0].taps[None], AT, AT)
        torch.testing.assert_close(cache.decompose_resid().sum(0), cache["blocks.1.hook_resid_post"])


def public(package: str, path: str) -> ModuleType:
    """One file of a public package, loaded alone, so that what else the package needs may be missing."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    made = importlib.util.spec_from_file_location(f"public_{package}", Path(spec.origin).parent / path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


@pytest.mark.parametrize("head", HEADS)
def test_the_markov_head_is_that_of_speculators(head: str) -> None:
    made = public("speculators", "models/dspark/model_definitions.py")
    _, draft = rival(head)
    sizes = {"verifier_vocab_size": 64, "draft_vocab_size": 64, "markov_rank": 6, "hidden_size": 32}
    theirs = made.MarkovHead(**sizes, head_type=head)
    theirs.load_state_dict(draft.markov_head.state_dict())
    hidden, previous = torch.randn(3, 4, 32), torch.randint(0, 64, (3, 4))
    ours = draft.markov_head.markov_w2(draft.markov_head.forced(hidden, previous))
    difference = (ours - theirs.block_bias(prev_token_ids=previous, hidden_states=hidden)).abs().max()
    print(head, "largest difference", float(difference.detach()))
    assert difference < 1e-5


def test_the_convolution_and_the_selector_are_those_of_dflash() -> None:
    made = public("dflash", "model.py")
    _, draft = rival("dflash2")
    conv, selector = draft.blocks[0].attention_conv, draft.candidate_selector
    theirs = made.GroupedDynamicCausalConv(32, 2, 16)
    theirs.load_state_dict(conv.state_dict())
    x, z = torch.randn(3, 5, 32), torch.randn(3, 5, 32)
    entering, kernel = conv.wrap(x)
    prepared, dynamic = theirs.prepare(x)
    parts = [(entering, prepared), (conv.close(z, kernel), theirs.finish(z, dynamic))]
    largest = max(float((one - other).detach().abs().max()) for one, other in parts)
    print("convolution, largest difference", largest)
    assert largest < 1e-5
    values = {"selector_rank": 6, "selector_top_k": 4}
    config = SimpleNamespace(vocab_size=64, hidden_size=32, dflash_config=values, **values)
    theirs = made.CandidateSelector(config)
    names = {"predecessor_codebook": "predecessor_codebook.weight", "successor_codebook": "successor_codebook.weight"}
    theirs.load_state_dict({names.get(key, key): value for key, value in selector.state_dict().items()})
    states = draft.run(draft.encode_context(taps()), AT, AT)
    hidden = draft.drafting(states.hidden)
    path, _, _ = theirs.select(hidden, draft.logits(hidden), AT[0], 0.0)
    assert torch.equal(draft.propose(states, AT).tokens, path)


def test_experiments_that_read_blocks_refuse_shifted_slots() -> None:
    target, draft = rival("vanilla")
    with pytest.raises(UsageError, match="slots of draft 'd' hold the token after their own place"):
        _ = Request(target, {"d": draft}, ()).arena
