"""Patching: the sweep is the loop, patches act where they say, and what cannot be patched is refused."""

import pytest
import torch
from toy import BLOCK, D_MODEL, LAYERS, TAPS, VOCAB, seeded, toy_draft

from dspine_probe.errors import UsageError
from dspine_probe.experiments.patching import Blocks, Site, places, recovered, residual_sites, sweep, sweep_one_by_one
from dspine_probe.hooks import HookedDraft

KINDS = [("dflash", False), ("dflash", True), ("dspine", True)]


def make_blocks(draft, seed=0):
    generator = seeded(seed)
    taps = torch.randn(2, 9, TAPS * D_MODEL, generator=generator)
    tokens = torch.randint(VOCAB, (2, 3), generator=generator)
    with torch.no_grad():
        return Blocks(draft.encode_context(taps), tokens, torch.tensor([[2, 4, 8], [1, 5, 9]]))


def cached(hooked, blocks, names):
    cache, caching, _ = hooked.get_caching_hooks(names)
    with torch.no_grad(), hooked.hooks(caching):
        states = hooked.draft.run(blocks.context, blocks.anchor_tokens, blocks.anchors)
    return cache, states.hidden[:, 1:]


def logits_of(draft):
    return lambda hidden, block: hidden @ draft.head.T


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{'causal' if kind[1] else 'both ways'}")
def draft(request):
    return toy_draft(request.param[0], causal=request.param[1])


def all_sites(draft):
    first = {name: int(name.endswith("inject.hook_out")) for name in places(draft)}
    return [Site(name, slot) for name in places(draft) for slot in range(first[name], BLOCK)]


def test_places_are_the_residual_path_in_order(draft):
    names = HookedDraft(draft).hook_dict
    assert set(places(draft)) <= set(names) and len(places(draft)) == 1 + LAYERS * (
        7 if "blocks.0.inject.hook_out" in names else 5
    )
    assert len(residual_sites(draft)) == (LAYERS + 1) * BLOCK


@pytest.mark.parametrize("most_rows", [1, 40, 10_000])
def test_sweep_equals_the_loop_at_every_place(draft, most_rows):
    hooked = HookedDraft(draft)
    clean, corrupted = make_blocks(draft, 0), make_blocks(draft, 1)
    values, _ = cached(hooked, clean, places(draft))
    sites = all_sites(draft)
    sites = [sites[i] for i in torch.randperm(len(sites), generator=seeded()).tolist()]
    score = logits_of(draft)
    swept = sweep(draft, corrupted, sites, values, score, most_rows=most_rows)
    looped = sweep_one_by_one(hooked, corrupted, sites, values, score)
    assert torch.allclose(swept.patched, looped, atol=2e-5)
    _, unpatched = cached(hooked, corrupted, "hook_embed")
    assert torch.allclose(swept.unpatched, unpatched @ draft.head.T, atol=2e-5)
    moved = (looped - swept.unpatched).abs().flatten(1).amax(1)
    assert (moved > 1e-3).sum() > len(sites) * 0.6  # the patches differ from doing nothing


def test_a_clean_value_put_back_changes_nothing(draft):
    hooked, blocks = HookedDraft(draft), make_blocks(draft)
    values, hidden = cached(hooked, blocks, places(draft))
    swept = sweep(draft, blocks, all_sites(draft), values, logits_of(draft))
    assert torch.allclose(swept.patched, (hidden @ draft.head.T).expand_as(swept.patched), atol=2e-5)


def test_causal_blocks_pass_a_patch_to_the_right_only():
    """In a causal block no patch reaches an earlier slot; in a block that sees both ways some do."""
    reached = {}
    for kind, causal in KINDS:
        draft = toy_draft(kind, causal=causal)
        hooked = HookedDraft(draft)
        values, _ = cached(hooked, make_blocks(draft, 0), places(draft))
        sites = [s for s in residual_sites(draft) if s.slot == BLOCK - 1]
        swept = sweep(draft, make_blocks(draft, 1), sites, values, logits_of(draft))
        reached[kind, causal] = float((swept.patched - swept.unpatched)[:, :, :-1].abs().max())
    assert reached["dflash", True] < 1e-5 and reached["dspine", True] < 1e-5
    assert reached["dflash", False] > 1e-3


def test_scores_get_the_block_of_every_row(draft):
    hooked, blocks = HookedDraft(draft), make_blocks(draft)
    values, _ = cached(hooked, blocks, places(draft))
    swept = sweep(draft, blocks, residual_sites(draft), values, lambda hidden, block: block.float(), most_rows=20)
    assert torch.equal(swept.unpatched, torch.arange(6.0))
    assert torch.equal(swept.patched, torch.arange(6.0).expand(len(residual_sites(draft)), -1))


def test_recovered_is_a_share_of_the_way_and_undefined_without_one():
    share = recovered(
        torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 9.0]]),
        torch.tensor([1.0, 0.0, 0.0]),
        torch.tensor([3.0, 2.0, 1e-6]),
        least=1e-3,
    )
    assert torch.equal(share[:, :2], torch.tensor([[0.0, 1.0], [1.0, 0.0]])) and share[:, 2].isnan().all()


def test_what_cannot_be_patched_is_refused(draft):
    hooked, blocks = HookedDraft(draft), make_blocks(draft)
    values, _ = cached(hooked, blocks, places(draft))
    score = logits_of(draft)
    for site, message in (
        (Site("blocks.0.attn.hook_z", 1), "does not lie on the residual path"),
        (Site("blocks.9.hook_resid_post", 1), "does not lie on the residual path"),
        (Site("hook_embed", BLOCK), "has no slot 4"),
        (Site("hook_embed", -1), "has no slot -1"),
    ):
        with pytest.raises(UsageError, match=message):
            sweep(draft, blocks, [site], values, score)
    with pytest.raises(UsageError, match="no site"):
        sweep(draft, blocks, [], values, score)
    with pytest.raises(UsageError, match="no value was given for hook_embed"):
        sweep(draft, blocks, [Site("hook_embed", 1)], {}, score)
    with pytest.raises(UsageError, match="these blocks need"):
        sweep(draft, blocks, [Site("hook_embed", 1)], {"hook_embed": values["hook_embed"][:2]}, score)
    with hooked.hooks([("hook_embed", lambda x, hook: x)]), pytest.raises(UsageError, match="hooks are on"):
        sweep(draft, blocks, [Site("hook_embed", 1)], values, score)


def test_an_anchor_has_no_injection_to_patch():
    draft = toy_draft("dspine")
    blocks = make_blocks(draft)
    values, _ = cached(HookedDraft(draft), blocks, places(draft))
    with pytest.raises(UsageError, match="has no slot 0"):
        sweep(draft, blocks, [Site("blocks.0.inject.hook_out", 0)], values, logits_of(draft))
