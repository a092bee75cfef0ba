"""The drafts against their definitions: masks by brute force, no leak from the future, cached decoding."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from toy import BLOCK, D_MODEL, TAPS, VOCAB, seeded, toy_config, toy_draft, toy_sequence

from dspine_probe.config import default_taps
from dspine_probe.drafts import Context, DFlash, DSpine
from dspine_probe.drafts.block import TruePredecessors
from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.drafts.layers import BlockBias, rotary_tables, rotate
from dspine_probe.drafts.registry import KINDS, read_config
from dspine_probe.drafts.transition import TransitionCache
from dspine_probe.errors import UsageError

VARIANTS = [("dflash", False), ("dflash", True), ("dspine", True)]
ANCHORS = torch.tensor([[0, 3, 4, 9]])


def taps(length: int = 10, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, TAPS * D_MODEL, generator=seeded(seed))


def tokens(shape: tuple[int, ...], seed: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=seeded(seed))


@pytest.mark.parametrize("causal", [False, True])
def test_mask_is_its_definition(causal: bool) -> None:
    bias = BlockBias.build(torch.tensor([[0, 2, 2, 7]]), 7, BLOCK, causal=causal, dtype=torch.float32)
    for block, anchor in enumerate([0, 2, 2, 7]):
        for row in range(7):
            assert (bias.context[0, 0, block, 0, 0, row] == 0) == (row < anchor)
    for query in range(BLOCK):
        for key in range(BLOCK):
            assert (bias.block[query, key] == 0) == (not causal or key <= query)


@pytest.mark.parametrize(("kind", "causal"), VARIANTS)
def test_attention_equals_a_loop_over_every_query(kind: str, causal: bool) -> None:
    """Overlapping blocks, an anchor without context and one at the end, grouped heads: softmax by hand."""
    draft = toy_draft(kind, causal=causal)
    attn = draft.blocks[0].attn
    x = torch.randn(4, BLOCK, D_MODEL, generator=seeded(5))
    context = draft.encode_context(taps())
    inputs = draft.block_inputs(context, tokens((1, 4)), ANCHORS, BLOCK)
    rotary, bias = inputs.rotary, inputs.bias
    got = attn(x, context.keys[0], context.values[0], rotary, bias)
    q = rotate(attn.q_norm(attn.q_proj(x).view(4, BLOCK, 4, 6)), rotary)
    k = rotate(attn.k_norm(attn.k_proj(x).view(4, BLOCK, 2, 6)), rotary)
    v = attn.v_proj(x).view(4, BLOCK, 2, 6)
    for block, anchor in enumerate(ANCHORS[0].tolist()):
        for slot in range(BLOCK):
            heads = []
            for head in range(4):
                kv = head // 2
                own = slice(0, slot + 1) if causal else slice(None)
                keys = torch.cat([context.keys[0][0, :anchor, kv], k[block, own, kv]])
                values = torch.cat([context.values[0][0, :anchor, kv], v[block, own, kv]])
                heads.append((keys @ q[block, slot, head] / math.sqrt(6)).softmax(0) @ values)
            torch.testing.assert_close(got[block, slot], attn.o_proj(torch.cat(heads)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "causal"), VARIANTS)
def test_the_future_cannot_leak(kind: str, causal: bool) -> None:
    draft, states = toy_draft(kind, causal=causal), taps()
    anchor_tokens = tokens((1, 4))
    before = draft(states, anchor_tokens, ANCHORS)
    later = states.clone()
    later[:, 4:] = 7.0
    changed = draft(later, anchor_tokens, ANCHORS)
    assert torch.equal(before[:3], changed[:3]), "rows at or after the anchor are invisible"
    assert not torch.equal(before[3], changed[3])
    other = anchor_tokens.clone()
    other[0, 2] = (other[0, 2] + 1) % VOCAB
    changed = draft(states, other, ANCHORS)
    keep = [0, 1, 3]
    assert torch.equal(before[keep], changed[keep]), "blocks do not see each other"
    assert not torch.equal(before[2], changed[2])


@pytest.mark.parametrize(("kind", "causal"), [("dflash", True), ("dspine", True)])
def test_later_slots_cannot_reach_earlier_ones_in_a_causal_block(kind: str, causal: bool) -> None:
    draft = toy_draft(kind, causal=causal)
    context = draft.encode_context(taps())
    inputs = draft.block_inputs(context, tokens((1, 4)), ANCHORS, BLOCK)
    rotary, bias = inputs.rotary, inputs.bias
    x = torch.randn(4, BLOCK, D_MODEL, generator=seeded(5))
    moved = x.clone()
    moved[:, 2] += 1.0
    block = draft.blocks[0]
    one, two = (block(y, context.keys[0], context.values[0], rotary, bias) for y in (x, moved))
    assert torch.equal(one[:, :2], two[:, :2])
    assert not torch.equal(one[:, 3], two[:, 3])


def test_a_narrow_causal_block_equals_the_head_of_a_wide_one() -> None:
    draft, states = toy_draft("dspine"), taps()
    wide = draft(states, tokens((1, 4)), ANCHORS)
    narrow = draft(states, tokens((1, 4)), ANCHORS, width=3)
    torch.testing.assert_close(wide[:, :2], narrow)


@pytest.mark.parametrize(("kind", "causal"), VARIANTS)
def test_decoding_with_a_growing_context_equals_training(kind: str, causal: bool) -> None:
    """Rounds of unequal acceptance, with rejected rows cropped away again, give the scores of the packed pass."""
    draft, states = toy_draft(kind, causal=causal), taps(12)
    sequence = toy_sequence(12)
    anchors = [2, 3, 6, 11]
    packed = draft(states, sequence.tokens[anchors][None], torch.tensor([anchors]))
    context = draft.encode_context(states[:, :2])
    for row, anchor in enumerate(anchors):
        if context.length < anchor:
            start = context.length
            more = draft.encode_context(states[:, start : min(anchor + 2, 12)], start=start)
            kept = [
                tuple(torch.cat(pair, dim=1)[:, :anchor] for pair in zip(*both, strict=True))
                for both in ((context.keys, more.keys), (context.values, more.values))
            ]
            context = Context(*kept)
        at = torch.tensor([[anchor]])
        run = draft.run(context, sequence.tokens[at], at)
        torch.testing.assert_close(draft.logits(run.hidden[:, 1:])[0], packed[row], atol=1e-5, rtol=1e-5)


def test_rotary_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 6, generator=seeded())
    near, far = (
        (
            rotate(q, rotary_tables(torch.tensor([p]), 6, 1e4, torch.float32))
            * rotate(k, rotary_tables(torch.tensor([p - 5]), 6, 1e4, torch.float32))
        ).sum()
        for p in (9, 5009)
    )
    torch.testing.assert_close(near, far, atol=1e-3, rtol=1e-3)


def test_dspine_without_writes_is_its_causal_backbone() -> None:
    plain = toy_draft("dflash", causal=True)
    spine = toy_draft("dspine", writes=False)
    missing = spine.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert all(name.startswith(("injection.", "transfer_")) for name in missing)
    anchor_tokens = tokens((1, 4))
    assert torch.equal(plain(taps(), anchor_tokens, ANCHORS), spine(taps(), anchor_tokens, ANCHORS))


def test_slot_one_is_scored_the_same_with_and_without_the_last_write() -> None:
    draft = toy_draft("dspine")
    anchor_tokens = tokens((1, 4))
    states = draft.run(draft.encode_context(taps()), anchor_tokens, ANCHORS)
    cache = draft.transition_cache(states, anchor_tokens)
    unary = draft.logits(states.hidden[:, 1]).gather(-1, cache.candidates[:, 0])
    for row in range(4):
        torch.testing.assert_close(cache.scores[:, 0, row], unary, atol=1e-5, rtol=1e-5)


def test_walking_the_cache_equals_recomputing_every_step() -> None:
    draft = toy_draft("dspine")
    anchor_tokens = tokens((1, 4))
    states = draft.run(draft.encode_context(taps()), anchor_tokens, ANCHORS)
    cache = draft.transition_cache(states, anchor_tokens)
    path = cache.walk_greedy()
    for block in range(4):
        previous = anchor_tokens[0, block]
        for slot in range(BLOCK - 1):
            rho = draft.refine(states.last_layer[block : block + 1, slot + 1 : slot + 2], previous.view(1, 1, 1))[
                0, 0, 0
            ]
            scores = draft.head[cache.candidates[block, slot]] @ rho
            previous = cache.candidates[block, slot, scores.argmax()]
            assert path[block, slot] == previous


def test_ties_go_to_the_lower_index() -> None:
    cache = TransitionCache(torch.tensor([[[5, 6], [7, 8]]]), torch.zeros(1, 2, 2, 2))
    assert cache.walk_greedy().tolist() == [[5, 7]]


def test_injection_follows_its_formula() -> None:
    """One layer recomputed from the definition, slot by slot."""
    draft = toy_draft("dspine")
    inj, h = draft.injection, torch.randn(2, BLOCK, D_MODEL, generator=seeded(8))
    anchor = tokens((2,))
    code = draft.message_codes(anchor, h.dtype)
    got = draft.inject(1, h, code[:, None], None)
    rank = draft.spine.transfer_rank
    for block in range(2):
        assert torch.equal(got[block, 0], h[block, 0])
        for slot in range(1, BLOCK):
            f = lambda v: rank**0.5 * inj.readouts[1].weight @ v / (inj.readouts[1].weight @ v).norm()  # noqa: E731
            m = code[block] if slot == 1 else f(h[block, slot - 1])
            gate = torch.sigmoid(
                inj.receiver_gate.weight @ f(h[block, slot]) + inj.predecessor_gate.weight @ m + inj.bias
            )
            delta = inj.writes[1].weight @ (gate * (inj.message.weight @ m))
            want = h[block, slot] + h[block, slot].norm() / D_MODEL**0.5 * delta
            torch.testing.assert_close(got[block, slot], want, atol=1e-5, rtol=1e-5)


def test_true_predecessors_replace_features_in_shallow_layers_of_chosen_blocks_only() -> None:
    draft = toy_draft("dspine")
    anchor_tokens, context = tokens((1, 4)), draft.encode_context(taps())
    plain = draft.run(context, anchor_tokens, ANCHORS).hidden
    truth = tokens((4, BLOCK), seed=9)
    truth[:, 0] = anchor_tokens[0]
    chosen = torch.tensor([True, False, True, False])
    fed = draft.run(context, anchor_tokens, ANCHORS, true_predecessors=TruePredecessors(truth, chosen)).hidden
    assert torch.equal(plain[~chosen], fed[~chosen])
    assert torch.equal(plain[:, 1], fed[:, 1]), "slot 1 always sees the anchor's own code"
    assert not torch.equal(plain[chosen][:, 2:], fed[chosen][:, 2:])


def test_a_trimmed_vocabulary_scores_its_tokens_like_the_full_head() -> None:
    vocabulary = torch.tensor([1, 4, 9, 20, 30])
    full, trimmed = toy_draft("dflash"), toy_draft("dflash", vocabulary=vocabulary)
    anchor_tokens = tokens((1, 4))
    scores = trimmed(taps(), anchor_tokens, ANCHORS)
    torch.testing.assert_close(scores, full(taps(), anchor_tokens, ANCHORS)[..., vocabulary])
    assert trimmed.to_index(torch.tensor([4, 5, 30])).tolist() == [1, -1, 4]
    drafted = trimmed.draft_greedy(trimmed.encode_context(taps()), anchor_tokens, ANCHORS)
    assert set(drafted.flatten().tolist()) <= set(vocabulary.tolist())


def test_the_target_matrices_are_shared_not_stored() -> None:
    head = torch.randn(VOCAB, D_MODEL, generator=seeded())
    draft = DFlash(toy_config("dflash", causal=False), head, head)
    assert draft.head.data_ptr() == draft.embedding.data_ptr() == head.data_ptr()
    assert not any("head" in name or "embedding" in name for name in draft.state_dict())


def test_config_round_trips_through_the_public_keys() -> None:
    config = toy_config("dspine", causal=True, draft_vocab=None)
    assert read_config(config.to_dict()) == (KINDS["dspine"], config)
    nested = config.to_dict()
    nested["dflash_config"]["block_size"] = nested.pop("block_size")
    assert read_config(nested)[1] == config
    assert default_taps(36) == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": VOCAB}, "outside the target's embedding"),
        ({"target_layer_ids": (0, 3)}, r"\[3\] do not fit"),
        ({"target_layer_ids": (1, 1)}, "repeat a layer"),
        ({"target_layer_ids": ()}, "empty"),
        ({"block_size": 1}, "at least one draft slot"),
        ({"num_attention_heads": 3}, "evenly"),
        ({"architecture": "Other"}, "unknown"),
        ({"is_causal": False}, "is_causal=True"),
        ({"part": None}, "needs a dspine_config"),
    ],
)
def test_impossible_configs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_config(dataclasses.replace(toy_config("dspine", causal=True), **change).to_dict())


def test_refusals_name_the_fault() -> None:
    draft = toy_draft("dflash")
    with pytest.raises(UsageError, match="wider than the 4"):
        draft(taps(), tokens((1, 4)), ANCHORS, width=5)
    with pytest.raises(UsageError, match="load the target"):
        DFlash(toy_config("dflash", causal=False), torch.zeros(VOCAB, 8), torch.zeros(VOCAB, 8))
    with pytest.raises(UsageError, match="describes a DFlashDraftModel"):
        DSpine(toy_config("dflash", causal=True), torch.zeros(VOCAB, D_MODEL), torch.zeros(VOCAB, D_MODEL))
    with pytest.raises(UsageError, match="top_k"):
        DSpineConfig(top_k=0)
