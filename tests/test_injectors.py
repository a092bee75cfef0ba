"""Injectors and their rivals: DSpine's form, no change before training, layer-by-layer runs, refusals."""

import pytest
import torch
from tiny import tiny_draft, tiny_target

from dspine_probe.config import DFLASH, DSPINE
from dspine_probe.errors import UsageError
from dspine_probe.experiments.injection_depth.arms import ALL, GROUPS, LEAK, Arm, arms_of, borrowed, build, contrasted
from dspine_probe.experiments.injection_depth.blocks import BlockPass, every_slot, one_slot, refuse_leak
from dspine_probe.experiments.injection_depth.injectors import NOISE, RANDOM, TRANSFER, CodeInjector, Codes, ExtraMLP
from dspine_probe.training.anchors import Batch

RANK, MESSAGE = 8, 6
TARGET = tiny_target()
CODES = Codes.of(TARGET.head, RANK, 0)
KINDS = ((DFLASH, False), (DFLASH, True), (DSPINE, True))


def some_batch(width: int = 5, sequences: int = 2, anchors: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 60, (sequences, 20), generator=generator)
    taps = TARGET.hidden_states(tokens, (0, 2)).taps
    placed = torch.tensor([[4, 6, 9], [5, 8, 11]])
    blocks = torch.stack([tokens[s, a : a + width] for s in range(sequences) for a in placed[s].tolist()])
    shape = (sequences * anchors, width - 1)
    return Batch(
        taps,
        placed,
        blocks[:, 0].view_as(placed),
        blocks,
        torch.ones(shape),
        torch.zeros(*shape, 32),
        torch.ones(sequences, anchors, dtype=torch.bool),
    )


@pytest.fixture(params=KINDS, ids=["dflash", "causal dflash", "dspine"])
def draft(request):
    kind, causal = request.param
    return tiny_draft(TARGET, kind, trimmed=40, is_causal=causal)


def test_the_layer_by_layer_run_is_the_draft_s_own_and_copies_of_blocks_agree_with_it(draft):
    batch = some_batch()
    with torch.no_grad():
        blocks = BlockPass.of(draft, batch)
        expected = draft(batch.taps, batch.anchor_tokens, batch.anchors)
        torch.testing.assert_close(blocks.scores(blocks.stream[-1][:, 1:]), expected, rtol=0, atol=0)
        wide = blocks.repeated(3)
        x = wide.layers(wide.stream[0], 0, len(draft.blocks))
        torch.testing.assert_close(x, blocks.stream[-1].repeat_interleave(3, dim=0))


def test_sites_take_put_and_look_one_slot_back():
    x = torch.arange(24.0).view(2, 4, 3)
    every = every_slot(2, 4)
    assert every.blocks.tolist() == [0, 0, 1, 1] and every.slots.tolist() == [2, 3, 2, 3]
    assert torch.equal(every.before(x), x[:, 1:3].reshape(4, 3))
    one = one_slot(torch.tensor([3, 2]))
    put = one.put(x, torch.zeros(2, 3))
    assert (put[0, 3] == 0).all() and (put[1, 2] == 0).all()
    put[0, 3], put[1, 2] = x[0, 3], x[1, 2]
    assert torch.equal(put, x)


def test_the_injector_has_the_form_of_dspine():
    spine = tiny_draft(TARGET, DSPINE)
    parts, layer = spine.injection, 1
    injector = CodeInjector(CODES.basis, MESSAGE)
    with torch.no_grad():
        injector.readout.weight.copy_(parts.readouts[layer].weight)
        injector.write.weight.copy_(parts.writes[layer].weight)
        for name in ("receiver_gate", "predecessor_gate", "message"):
            getattr(injector, name).weight.copy_(getattr(parts, name).weight)
        injector.bias.copy_(parts.bias)
        h = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
        code = spine.message_codes(torch.arange(7), h.dtype)
        gate = parts.gate(parts.feature(layer, h), code)
        expected = h + parts.write(layer, h, gate * parts.message(code))
        torch.testing.assert_close(injector(h, code), expected)
        assert not torch.equal(expected, h)


