"""EAGLE-3: its chain by a plain causal pass, incremental decoding, training-time test, the public layout, refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_acceptance import rounds_of
from test_intermediate import tiny_store
from test_training import CONFIG
from tiny import MASK, PARTS, prompts, tiny_config, tiny_draft, tiny_target
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspine_probe.config import DFLASH
from dspine_probe.decoding.generate import generate, generate_batch
from dspine_probe.decoding.offline import simulate_rounds
from dspine_probe.drafts import Eagle3
from dspine_probe.drafts.checkpoint import CONFIG as FILE
from dspine_probe.drafts.checkpoint import MANIFEST, load_draft, save_draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.acceptance.measure import TappedAnswer
from dspine_probe.experiments.common.request import Request
from dspine_probe.hooks import HookedDraft
from dspine_probe.training.anchors import make_batch
from dspine_probe.training.objectives.base import Progress, objective_for
from dspine_probe.training.recipes import new_draft
from dspine_probe.training.run import DraftPlan, train_draft
from dspine_probe.training.warmstart import warm_start

NAME = "Qwen3Eagle3Model"


def eagle(*, trimmed: int | None = None, **changes: object) -> Eagle3:
    part = dataclasses.replace(PARTS["eagle3"], **changes)
    return tiny_draft(tiny_target(), NAME, part=part, trimmed=trimmed)  # type: ignore[return-value]


def taps(length: int = 12) -> Tensor:
    return torch.randn(1, length, 64, generator=torch.Generator().manual_seed(0))


def text(length: int = 12) -> Tensor:
    return torch.randint(3, MASK, (1, length), generator=torch.Generator().manual_seed(1))


def plain_chain(draft: Eagle3, states: Tensor, tokens: list[int], chain: list[int]) -> Tensor:
    """Scores after every token of `chain`, by one causal pass over all rows for each step; written from the formulas.

    `tokens` are the committed ones with the anchor last, `chain` the anchor and the tokens after it.
    """
    layer, attn, anchor = draft.layer, draft.layer.attn, len(tokens) - 1
    feature = (states[0, :anchor] @ draft.fc.weight.T).detach()
    read, scores = [*tokens[1:anchor], *chain], []
    for _ in chain:
        rows = len(feature)
        e = layer.ln1(draft.embedding[read[:rows]])
        u = torch.cat([e, layer.hidden_norm(feature)], dim=-1)
        position = torch.arange(rows)
        q, k, v = (p(u).view(rows, -1, 16) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        angle = position[:, None].float() * (1e6 ** -(torch.arange(0, 16, 2) / 16))
        cos, sin = (torch.cat([f(angle)] * 2, dim=-1)[:, None] for f in (torch.cos, torch.sin))
        q, k = (x * cos + torch.cat([-x[..., 8:], x[..., :8]], dim=-1) * sin for x in (attn.q_norm(q), attn.k_norm(k)))
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        z = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True)
        x = feature + attn.o_proj(z[0].transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.ln2(x))
        scores.append(draft.ln_final(x[-1]) @ draft.head.T)
        feature = torch.cat([feature, x[-1:]])
    return torch.stack(scores)


@pytest.mark.parametrize("trimmed", [None, 40])
@torch.no_grad()
def test_the_chain_is_a_causal_pass_over_context_and_its_own_states(trimmed: int | None) -> None:
    draft, words = eagle(trimmed=trimmed), text()
    anchors = torch.tensor([[3, 1, 9]])
    context = draft.encode_context(taps(), following=words.roll(-1, 1))
    states = draft.run(context, words.gather(1, anchors), anchors)
    drawn = draft.propose(states, words.gather(1, anchors), temperature=0.7, noise=torch.rand(3, 4))
    greedy = draft.draft_greedy(context, words.gather(1, anchors), anchors)
    assert drawn.q is not None
    for row, anchor in enumerate(anchors[0].tolist()):
        before = words[0, : anchor + 1].tolist()
        chain = [before[-1], *drawn.tokens[row, :-1].tolist()]
        scores = plain_chain(draft, taps(), before, chain)
        torch.testing.assert_close(drawn.q.probs[row], (scores / 0.7).softmax(-1), atol=1e-5, rtol=1e-4)
        chain = [before[-1], *greedy[row, :-1].tolist()]
        assert torch.equal(draft.to_tokens(plain_chain(draft, taps(), before, chain).argmax(-1)), greedy[row])
    again = draft.propose(states, words.gather(1, anchors))
    assert torch.equal(again.tokens, greedy), "proposing leaves the states as they were"


def test_rounds_are_the_same_offline_alone_and_in_a_batch() -> None:
    """The context that grows round by round is that of the whole text, accepted tokens paired with true features."""
    target, draft, listed = tiny_target(), eagle(), prompts(4)
    at_once = generate_batch(target, draft, listed, max_new_tokens=24)
    for prompt, found in zip(listed, at_once, strict=True):
        alone = generate(target, draft, prompt, max_new_tokens=24)
        assert (alone.tokens, alone.rounds) == (found.tokens, found.rounds)
        assert found.tokens == generate(target, None, prompt, max_new_tokens=24).tokens
        ids = torch.tensor([*prompt, *found.tokens])
        read = target.hidden_states(ids[None], draft.config.target_layer_ids).taps[0]
        assert simulate_rounds(draft, [TappedAnswer(ids, len(prompt), read)]) == [rounds_of(found)]


def test_a_step_of_training_is_given_true_tokens_and_its_own_features() -> None:
    draft, store = eagle(ttt_length=3), tiny_store()
    sequence = store[0]
    anchor = torch.tensor([sequence.prompt_length])
    batch = make_batch([sequence], [anchor], block_size=5, gamma=4.0, anchors_per_sequence=1)
    found = objective_for(draft)(batch, Progress(0, 10, torch.Generator()))  # type: ignore[arg-type]
    words, at = sequence.tokens.tolist(), int(anchor)
    states = sequence.taps[None].float()
    scores = plain_chain(draft, states, words[: at + 1], words[at : at + 3])
    wanted = (sequence.final[at : at + 3].float() @ draft.head.T).softmax(-1)
    decay = 0.8 ** torch.arange(3)
    torch.testing.assert_close(found.loss, -(decay[:, None] * wanted * scores.log_softmax(-1)).sum())
    assert found.slot_counts.tolist() == [1, 1, 1, 0]
    found.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.parameters())


@pytest.mark.parametrize("full", [False, True])
def test_a_checkpoint_comes_back_bit_for_bit(full: bool, tmp_path: Path) -> None:
    draft, target = eagle(), tiny_target()
    save_draft(draft, tmp_path, dtype=torch.float32, full_codes=full)
    loaded = load_draft(tmp_path, target)
    assert type(loaded) is Eagle3 and loaded.config == draft.config
    for key, value in draft.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key


def test_a_public_config_names_no_block_and_no_mask(tmp_path: Path) -> None:
    draft, target = eagle(), tiny_target()
    save_draft(draft, tmp_path, dtype=torch.float32)
    (tmp_path / MANIFEST).unlink()
    raw = json.loads((tmp_path / FILE).read_text())
    assert raw["architectures"] == [NAME] and "dflash_config" not in raw and raw["target_layer_ids"] == [0, 2]
    for name in ("block_size", "mask_token_id", "is_causal", "layer_types"):
        del raw[name]
    (tmp_path / FILE).write_text(json.dumps(raw | {"num_hidden_layers": 5}))
    loaded = load_draft(tmp_path, target)
    assert loaded.config.block_size == 8 and loaded.config.num_hidden_layers == 1
    (tmp_path / FILE).write_text(json.dumps(raw | {"draft_num_hidden_layers": 2}))
    with pytest.raises(UsageError, match="eagle3 has 1 layer, not 2"):
        load_draft(tmp_path, target)


def test_two_steps_train_and_the_result_decodes(tmp_path: Path) -> None:
    target, store = tiny_target(), tiny_store()
    plan, config = DraftPlan("eagle3", 5, 5, 40, mask_token_id=MASK), dataclasses.replace(CONFIG, blocks=12)
    made = train_draft(plan, target, store, config, tmp_path / "run", tmp_path / "draft")
    assert made.config.num_hidden_layers == 1
    loaded, ids = load_draft(tmp_path / "draft", target), prompts(1)[0]
    assert (
        generate(target, loaded, ids, max_new_tokens=20).tokens == generate(target, None, ids, max_new_tokens=20).tokens
    )


def test_the_warm_start_reads_the_feature_alone() -> None:
    target = tiny_target("qwen3")
    draft = new_draft("eagle3", target, taps=(0, 2), mask_token_id=MASK)
    warm_start(draft, target, text())
    last = target.model.base_model.layers[-1]
    weight = draft.blocks[0].attn.q_proj.weight
    assert not weight[:, :32].any()
    assert torch.equal(weight[:, 32:], last.self_attn.q_proj.weight * last.input_layernorm.weight)


def test_its_hook_points_fire_once_in_a_step_and_change_what_follows() -> None:
    draft, words = eagle(), text()
    at = torch.tensor([[3, 9]])
    context = draft.encode_context(taps(), following=words.roll(-1, 1))
    before = draft.draft_greedy(context, words.gather(1, at), at)
    with HookedDraft(draft) as hooked:
        assert all(row.about and row.fires == "walk" for row in hooked.hook_table())
        kept, hooks, _ = hooked.get_caching_hooks(lambda name: name.startswith("steps"))
        with hooked.hooks(hooks):
            hooked.draft_greedy(context, words.gather(1, at), at)
        assert {name: tuple(v.shape) for name, v in kept.items()} == {
            f"steps.{k}.{name}": size
            for k in range(4)
            for name, size in (("hook_feature", (2, 32)), ("hook_scores", (2, 64)))
        }
        with hooked.hooks([("steps.0.hook_feature", lambda x, hook: -x)]):
            edited = hooked.draft_greedy(context, words.gather(1, at), at)
    assert not torch.equal(edited, before)


def test_what_it_cannot_do_is_refused() -> None:
    target, draft = tiny_target(), eagle()
    with pytest.raises(UsageError, match="reads the token after every context row"):
        draft.encode_context(taps())
    with pytest.raises(UsageError, match="eagle3 has 1 layer, not 2"):
        Eagle3(tiny_config(target, NAME, num_hidden_layers=2), target.embedding, target.head)
    request = Request(target, {"d": tiny_draft(target, DFLASH), "e": draft}, ())  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="draft 'e' drafts token by token"):
        _ = request.arena
    with pytest.raises(UsageError, match="step_loss_decay 0"):
        dataclasses.replace(PARTS["eagle3"], step_loss_decay=0.0)


@torch.no_grad()
def test_the_layer_is_that_of_speculators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs `pip install --no-deps speculators`; the packages' own imports, which need more, are left out."""
    spec = importlib.util.find_spec("speculators")
    if spec is None or spec.origin is None:
        pytest.skip("speculators is not installed")
    for name in ("speculators", "speculators.models", "speculators.models.eagle3"):
        package = ModuleType(name)
        package.__path__ = [str(Path(spec.origin).parent.parent / name.replace(".", "/"))]
        monkeypatch.setitem(sys.modules, name, package)
    made = importlib.import_module("speculators.models.eagle3.model_definitions")
    draft = eagle()
    config = Qwen3Config(
        hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rope_theta=1e6, rms_norm_eps=1e-6, vocab_size=64, attn_implementation="eager",
    )  # fmt: skip
    theirs = made.Qwen3DecoderEagle3FirstLayer(config, 0).eval()
    names = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm", "attn": "self_attn"}
    ours = {".".join(names.get(p, p) for p in k.split(".")): v for k, v in draft.layer.state_dict().items()}
    theirs.load_state_dict(ours)
    words, anchor = text(), 9
    feature = draft.fc(taps())[:, :anchor]
    u = torch.cat([F.embedding(words[:, 1 : anchor + 1], draft.embedding), feature], dim=-1)
    position = torch.arange(anchor)[None]
    mask = torch.full((anchor, anchor), float("-inf")).triu(1)[None, None]
    rotary = Qwen3RotaryEmbedding(config)(u, position)
    expected = theirs(u, attention_mask=mask, position_ids=position, position_embeddings=rotary)
    context = draft.encode_context(taps(), following=words.roll(-1, 1))
    at = torch.tensor([[3, anchor]])
    found = draft.run(context, words.gather(1, at), at).chain.feature
    difference = float((found - expected[:, [2, anchor - 1]]).abs().max())
    print("largest difference", difference, "of states up to", float(expected.abs().max()))
    assert difference < 1e-5
