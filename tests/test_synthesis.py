"""Self-written prompts: the open user turn, the filter, rounds and the resulting corpus, on a tiny random model."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dspine_probe.errors import UsageError
from dspine_probe.target import Target
from dspine_probe.training.corpus import Corpus
from dspine_probe.training.synthesis import TurnSampling, open_user_turn, sample_turns, synthesize, turn_fault

TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


@pytest.fixture
def target() -> Target:
    words = ["<s>", "</s>", "user", "assistant", *[f"w{i}" for i in range(60)]]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="w0")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=512))
    for name, p in model.named_parameters():
        p.data.normal_(1.0 if "norm" in name else 0.0, 0.4)
    return Target.from_model(model, fast, name="tiny", stop_ids=[1])


SAMPLING = TurnSampling(round_size=24, batch_size=8)


def test_open_turn_ends_where_the_user_begins(target: Target) -> None:
    assert open_user_turn(target) == [0, 2]
    target.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        open_user_turn(target)


def test_turn_faults() -> None:
    seen: set[str] = set()
    ids = tuple(range(20))
    assert turn_fault("How do I bake bread?", "stop", ids, seen) is None
    assert turn_fault("how do  i bake BREAD?", "stop", ids, seen) == "duplicate"
    assert turn_fault("What is the best", "length", ids, seen) == "long"
    assert turn_fault("  ", "stop", ids, seen) == "empty"
    assert turn_fault("Hello there", "stop", ids, seen) == "short"
    assert turn_fault("Что такое хлеб и как", "stop", ids, seen) == "foreign"
    assert turn_fault("go on and on", "stop", (7,) * 30, seen) == "looping"


def test_rounds_repeat_with_the_seed(target: Target) -> None:
    first, again, other = (sample_turns(target, SAMPLING, number, set()) for number in (0, 0, 1))
    assert first == again
    assert set(first["texts"].values()) != set(other["texts"].values())
    assert len(first["texts"]) + sum(first["dropped"].values()) == SAMPLING.round_size


def test_synthesis_reaches_its_budget_and_can_be_shared(target: Target, tmp_path: Path) -> None:
    corpus = synthesize(target, tmp_path, token_budget=300, max_new_tokens=20, sampling=SAMPLING)
    assert corpus.response_tokens >= 300
    assert Corpus.load(tmp_path).examples == corpus.examples
    texts = json.loads((tmp_path / "turns-0.json").read_text())["texts"]
    known = [example for example in corpus.examples if example.id in texts]
    assert known
    for example in known:
        assert list(example.prompt_ids) == target.encode_chat(texts[example.id])
    assert corpus.meta["turns"]["kept"] + sum(corpus.meta["turns"]["dropped"].values()) >= SAMPLING.round_size
    again = synthesize(target, tmp_path, token_budget=300, max_new_tokens=20, sampling=SAMPLING)
    assert again == corpus
    with pytest.raises(UsageError, match="another folder"):
        synthesize(target, tmp_path, token_budget=300, max_new_tokens=20, sampling=TurnSampling(seed=1))
