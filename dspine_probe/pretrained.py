"""Read a causal language model and its tokenizer: the embedded default, a hub id, or a local folder.

`read_pretrained` turns every way this can go wrong into one sentence, and refuses a checkpoint that lacks weights,
which transformers would fill with random numbers. `declared_stop_ids` and `refuse_unsupported` inspect a model.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from dspine_probe.embedded import embedded_folder
from dspine_probe.errors import ProbeError, UsageError

EMBEDDED = "embedded"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FORMS = f"'{EMBEDDED}', a hub id such as 'Qwen/Qwen3-4B', or a folder that holds config.json"
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
_NEUTRAL_LOGITS = {
    "final_logit_softcapping": 0,
    **dict.fromkeys(("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier"), 1),
}


def read_pretrained(
    name: str | Path, dtype: torch.dtype, device: str | torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, cast to `dtype` and on `device`, with its tokenizer.

    Raises:
        UsageError: the name, dtype or device is not one of the allowed forms.
        ProbeError: the model exists but cannot be fetched or read, or lacks weights.
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"dtype {dtype!r} cannot hold a target; use torch.float32 or torch.bfloat16")
    place = _checked_device(device)
    source = _source(name)
    try:
        with _quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ProbeError(
            f"target '{name}' could not be loaded ({first_line(error)}); check the spelling, the network and "
            f"HF_HUB_OFFLINE, or name {_FORMS}"
        ) from error
    lacking = sorted(report["missing_keys"])
    if lacking:
        raise ProbeError(
            f"target '{name}' lacks {len(lacking)} weights, the first being {lacking[0]}; fetch the checkpoint again"
        )
    return model.to(place), tokenizer


def declared_stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Ids that end an answer: those the model declares first, then the tokenizer's, each once."""
    declared: list[int | None] = []
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        declared += ids if isinstance(ids, list | tuple) else [ids]
    if tokenizer is not None:
        declared.append(tokenizer.eos_token_id)
        vocabulary = tokenizer.get_vocab()
        template = str(tokenizer.chat_template or "")
        declared += [vocabulary.get(token) for token in _TURN_ENDS if token in template]
    return tuple(dict.fromkeys(int(token) for token in declared if token is not None))


def refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    """Refuse a model whose logits are not `final @ head.T`, or whose decoder layers cannot be found.

    Raises:
        UsageError: naming what differs.
    """
    kind = model.config.model_type
    head = model.get_output_embeddings()
    if not hasattr(model.base_model, "layers") or head is None:
        raise UsageError(f"target '{name}' ({kind}) is not built like Llama or Qwen; use a target of that family")
    text = model.config.get_text_config()
    declared = {key: getattr(text, key, None) for key in _NEUTRAL_LOGITS}
    changes = [f"{key} {value}" for key, value in declared.items() if value not in (None, _NEUTRAL_LOGITS[key])]
    changes += ["a head with a bias"] if getattr(head, "bias", None) is not None else []
    if changes:
        raise UsageError(
            f"target '{name}' ({kind}) changes its logits after the head ({', '.join(changes)}); use a target of "
            "plain build"
        )
    if getattr(text, "tie_word_embeddings", False) and head.weight is not model.get_input_embeddings().weight:
        raise UsageError(f"target '{name}' declares a tied head but carries two matrices; call tie_weights() first")


def _source(name: str | Path) -> str:
    if str(name) == EMBEDDED:
        with _quiet_transformers():
            return str(embedded_folder())
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return str(folder)
    if isinstance(name, str) and _HUB_ID.fullmatch(name) and not folder.exists():
        return name
    raise UsageError(f"unknown target '{name}'; name {_FORMS}")


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device '{device}' is not available here; use 'cpu' or a device torch can see") from error
    return place


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hold back the progress bars and notices of transformers, and put both settings back."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
