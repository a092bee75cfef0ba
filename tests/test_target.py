"""The target wrapper on tiny random Llama and Qwen3 models, and on the embedded default."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.target import Target, choose_mask_token
from dspine_probe.training.corpus import Example
from dspine_probe.training.features import build_features

WORDS = ["[pad]", "<|im_start|>", "<|im_end|>", "user", "assistant", "red", "green", "blue"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "<|im_start|> assistant{% if enable_thinking is defined and enable_thinking is false %} blue{% endif %}"
)
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_model(kind: str) -> LlamaForCausalLM | Qwen3ForCausalLM:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    # 4 heads of 8 make 32, not the 16 of the residual stream
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False))


def tiny_tokenizer(*extra: str) -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate([*WORDS, *extra])}
    backend = Tokenizer(models.WordLevel(words, unk_token="red"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<|im_end|>", "pad_token": "[pad]", "additional_special_tokens": list(extra)}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **special)


@pytest.fixture(params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest) -> Target:
    return Target.from_model(tiny_model(request.param), tiny_tokenizer())


def tokens(batch: int, ctx: int) -> torch.Tensor:
    return torch.randint(0, 32, (batch, ctx), generator=torch.Generator().manual_seed(1))


def hook_count(target: Target) -> int:
    return sum(len(module._forward_hooks) for module in target.model.modules())


def test_taps_are_the_hidden_states_after_their_layers(target: Target) -> None:
    ids = tokens(2, 9)
    states = target.hidden_states(ids, [2, 0])
    expected = target.model(ids, output_hidden_states=True)
    assert torch.equal(states.taps, torch.cat([expected.hidden_states[3], expected.hidden_states[1]], -1))
    assert torch.equal(states.final, expected.hidden_states[-1])
    torch.testing.assert_close(target.logits(states.final), expected.logits)


def test_no_taps_give_the_final_states_alone(target: Target) -> None:
    assert target.hidden_states(tokens(2, 9), []).taps.shape == (2, 9, 0)


def test_right_padded_batch_equals_single_rows(target: Target) -> None:
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    batched = target.hidden_states(ids, [1], attention_mask=mask)
    alone = target.hidden_states(ids[1:, :5], [1])
    torch.testing.assert_close(batched.taps[1:, :5], alone.taps)
    torch.testing.assert_close(batched.final[1:, :5], alone.final)


def test_states_carry_no_gradient_and_leave_no_hook(target: Target) -> None:
    states = target.hidden_states(tokens(1, 4), [0, 1])
    assert not states.taps.requires_grad and not states.final.requires_grad
    assert hook_count(target) == 0
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training


def test_hooks_are_removed_when_the_forward_raises(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("inside the layer")

    monkeypatch.setattr(target.model.base_model.layers[2].mlp, "forward", fail)
    with pytest.raises(RuntimeError, match="inside the layer"):
        target.hidden_states(tokens(1, 4), [0, 1])
    assert hook_count(target) == 0


def test_no_logits_are_computed(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("the head ran")

    monkeypatch.setattr(target.model.lm_head, "forward", fail)
    target.hidden_states(tokens(1, 4), [0])


def test_bfloat16_states_keep_their_type(target: Target) -> None:
    half = Target.from_model(target.model.to(torch.bfloat16))
    states = half.hidden_states(tokens(1, 4), [0])
    assert half.dtype == states.taps.dtype == states.final.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("taps", "words"),
    [([1, bad], rf"taps \[{bad}\] do not fit a target of 4 layers; allowed are 0…2") for bad in (3, 4, -1)]
    + [([1, 1], "repeat")],
)
def test_taps_that_do_not_fit_are_refused(target: Target, taps: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        target.hidden_states(tokens(1, 4), taps)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.zeros(4, dtype=torch.long), "shape"),
        (torch.zeros(1, 0, dtype=torch.long), "at least one token"),
        (torch.zeros(1, 41, dtype=torch.long), "41 tokens"),
        (torch.full((1, 4), 32), r"hold 32; .* 0\.\.31"),
        (torch.full((1, 4), -1), r"hold -1; .* 0\.\.31"),
    ],
)
def test_token_ids_that_do_not_fit_are_refused(target: Target, ids: torch.Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        target.hidden_states(ids, [0])


@pytest.mark.parametrize("bad", [-1, 32])
def test_ids_out_of_range_are_refused_at_every_entry(target: Target, bad: int, tmp_path) -> None:
    with pytest.raises(UsageError, match=rf"token ids hold {bad}"):
        target.decode([1, bad])
    with pytest.raises(UsageError, match=rf"stop ids hold {bad}"):
        Target.from_model(target.model, stop_ids=[2, bad])
    examples = [Example("a", (1, 2), (3, bad))]
    with pytest.raises(UsageError, match=rf"hold {bad}"):
        build_features(target, examples, [0], tmp_path)


def test_a_tokenizer_that_knows_more_than_the_embedding_is_refused() -> None:
    model = tiny_model("llama")
    large = tiny_tokenizer(*(f"<{index}>" for index in range(40)))
    with pytest.raises(UsageError, match=r"the tokenizer's ids hold 4\d; they must lie in 0\.\.31"):
        Target.from_model(model, large).encode_chat("<39>")


def test_left_padding_is_refused(target: Target) -> None:
    with pytest.raises(UsageError, match="pad on the right"):
        target.hidden_states(tokens(1, 3), [0], attention_mask=torch.tensor([[0, 1, 1]]))


def test_geometry_of_llama_and_qwen3() -> None:
    llama, qwen = Target.from_model(tiny_model("llama")), Target.from_model(tiny_model("qwen3"))
    assert (llama.hidden_size, llama.num_heads, llama.num_kv_heads, llama.head_dim) == (16, 4, 2, 4)
    assert (qwen.hidden_size, qwen.num_heads, qwen.num_kv_heads, qwen.head_dim) == (16, 4, 2, 8)
    assert qwen.model.base_model.layers[0].self_attn.q_norm.weight.shape == (8,)
    for target in (llama, qwen):
        assert (target.num_layers, target.vocab_size, target.intermediate_size) == (4, 32, 24)
        assert (target.max_positions, target.rms_norm_eps, target.rope_theta) == (40, 1e-6, 10000.0)
    assert llama.dtype == torch.float32 and llama.device == torch.device("cpu")


def test_a_size_that_the_configuration_lacks_is_named() -> None:
    target = Target.from_model(tiny_model("llama"))
    target.config = SimpleNamespace(layer_norm_eps=1e-5)
    with pytest.raises(UsageError, match="'in-memory' .*no rms_norm_eps"):
        target.rms_norm_eps  # noqa: B018


def test_rope_theta_in_either_place() -> None:
    target = Target.from_model(tiny_model("llama"))
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    assert target.rope_theta == 5e5
    target.config.rope_parameters = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert target.rope_theta == 2e6, "the layers of a draft attend fully"
    target.config.rope_parameters = None
    target.config.rope_theta = 1e6
    assert target.rope_theta == 1e6
    del target.config.rope_theta
    with pytest.raises(UsageError, match="no rope_theta"):
        target.rope_theta  # noqa: B018


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [("final_logit_softcapping", 30.0, None), ("logits_scaling", 8.0, 1.0), ("logit_scale", 0.06, 1)]
    + [("lm_head_multiplier", 0.5, 1.0), ("output_multiplier", 2.0, 1.0)],
)
def test_logits_that_are_changed_after_the_head_are_refused_by_name(field: str, value: float, neutral) -> None:
    model = tiny_model("llama")
    setattr(model.config, field, value)
    with pytest.raises(UsageError, match=rf"{field} {value}"):
        Target.from_model(model)
    setattr(model.config, field, neutral)
    Target.from_model(model)


def test_embedding_and_head_are_references() -> None:
    tied, untied = Target.from_model(tiny_model("llama")), Target.from_model(tiny_model("qwen3"))
    assert tied.tied and tied.head is tied.embedding is tied.model.model.embed_tokens.weight
    assert not untied.tied and untied.head is untied.model.lm_head.weight
    assert untied.embedding is untied.model.model.embed_tokens.weight


def test_a_declared_tie_that_is_broken_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(UsageError, match="tied head"):
        Target.from_model(model)


def test_stop_ids_from_list_tokenizer_and_caller() -> None:
    model = tiny_model("qwen3")
    model.generation_config = GenerationConfig(eos_token_id=[7, 5])
    assert Target.from_model(model).stop_ids == (7, 5, 2)
    model.config.eos_token_id = None
    assert Target.from_model(model).stop_ids == (7, 5)
    assert Target.from_model(model, tiny_tokenizer()).stop_ids == (7, 5, 2)
    assert Target.from_model(model, stop_ids=[9]).stop_ids == (9,)


def test_encode_chat_and_decode(target: Target) -> None:
    ids = target.encode_chat("red green")
    assert target.decode(ids) == "<|im_start|> user red green <|im_end|> <|im_start|> assistant blue"
    assert target.encode_chat([{"role": "user", "content": "red green"}]) == ids
    assert target.decode(ids[-2:], skip_special=True) == "assistant blue"


@pytest.mark.parametrize("prompt", ["", "  \n", [], [{"role": "user", "content": ""}]])
def test_empty_prompts_are_refused(target: Target, prompt: str | list) -> None:
    with pytest.raises(UsageError, match="empty"):
        target.encode_chat(prompt)


@pytest.mark.parametrize("prompt", ["red \ud83d green", [{"role": "user", "content": "\udc00"}]])
def test_text_that_no_tokenizer_takes_is_refused(target: Target, prompt: str | list) -> None:
    with pytest.raises(UsageError, match=r"the prompt holds the lone surrogate U\+D[8C]"):
        target.encode_chat(prompt)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 3 }}",
        "{{ messages | nosuchfilter }}",
        "{% for",
    ],
)
def test_a_template_that_raises_is_one_sentence(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match="the chat template of target 'in-memory' does not take") as caught:
        Target.from_model(tiny_model("llama"), tokenizer).encode_chat("red")
    assert "\n" not in str(caught.value)


def test_a_prompt_longer_than_the_context_is_refused(target: Target) -> None:
    with pytest.raises(UsageError, match="46 tokens .* takes 40"):
        target.encode_chat("red " * 40)


def test_chat_without_tokenizer_or_template_is_refused() -> None:
    model, plain = tiny_model("llama"), tiny_tokenizer()
    plain.chat_template = None
    with pytest.raises(UsageError, match="no tokenizer"):
        Target.from_model(model).encode_chat("red")
    with pytest.raises(UsageError, match="no chat template"):
        Target.from_model(model, plain).encode_chat("red")


def test_mask_token_is_a_spare_row() -> None:
    model = tiny_model("llama")
    assert choose_mask_token(Target.from_model(model, tiny_tokenizer())) == len(WORDS)
    assert choose_mask_token(Target.from_model(model, tiny_tokenizer("<empty_output>"))) == 8
    full = tiny_tokenizer(*(f"<{index}>" for index in range(24)))
    with pytest.raises(UsageError, match="no spare"):
        choose_mask_token(Target.from_model(model, full))


def test_load_from_a_folder(tmp_path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = Target.load(tmp_path, dtype=torch.float32)
    assert torch.equal(target.head, model.lm_head.weight) and target.stop_ids == (2,)
    assert target.encode_chat("red")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ProbeError, match="could not be loaded"):
        Target.load(tmp_path)


def test_a_folder_that_lacks_weights_is_refused(tmp_path) -> None:
    model = tiny_model("qwen3")
    states = {key: value for key, value in model.state_dict().items() if "layers.2.mlp" not in key}
    model.save_pretrained(tmp_path, state_dict=states)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ProbeError, match=r"lacks 3 weights.*layers\.2\.mlp"):
        Target.load(tmp_path)


@pytest.mark.parametrize("name", ["smollm", "./nowhere", "/nowhere/at/all", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="unknown target.*'embedded', a hub id"):
        Target.load(name)


def test_a_hub_id_out_of_reach_is_one_sentence() -> None:
    with pytest.raises(ProbeError, match="'no-such-owner/no-such-model' could not be loaded") as caught:
        Target.load("no-such-owner/no-such-model")
    assert "\n" not in str(caught.value)


def test_unusable_dtype_and_device_are_refused() -> None:
    with pytest.raises(UsageError, match="dtype"):
        Target.load(dtype=torch.int8)
    with pytest.raises(UsageError, match="device 'toaster'"):
        Target.load(device="toaster")


@pytest.mark.embedded
def test_the_embedded_target() -> None:
    target = Target.load()
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.tied) == (30, 576, 49152, True)
    assert target.stop_ids == (2,) and target.max_positions == 8192
    assert choose_mask_token(target) == target.tokenizer.convert_tokens_to_ids("<empty_output>") == 16
    question = "What is the capital of France?"
    ids = target.encode_chat(question)
    assert len(ids) == 30 + len(target.tokenizer(question).input_ids)
    assert "You are a helpful AI assistant named SmolLM, trained by Hugging Face" in target.decode(ids)
    # the model was trained with digits set apart, which keeps the line breaks before them together
    assert target.tokenizer.tokenize("\n\n10") == ["ĊĊ", "1", "0"]
    for _ in range(12):
        final = target.hidden_states(torch.tensor([ids]), []).final
        ids.append(int(target.logits(final[0, -1]).argmax()))
        if ids[-1] in target.stop_ids:
            break
    assert target.decode(ids).endswith("The capital of France is Paris.<|im_end|>")
