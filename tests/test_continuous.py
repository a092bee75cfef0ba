"""The batched decoder against transformers' own greedy decoding, on tiny random models in fp32."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dspine_probe.decoding.continuous import generate_greedy, generate_sampled, sample_nucleus
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

COMMON = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, max_position_embeddings=256)


def tiny(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "llama":
        heads = dict(num_attention_heads=4, num_key_value_heads=2)
        model = LlamaForCausalLM(LlamaConfig(**COMMON, **heads, attention_bias=True, tie_word_embeddings=True))
    elif kind == "llama-mha":
        heads = dict(num_attention_heads=4, num_key_value_heads=4)
        model = LlamaForCausalLM(LlamaConfig(**COMMON, **heads, mlp_bias=True, tie_word_embeddings=False))
    else:
        heads = dict(num_attention_heads=6, num_key_value_heads=2, head_dim=16)
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, **heads, tie_word_embeddings=False))
    for name, p in model.named_parameters():  # wide enough that no two logits tie
        p.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model.eval()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 90, (count,), generator=g).tolist()
    return [torch.randint(0, 61, (n,), generator=g).tolist() for n in sizes]


def reference(model: torch.nn.Module, ids: list[int], stop: list[int], limit: int) -> tuple[int, ...]:
    options = dict(do_sample=False, max_new_tokens=limit, eos_token_id=stop, pad_token_id=0)
    given = torch.tensor([ids])
    written = model.generate(given, attention_mask=torch.ones_like(given), **options)  # ids may hold the padding id
    return tuple(written[0, len(ids) :].tolist())


@pytest.mark.parametrize("kind", ["llama", "llama-mha", "qwen3"])
def test_tokens_are_those_of_plain_greedy_decoding(kind: str) -> None:
    model = tiny(kind)
    target = Target.from_model(model, stop_ids=[3, 7])
    asked = prompts(23)
    seen: dict[int, object] = {}
    done = generate_greedy(target, asked, max_new_tokens=40, batch_size=5, on_complete=seen.__setitem__)
    assert [list(c.prompt_ids) for c in done] == asked
    assert [seen[i] for i in range(len(asked))] == done
    expected = [reference(model, ids, [3, 7], 40) for ids in asked]
    assert [c.response_ids for c in done] == expected
    assert {c.finish for c in done} == {"stop", "length"}
    for c in done:
        assert (c.response_ids[-1] in (3, 7)) == (c.finish == "stop")


def test_neighbours_change_no_token() -> None:
    model = tiny("qwen3")
    target = Target.from_model(model, stop_ids=[5])
    asked = prompts(90, seed=1)
    together = generate_greedy(target, asked, max_new_tokens=50, batch_size=40)
    alone = generate_greedy(target, asked, max_new_tokens=50, batch_size=1)
    assert together == alone


def test_bfloat16_runs() -> None:
    target = Target.from_model(tiny("llama").bfloat16(), stop_ids=[3])
    done = generate_greedy(target, prompts(7), max_new_tokens=5, batch_size=4)
    assert all(1 <= len(c.response_ids) <= 5 for c in done)


def test_stopping_finishes_running_rows_only() -> None:
    target = Target.from_model(tiny("llama"), stop_ids=[])
    done = generate_greedy(target, prompts(20), max_new_tokens=6, batch_size=4, should_stop=iter_true_after(1))
    assert len(done) == 4
    assert all(len(c.response_ids) == 6 for c in done)


def iter_true_after(calls: int):
    count = iter(range(10_000))
    return lambda: next(count) >= calls


def test_abandoned_rows_end_early() -> None:
    target = Target.from_model(tiny("llama"), stop_ids=[])
    done = generate_greedy(target, prompts(3), max_new_tokens=100, batch_size=2, abandon=lambda ids: True)
    assert [(len(c.response_ids), c.finish) for c in done] == [(32, "abandoned")] * 3


def test_sampling_repeats_with_the_seed_and_stays_in_the_nucleus() -> None:
    target = Target.from_model(tiny("llama"), stop_ids=[3])

    def draw(seed: int):
        generator = torch.Generator().manual_seed(seed)
        return generate_sampled(target, prompts(6), max_new_tokens=12, batch_size=3, generator=generator)

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    logits = torch.tensor([[5.0, 4.0, -9.0, -9.0], [0.0, 9.0, 0.0, 0.0]]).repeat(200, 1)
    drawn = sample_nucleus(logits, torch.Generator().manual_seed(0), temperature=1.0, top_p=0.9, top_k=4)
    assert set(drawn[0::2].tolist()) == {0, 1}
    assert set(drawn[1::2].tolist()) == {1}


def test_bad_requests_are_refused() -> None:
    target = Target.from_model(tiny("llama"), stop_ids=[3])
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        generate_greedy(target, [[1], []], max_new_tokens=4, batch_size=2)
    with pytest.raises(UsageError, match="holds 256"):
        generate_greedy(target, [[1] * 250], max_new_tokens=7, batch_size=2)
    with pytest.raises(UsageError, match="1 or more"):
        generate_greedy(target, [[1]], max_new_tokens=0, batch_size=2)
    assert generate_greedy(target, [], max_new_tokens=4, batch_size=2) == []
    with pytest.raises(UsageError, match="temperature 0"):
        generator = torch.Generator()
        generate_sampled(target, [[1]], max_new_tokens=4, batch_size=2, generator=generator, temperature=0)
