"""The warm start: what is copied, what is folded, and that context rows meet the matrices they were made for."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_target
from torch.nn import functional as F

from dspine_probe.errors import UsageError
from dspine_probe.training.recipes import frequent_tokens, new_draft
from dspine_probe.training.warmstart import warm_start

SAMPLE = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_context_keys_and_values_are_the_targets_own(kind: str) -> None:
    """With fc reading the last tap, a draft layer makes of it the values that its source layer makes of that state."""
    target = tiny_target(kind)
    draft = new_draft("dflash", target, layers=2, block_size=4, taps=(0, 2), mask_token_id=63)
    with torch.no_grad():
        for norm in (m for n, m in target.model.named_modules() if n.endswith("input_layernorm")):
            norm.weight.add_(torch.rand(norm.weight.shape, generator=torch.Generator().manual_seed(1)))
        warm_start(draft, target, SAMPLE)
    states = target.hidden_states(SAMPLE, (0, 2))
    context = draft.encode_context(states.taps)
    last_tap = states.taps[..., target.hidden_size :]
    for layer, source in enumerate(target.model.base_model.layers[-2:]):
        normed = source.input_layernorm(last_tap)
        want = F.linear(normed, source.self_attn.v_proj.weight).unflatten(-1, (target.num_kv_heads, -1))
        torch.testing.assert_close(context.values[layer], want, atol=1e-4, rtol=1e-4)
    assert torch.equal(draft.ln_final.weight, target.model.base_model.norm.weight)


def test_query_and_key_scales_match_a_llama_target() -> None:
    target = tiny_target("llama")
    draft = new_draft("dflash", target, layers=2, block_size=4, taps=(0, 2), mask_token_id=63)
    warm_start(draft, target, SAMPLE)
    for block in draft.blocks:
        assert (block.attn.q_norm.weight > 0).all()
        assert block.attn.q_norm.weight.unique().numel() == 1
    assert not all(p.requires_grad is False for p in draft.parameters())


def test_other_layers_can_be_chosen_and_wrong_ones_are_refused() -> None:
    target = tiny_target("llama")
    draft = new_draft("dspine", target, layers=2, block_size=4, taps=(0, 2), mask_token_id=63)
    warm_start(draft, target, SAMPLE, layers=[0, 4])
    source = target.model.base_model.layers[0]
    assert torch.equal(draft.blocks[0].mlp.up_proj.weight, source.mlp.up_proj.weight)
    with pytest.raises(UsageError, match="needs 2"):
        warm_start(draft, target, SAMPLE, layers=[0, 99])


def test_the_vocabulary_is_the_most_frequent_tokens() -> None:
    assert frequent_tokens([[5, 5, 2], [2, 9, 5]], 2, 12).tolist() == [2, 5]
    with pytest.raises(UsageError, match="does not fit"):
        frequent_tokens([[1]], 13, 12)
    with pytest.raises(UsageError, match="unknown"):
        new_draft("eagle", tiny_target("llama"))
