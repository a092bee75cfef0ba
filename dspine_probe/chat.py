"""From chat messages to token ids, by a tokenizer's own template; every refusal is one sentence."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dspine_probe.errors import UsageError
from dspine_probe.pretrained import first_line
from dspine_probe.prompts import refuse_surrogates


def chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]], target_name: str) -> list[int]:
    """Ids up to the point where the assistant begins to answer; see `Target.encode_chat`.

    Raises:
        UsageError: a message is empty or no text, or there is no template, or it does not take the messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    contents = [str(message.get("content") or "") for message in messages]
    if not messages or any(not content.strip() for content in contents):
        raise UsageError("the prompt is empty; give at least one word")
    for content in contents:
        refuse_surrogates(content, "the prompt")
    if tokenizer.chat_template is None:
        raise UsageError(f"target '{target_name}' has no chat template; use an instruction-tuned target")
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=False, tokenize=True, return_dict=False
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise UsageError(
            f"the chat template of target '{target_name}' does not take these messages ({first_line(error)}); "
            "give messages in the order and form that it expects"
        ) from error
    return [int(token) for token in ids]