def test_every_arm_starts_as_no_change_at_all(draft):
    batch = some_batch()
    every = every_slot(*batch.tokens.shape)
    sites = every if draft.config.is_causal else one_slot(torch.tensor([2, 3, 4, 2, 3, 4]))
    with torch.no_grad():
        blocks = BlockPass.of(draft, batch)
        floor = blocks.scores(sites.of(blocks.stream[-1]))
        names = []
        for arm in (arm for arms in arms_of(draft).values() for arm in arms):
            module = build(arm, draft, CODES, message=MESSAGE, seed=0)
            predecessors = sites.before(batch.tokens)
            codes = CODES.message(arm.code, predecessors, torch.Generator())
            scores = module(module.pass_over(blocks), sites, predecessors, codes)
            torch.testing.assert_close(scores, floor, rtol=0, atol=0, msg=arm.name)
            names.append(arm.name)
    assert len(set(names)) == len(names) == 4 + 4 + 3 + 6 + 2 + 2 * (not draft.config.is_causal)


def test_arms_of_one_kind_have_equal_size_and_only_their_own_parts_learn():
    draft = tiny_draft(TARGET)
    sizes = {
        sum(p.numel() for p in build(Arm(depth), draft, CODES, message=MESSAGE, seed=0).parameters())
        for depth in (0, 1, 2, ALL)
    }
    assert len(sizes) == 1
    unfrozen = build(Arm(1, unfrozen=True), draft, CODES, message=MESSAGE, seed=0)
    assert len(unfrozen.slow) == len(list(draft.parameters()))
    assert all(own is not theirs for own, theirs in zip(unfrozen.slow, draft.parameters(), strict=True))
    assert unfrozen.own.embedding is draft.embedding


def test_the_extra_mlp_multiplies_as_often_as_the_layers_it_stands_for():
    draft = tiny_draft(TARGET)
    extra = sum(p.numel() for p in ExtraMLP(draft, 3).parameters() if p.ndim == 2)
    layer = sum(p.numel() for p in draft.blocks[0].parameters() if p.ndim == 2)
    assert 0.97 * 3 * layer < extra <= 3 * layer


def test_codes_are_root_rank_long_and_only_transfer_and_random_codes_know_the_token():
    tokens = torch.tensor([5, 9, 5])
    found = {}
    for kind in (TRANSFER, RANDOM, NOISE):
        found[kind] = CODES.message(kind, tokens, torch.Generator().manual_seed(0))
        torch.testing.assert_close(found[kind].norm(dim=-1), torch.full((3,), RANK**0.5))
    assert torch.equal(found[TRANSFER][0], found[TRANSFER][2])
    assert torch.equal(found[RANDOM][0], found[RANDOM][2]) and not torch.equal(found[NOISE][0], found[NOISE][2])
    assert torch.equal(CODES.random, Codes.of(TARGET.head, RANK, 0).random)
    assert not torch.equal(CODES.random, Codes.of(TARGET.head, RANK, 1).random)


def test_borrowed_drafts_share_the_target_s_matrices_and_nothing_else():
    draft = tiny_draft(TARGET, DSPINE)
    copy = borrowed(draft)
    assert copy.embedding is draft.embedding and copy.head is draft.head and copy.codes is draft.codes
    before = draft.fc.weight.clone()
    copy.fc.weight.data.zero_()
    assert torch.equal(draft.fc.weight, before)


def test_what_the_draft_does_not_have_is_refused():
    draft = tiny_draft(TARGET)
    for depth in (3, -1, "last"):
        with pytest.raises(UsageError, match=f"depth {depth!r} lies outside this draft; allowed are 0"):
            arms_of(draft, depths=(0, depth))
    with pytest.raises(UsageError, match="group 'everything' is unknown"):
        arms_of(draft, groups=("everything",))
    with pytest.raises(UsageError, match="read its own label from slot t"):
        refuse_leak(draft, all_slots=True)
    refuse_leak(tiny_draft(TARGET, is_causal=True), all_slots=True)
    with pytest.raises(UsageError, match="one layer"):
        contrasted(1)


def test_contrasted_depths_never_overlap_and_a_causal_draft_has_no_leak_to_show():
    assert contrasted(5) == ((1, 2), (4, 5)) and contrasted(2) == ((1,), (2,)) and contrasted(3) == ((1,), (3,))
    groups = arms_of(tiny_draft(TARGET, is_causal=True))
    assert tuple(groups) == GROUPS and groups[LEAK] == ()
