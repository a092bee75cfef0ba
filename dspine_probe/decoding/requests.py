"""Requests that decoding refuses before anything is computed, and prompts brought into one form."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dspine_probe.decoding.engine import check_draft
from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.sampling import GREEDY, Sampling
from dspine_probe.target import Target


def check(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    width: int | None = None,
    sampling: Sampling = GREEDY,
    generators: Sequence[torch.Generator] | None = None,
) -> int:
    """Refuse what cannot be met; slots per block, 1 without a draft.

    Raises:
        UsageError: what was given, what is allowed, what to do instead.
    """
    _refuse_forked()
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
    for index, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompt {index}"
        if not prompt:
            raise UsageError(f"{name} is empty; give at least one token")
        if len(prompt) + max_new_tokens > target.max_positions:
            raise UsageError(
                f"{name} has {len(prompt)} tokens and {max_new_tokens} new ones were asked for, but target "
                f"{target.name!r} holds {target.max_positions}; shorten the prompt or lower max_new_tokens"
            )
    if not sampling.greedy and len(generators or ()) != len(prompts):
        raise UsageError(
            f"sampling {len(prompts)} prompts was given {len(generators or ())} generators; "
            "give one torch.Generator for each"
        )
    if draft is None:
        return 1
    width = draft.config.block_size if width is None else width
    check_draft(draft, width)
    return width


def prompts_of(target: Target, prompts: Iterable[object]) -> list[list[int]]:
    """Prompts as lists of token ids.

    Raises:
        UsageError: one is no sequence of the target's token ids.
    """
    if isinstance(prompts, str | bytes):
        raise UsageError("prompts are text; give one sequence of token ids each, as target.encode_chat makes them")
    given = list(prompts)
    names = ["the prompt"] if len(given) == 1 else [f"prompt {index}" for index in range(len(given))]
    return [token_ids(name, prompt, target.vocab_size) for name, prompt in zip(names, given, strict=True)]


def token_ids(name: str, given: Any, vocab_size: int) -> list[int]:
    """Token ids as plain numbers, from a flat list, tuple, tensor or array of whole numbers.

    Raises:
        UsageError: it is something else, or an id lies outside 0…vocab_size − 1.
    """
    if isinstance(given, str | bytes):
        raise UsageError(f"{name} is text; give its token ids, as target.encode_chat makes them")
    listed = given.tolist() if hasattr(given, "tolist") else given
    try:
        ids = [operator.index(one) for one in listed]
    except TypeError as error:
        raise UsageError(
            f"{name} is no flat sequence of whole numbers ({type(given).__name__}: {error}); give its token ids"
        ) from error
    outside = next((one for one in ids if not 0 <= one < vocab_size), None)
    if outside is not None:
        raise UsageError(
            f"{name} holds the token id {outside}, but the vocabulary has the ids 0…{vocab_size - 1}; "
            "encode the text with this target's tokenizer"
        )
    return ids


_decoded_in: list[int] = []
"""The process that first decoded with threads, or its parent if this process was forked from one that had."""


def _refuse_forked() -> None:
    """Refuse to decode in a child forked from a process whose threads were at work: it would wait for them forever."""
    if torch.get_num_threads() == 1:
        return
    if _decoded_in and _decoded_in[0] != os.getpid():
        raise UsageError(
            "this process was forked from one that had decoded with several threads, and would wait for them "
            "forever; start it with multiprocessing.get_context('spawn'), or call torch.set_num_threads(1) in it"
        )
    _decoded_in[:] = [os.getpid()]
