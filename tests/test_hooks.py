"""HookedDraft: idle means untouched, every point fires once where it says and matters, nothing leaks, misuse is
refused."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from dspine_probe.config import DFLASH, DSPINE, DraftConfig
from dspine_probe.drafts.dflash import DFlash
from dspine_probe.drafts.dspine import DSpine
from dspine_probe.drafts.injection import DSpineConfig
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.hook_names import fires_in_pass
from dspine_probe.hooks import HookedDraft

VOCAB, SIZE = 61, 24


def make_draft(kind=DSPINE, seed=0, vocabulary=None):
    config = DraftConfig(
        architecture=kind, hidden_size=SIZE, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, block_size=5, mask_token_id=3, target_layer_ids=(0, 2),
        num_target_layers=5, is_causal=kind == DSPINE, draft_vocab_size=None if vocabulary is None else len(vocabulary),
        part=DSpineConfig(transfer_rank=10, message_size=7, top_k=4) if kind == DSPINE else None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    embedding, head = (torch.randn(VOCAB, SIZE, generator=generator) for _ in range(2))
    draft = (DSpine if kind == DSPINE else DFlash)(config, embedding, head, vocabulary=vocabulary).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * spread if parameter.ndim == 1 else spread / parameter.shape[-1] ** 0.5)
    return draft


def make_inputs(dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(2, 9, 2 * SIZE, generator=generator).to(dtype)
    tokens = torch.randint(VOCAB, (2, 3), generator=generator)
    return taps, tokens, torch.tensor([[2, 4, 8], [1, 5, 9]])


KINDS = (DFLASH, DSPINE)
SHARED = {kind: HookedDraft(make_draft(kind)) for kind in KINDS}  # for tests that leave no trace
POINTS = [(kind, name) for kind in KINDS for name in SHARED[kind].hook_dict if fires_in_pass(name, SHARED[kind].draft)]
LATE = [name for name in SHARED[DSPINE].hook_dict if not fires_in_pass(name, SHARED[DSPINE].draft)]
INPUTS = make_inputs()


@pytest.fixture(params=KINDS)
def draft(request):
    return make_draft(request.param)


def no_hooks_left(hooked):
    return not hooked.list_hooks() and not any(m._forward_hooks or m._backward_hooks for m in hooked.draft.modules())


# ---- idle and life


def test_idle_is_bit_identical_and_close_restores(draft):
    before, greedy = draft(*INPUTS), draft.draft_greedy(draft.encode_context(INPUTS[0]), *INPUTS[1:])
    keys = list(draft.state_dict())
    seams = [m for n, m in draft.named_modules() if n.split(".")[-1].startswith("hook_")]
    with HookedDraft(draft) as hooked:
        assert torch.equal(hooked(*INPUTS), before) and torch.equal(draft(*INPUTS), before)
        assert torch.equal(hooked.draft_greedy(hooked.encode_context(INPUTS[0]), *INPUTS[1:]), greedy)
        logits, _ = hooked.run_with_cache(*INPUTS)
        assert torch.equal(logits, before)
        assert list(draft.state_dict()) == keys
        assert {id(p) for p in hooked.parameters()} == {id(p) for p in draft.parameters()}
    restored = [m for n, m in draft.named_modules() if n.split(".")[-1].startswith("hook_")]
    assert all(a is b for a, b in zip(seams, restored, strict=True))
    assert all(isinstance(m, nn.Identity) for m in restored) and torch.equal(draft(*INPUTS), before)
    hooked.close()
    with pytest.raises(ProbeError, match="closed"):
        hooked(*INPUTS)


@pytest.mark.parametrize("kind", KINDS)
def test_dropping_the_wrapper_restores_the_draft_and_frees_everything(kind):
    draft = make_draft(kind)
    hooked = HookedDraft(draft)
    hooked.add_hook("hook_embed", lambda x, hook: x * 0)
    _, cache = hooked.run_with_cache(*INPUTS)
    wrapper, kept = weakref.ref(hooked), weakref.ref(cache["hook_embed"])
    del hooked, cache
    gc.collect()
    assert wrapper() is None and kept() is None
    assert not any(isinstance(m, HookPoint) for m in draft.modules())
    gone = weakref.ref(draft)
    hooked = HookedDraft(draft)
    hooked.run_with_cache(*INPUTS)
    del hooked, draft
    gc.collect()
    assert gone() is None


def test_a_draft_is_hooked_once(draft):
    first = HookedDraft(draft)
    with pytest.raises(UsageError, match="already"):
        HookedDraft(draft)
    first.close()
    HookedDraft(draft).close()


def test_modules_without_seams_are_refused():
    with pytest.raises(UsageError, match="no hook_"):
        HookedDraft(nn.Linear(2, 2))


# ---- every point


@pytest.mark.parametrize(("kind", "name"), POINTS)
def test_point_fires_once_matters_and_is_described(kind, name):
    hooked = SHARED[kind]
    fired = []
    baseline = hooked(*INPUTS)

    def bump(value, hook):
        fired.append(hook.name)
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(2))
        return torch.where(value.isfinite(), value * (1 + noise), value)

    edited = hooked.run_with_hooks(*INPUTS, fwd_hooks=[(name, bump)])
    assert fired == [name]
    assert not torch.allclose(edited, baseline, atol=1e-4)
    assert torch.equal(hooked(*INPUTS), baseline) and no_hooks_left(hooked)

    greedy_fired = []
    with hooked.hooks([(name, lambda value, hook: greedy_fired.append(hook.name))]):
        context = hooked.encode_context(INPUTS[0])
        hooked.draft_greedy(context, *INPUTS[1:])
    assert greedy_fired == [name]

    row = next(row for row in hooked.hook_table() if row.name == name)
    _, cache = hooked.run_with_cache(*INPUTS, names_filter=name)
    free = {"batch": 2, "block": 6, "slot": 5, "draft_slot": 4, "ctx": 9, "key": 14}
    assert tuple(free.get(size, size) for size in row.shape) == tuple(cache[name].shape)
    assert row.dtype == str(cache[name].dtype).removeprefix("torch.") and row.about and row.fires == "pass"


def test_table_lists_every_seam_and_says_when_it_fires(draft):
    seams = {n for n, m in draft.named_modules() if isinstance(m, nn.Identity)}
    hooked = HookedDraft(draft)
    table = hooked.hook_table()
    assert {row.name for row in table} == seams
    assert {row.name for row in table if row.fires == "pass"} == set(hooked.run_with_cache(*INPUTS)[1].keys())
    late = {row.name for row in table if row.fires == "walk"}
    assert late == (set(LATE) if isinstance(draft, DSpine) else set()) and len(LATE) == 3


def _walk(hooked, inputs=INPUTS):
    states = hooked.draft.run(hooked.encode_context(inputs[0]), *inputs[1:])
    return hooked.draft.transition_cache(states, inputs[1])


@pytest.mark.parametrize("name", LATE)
def test_last_write_fires_once_in_the_walk_and_ranks_but_does_not_choose_candidates(name):
    hooked = SHARED[DSPINE]
    before, fired = _walk(hooked), []

    def bump(value, hook):
        fired.append(hook.name)
        return value * (1 + torch.randn(value.shape, generator=torch.Generator().manual_seed(2)))

    cache, caching, _ = hooked.get_caching_hooks(name)
    with hooked.hooks([(name, bump), *caching]):
        edited = _walk(hooked)
        hooked(*INPUTS)
    assert fired == [name]
    assert torch.equal(edited.candidates, before.candidates)
    assert not torch.allclose(edited.scores, before.scores, atol=1e-4)
    assert torch.equal(_walk(hooked).scores, before.scores) and no_hooks_left(hooked)
    row = next(row for row in hooked.hook_table() if row.name == name)
    free = {"block": 6, "draft_slot": 4, "candidate": 4}
    assert tuple(free.get(size, size) for size in row.shape) == tuple(cache[name].shape) and row.about


def test_clamping_the_last_gate_shut_leaves_the_state_before_the_write():
    hooked = SHARED[DSPINE]
    draft = hooked.draft
    states = draft.run(hooked.encode_context(INPUTS[0]), *INPUTS[1:])
    with hooked.hooks([("last_write.hook_gate", lambda gate, hook: torch.zeros_like(gate))]):
        refined = draft.refine(states.last_layer[:, 1:], INPUTS[1].reshape(-1, 1, 1).expand(-1, 4, 2))
    unwritten = draft.ln_final.normalize(states.last_layer[:, 1:, None]).expand_as(refined)
    assert torch.equal(refined, unwritten)


@pytest.mark.parametrize("name", LATE)
def test_full_passes_refuse_hook_points_they_do_not_reach(name):
    hooked = SHARED[DSPINE]
    for run in (
        lambda: hooked.run_with_cache(*INPUTS, names_filter=["hook_embed", name]),
        lambda: hooked.run_with_cache(*INPUTS, names_filter=lambda n: n == name),
        lambda: hooked.run_with_hooks(*INPUTS, fwd_hooks=[(name, lambda x, hook: x)]),
    ):
        with pytest.raises(UsageError, match=f"{name} fires when the transition cache is built"):
            run()
    assert set(hooked.run_with_cache(*INPUTS, names_filter=lambda n: "hook_out" in n)[1].keys()) == {
        f"blocks.{layer}.inject.hook_out" for layer in range(3)
    }
    assert no_hooks_left(hooked)


def test_edits_reach_decoding(draft):
    hooked = HookedDraft(draft)
    context = hooked.encode_context(INPUTS[0])
    before = hooked.draft_greedy(context, *INPUTS[1:])
    with hooked.hooks([("blocks.1.hook_mlp_out", lambda x, hook: x * -20)]):
        assert not torch.equal(draft.draft_greedy(context, *INPUTS[1:]), before)
    assert torch.equal(draft.draft_greedy(context, *INPUTS[1:]), before)


# ---- cache


def test_cache_holds_copies(draft):
    hooked = HookedDraft(draft)
    plain = hooked.run_with_cache(*INPUTS)[1]
    spoil = [(name, lambda x, hook: x.add_(1)) for name in ("blocks.1.hook_resid_pre", "blocks.1.attn.hook_z")]
    with torch.no_grad(), hooked.hooks(spoil):
        cache = hooked.run_with_cache(*INPUTS, names_filter=["hook_embed", "blocks.0.hook_resid_post"])[1]
    assert torch.equal(cache["blocks.0.hook_resid_post"], plain["blocks.0.hook_resid_post"])
    kept = {name: value.clone() for name, value in plain.items()}
    hooked.run_with_hooks(*make_inputs(seed=5), fwd_hooks=[(lambda name: True, lambda x, hook: x.detach().mul_(2))])
    assert all(torch.equal(plain[name], value) for name, value in kept.items())


def test_cache_follows_transformer_lens_shorthand_and_sees_edits(draft):
    hooked = HookedDraft(draft)
    with hooked.hooks([("blocks.2.hook_mlp_out", lambda x, hook: torch.zeros_like(x))]):
        _, cache = hooked.run_with_cache(*INPUTS)
    assert not cache["mlp_out", 2].any()
    assert torch.equal(cache["resid_post", -1], cache["resid_mid", 2])


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_stream_is_the_sum_of_its_parts(kind):
    """What the draft adds after a layer is a component too, and the last stream is the one the head reads."""
    draft = make_draft(kind)
    with HookedDraft(draft) as hooked:
        logits, cache = hooked.run_with_cache(*INPUTS)
    layers = draft.config.num_hidden_layers
    last = cache[draft.stages(layers - 1)[-1].after]
    torch.testing.assert_close(draft.logits(draft.ln_final(last)[:, 1:]), logits)
    parts, labels = cache.decompose_resid(return_labels=True)
    torch.testing.assert_close(parts.sum(0), last)
    assert labels[:3] == ["embed", "0_attn_out", "0_mlp_out"]
    assert ("0_inject_out" in labels) == (kind == DSPINE)
    for layer in range(layers):
        entering = cache[f"blocks.{layer}.hook_resid_pre"]
        torch.testing.assert_close(cache.decompose_resid(layer).sum(0), entering)
        torch.testing.assert_close(
            cache.decompose_resid(layer, mlp_input=True).sum(0), cache[f"blocks.{layer}.hook_resid_mid"]
        )
    normed = cache.decompose_resid(apply_ln=True).sum(0)
    torch.testing.assert_close(normed[:, 1:] @ draft.head.T, logits)
    last_slot = cache.decompose_resid(apply_ln=True, pos_slice=-1).sum(0)
    torch.testing.assert_close(last_slot @ draft.head.T, logits[:, -1])
    assert len(cache.decompose_resid(mode="mlp", incl_embeds=False)) == layers
    for name in ("accumulated_resid", "logit_attrs", "stack_head_results", "logit_lens"):
        with pytest.raises(UsageError, match=f"{name} is not formed for drafts"):
            getattr(cache, name)(last)
    with HookedDraft(draft) as hooked:
        _, some = hooked.run_with_cache(*INPUTS, names_filter="hook_embed")
    with pytest.raises(UsageError, match="hook_attn_out was not cached"):
        some.decompose_resid()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_come_without_hooks(draft, copied):
    plain = draft(*INPUTS)
    hooked = HookedDraft(draft)
    with hooked.hooks([("hook_embed", lambda x, hook: x * 0)]):
        other, wrapped = copied(draft), copied(hooked)
        assert torch.equal(other(*INPUTS), plain)
        assert torch.equal(wrapped(*INPUTS), plain)
        assert not torch.equal(draft(*INPUTS), plain)
    assert not any(isinstance(module, HookPoint) for module in other.modules())
    with HookedDraft(other) as again:
        assert list(again.hook_dict) == list(hooked.hook_dict) == list(wrapped.hook_dict)
    wrapped.close()
    hooked.close()


@pytest.mark.parametrize("mode", [lambda: torch.set_grad_enabled(False), torch.inference_mode])
def test_a_graph_is_built_whatever_mode_others_set(draft, mode):
    with HookedDraft(draft) as hooked, mode():
        taps = INPUTS[0].clone()
        assert hooked.run_with_cache(taps, *INPUTS[1:], grad=True)[0].requires_grad
        assert not hooked.run_with_cache(taps, *INPUTS[1:])[0].requires_grad
    assert torch.is_grad_enabled()


def test_no_graph_unless_asked(draft):
    hooked = HookedDraft(draft)
    assert not hooked.run_with_cache(*INPUTS)[0].requires_grad
    logits, cache = hooked.run_with_cache(*INPUTS, grad=True, names_filter="hook_embed")
    assert logits.requires_grad and not cache["hook_embed"].requires_grad


def test_second_firing_into_one_cache_is_refused(draft):
    hooked = HookedDraft(draft)
    _, fwd_hooks, _ = hooked.get_caching_hooks("hook_embed")
    with hooked.hooks(fwd_hooks), pytest.raises(ProbeError, match="twice"):
        hooked(*INPUTS)
        hooked(*INPUTS)
    assert no_hooks_left(hooked)


# ---- leaks


@pytest.mark.parametrize(("kind", "name"), POINTS)
def test_a_raising_hook_leaves_nothing(kind, name):
    hooked = SHARED[kind]

    def fail(value, hook):
        raise KeyError("mine")

    for run in (
        lambda: hooked.run_with_hooks(*INPUTS, fwd_hooks=[(name, fail), ("hook_embed", lambda x, hook: x + 1)]),
        lambda: _under(hooked, [(name, fail)]),
    ):
        with pytest.raises(KeyError, match="mine"):
            run()
        assert no_hooks_left(hooked)


def _under(hooked, fwd_hooks):
    with hooked.hooks(fwd_hooks):
        return hooked.run_with_cache(*INPUTS)


def test_outer_hooks_survive_inner_helpers(draft):
    hooked = HookedDraft(draft)
    calls = []
    hooked.add_hook("hook_embed", lambda x, hook: calls.append("mine"))
    with hooked.hooks([("hook_context", lambda x, hook: calls.append("outer"))]):
        hooked.run_with_cache(*INPUTS)
        hooked.run_with_hooks(*INPUTS, fwd_hooks=[("hook_embed", lambda x, hook: calls.append("inner"))])
        with pytest.raises(UsageError):
            hooked.run_with_hooks(*INPUTS, fwd_hooks=[("hook_embed", lambda x, hook: x[:1])])
        calls.clear()
        hooked(*INPUTS)
        assert calls == ["outer", "mine"]
    calls.clear()
    hooked(*INPUTS)
    assert calls == ["mine"]
    hooked.reset_hooks()
    assert no_hooks_left(hooked)


def test_backward_hooks_act_and_go(draft):
    hooked = HookedDraft(draft)
    seen = []
    with hooked.hooks(bwd_hooks=[("blocks.1.hook_resid_mid", lambda grad, hook: seen.append(grad.shape))]):
        hooked(*INPUTS).sum().backward()
    assert seen == [torch.Size([6, 5, SIZE])] and no_hooks_left(hooked)
    hooked(*INPUTS).sum().backward()
    assert len(seen) == 1


# ---- refusals


def test_unknown_names_are_refused_with_the_nearest(draft):
    hooked = HookedDraft(draft)
    for wanted in ("blocks.0.hook_resid_pots", ["hook_embed", "blocks.0.hook_resid_pots"]):
        with pytest.raises(UsageError, match=r"did you mean 'blocks\.0\.hook_resid_post'"):
            hooked.run_with_cache(*INPUTS, names_filter=wanted)
        with pytest.raises(UsageError, match="did you mean"):
            hooked.run_with_hooks(*INPUTS, fwd_hooks=[(wanted, lambda x, hook: x)])
        with pytest.raises(UsageError, match="did you mean"):
            hooked.add_hook(wanted, lambda x, hook: x)
    for nothing in ([], lambda name: False):
        with pytest.raises(UsageError, match="matches no hook point"):
            hooked.run_with_cache(*INPUTS, names_filter=nothing)
    with pytest.raises(UsageError, match="no hook point 'blocks.0.attn'"):
        hooked.add_hook("blocks.0.attn", lambda x, hook: x)
    assert no_hooks_left(hooked)


@pytest.mark.parametrize("collection", [tuple, set, frozenset, list])
def test_filters_take_any_collection(draft, collection):
    names = collection(["hook_embed", "blocks.0.hook_attn_out"])
    assert set(HookedDraft(draft).run_with_cache(*INPUTS, names_filter=names)[1].keys()) == set(names)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda x, hook: x[..., :1], r"returned shape \(6, 5, 1\); this hook point carries \(6, 5, 24\)"),
        (lambda x, hook: x.double(), "returned dtype torch.float64"),
        (lambda x, hook: 3.0, "returned a float"),
    ],
)
def test_misfit_edits_are_refused(draft, bad, message):
    hooked = HookedDraft(draft)
    with pytest.raises(UsageError, match=message):
        hooked.run_with_hooks(*INPUTS, fwd_hooks=[("blocks.1.hook_attn_out", bad)])
    assert no_hooks_left(hooked)


def test_hook_signatures(draft):
    hooked = HookedDraft(draft)
    for fine in (lambda t, h: t, lambda t, hook: t, lambda t, *, hook: t, lambda *a: a[0], lambda t, h=None, k=1: t):
        hooked.run_with_hooks(*INPUTS, fwd_hooks=[("hook_embed", fine)])
    for bad in (lambda t: t, lambda t, h, k: t, "hook", None):
        with pytest.raises(UsageError, match="tensor, hook point"):
            hooked.run_with_hooks(*INPUTS, fwd_hooks=[("hook_embed", bad)])
    assert no_hooks_left(hooked)


def _compile_root(draft):
    return torch.compile(draft)


def _compile_in_place(draft):
    draft.compile()
    return draft


def _compile_block(draft):
    draft.blocks[1].compile()
    return draft


def _wrap_block(draft):
    draft.blocks[1] = torch.compile(draft.blocks[1])
    return draft


def _compile_forward(draft):
    draft.forward = torch.compile(draft.forward)
    return draft


def _compile_run(draft):
    draft.run = torch.compile(draft.run)
    return draft


def _capture_block(draft):
    forward = draft.blocks[0].forward
    draft.blocks[0].forward = lambda *args: forward(*args)  # what make_graphed_callables does to a module
    return draft


FREEZERS = [
    _compile_root,
    _compile_in_place,
    _compile_block,
    _wrap_block,
    _compile_forward,
    _compile_run,
    _capture_block,
]


@pytest.mark.parametrize("freeze", FREEZERS)
def test_compiled_and_captured_drafts_are_refused(draft, freeze):
    hooked = HookedDraft(make_draft(DSPINE))
    if freeze(hooked.draft) is hooked.draft:
        with pytest.raises(UsageError, match="compiled or graph-captured"):
            hooked(*INPUTS)
    with pytest.raises(UsageError, match="compiled or graph-captured"):
        HookedDraft(freeze(draft))


# ---- dtypes


def test_bf16(draft):
    draft.to(torch.bfloat16)
    inputs = make_inputs(torch.bfloat16)
    before = draft(*inputs)
    hooked = HookedDraft(draft)
    logits, cache = hooked.run_with_cache(*inputs)
    assert torch.equal(logits, before) and {value.dtype for value in cache.values()} == {torch.bfloat16}
    assert {row.dtype for row in hooked.hook_table()} == {"bfloat16"}
    edited = hooked.run_with_hooks(*inputs, fwd_hooks=[("hook_context", lambda x, hook: x * 2)])
    assert edited.dtype == torch.bfloat16 and not torch.equal(edited, before)


def test_repeated_caching_keeps_nothing(draft):
    hooked = HookedDraft(draft)
    kept = []
    for _ in range(5):
        logits, cache = hooked.run_with_cache(*INPUTS)
        kept += [weakref.ref(value) for value in (logits, *cache.values())]
        del logits, cache
    gc.collect()
    assert not any(ref() is not None for ref in kept)
