"""Requests that decoding refuses before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.sampling import Sampling
from dspine_probe.target import Target


def check(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    width: int | None,
    sampling: Sampling,
    generators: Sequence[torch.Generator] | None,
) -> int:
    """Refuse what cannot be met; slots per block, 1 without a draft.

    Raises:
        UsageError: what was given, what is allowed, what to do instead.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
    for index, prompt in enumerate(prompts):
        _check_prompt(
            target, "the prompt" if len(prompts) == 1 else f"prompt {index}", prompt, max_new_tokens
        )
    if not sampling.greedy and (generators is None or len(generators) != len(prompts)):
        raise UsageError(
            f"sampling {len(prompts)} prompts was given {len(generators or ())} generators; "
            "give one torch.Generator for each"
        )
    if draft is None:
        return 1
    _check_candidates(draft)
    return _check_width(draft, draft.config.block_size if width is None else width)


def _check_prompt(target: Target, name: str, prompt: Sequence[int], max_new_tokens: int) -> None:
    if not prompt:
        raise UsageError(f"{name} is empty; give at least one token")
    if len(prompt) + max_new_tokens > target.max_positions:
        raise UsageError(
            f"{name} has {len(prompt)} tokens and {max_new_tokens} new ones were asked for, but target "
            f"{target.name!r} holds {target.max_positions}; shorten the prompt or lower max_new_tokens"
        )


def _check_width(draft: Draft, width: int) -> int:
    if width < 2:
        raise UsageError(
            f"a block of {width} slots drafts nothing; give 2 or more, the anchor's slot included"
        )
    if width > draft.config.block_size:
        raise UsageError(
            f"a block of {width} slots is wider than the {draft.config.block_size} this draft was trained with; "
            "give no more than those"
        )
    return width


def _check_candidates(draft: Draft) -> None:
    size = len(draft.head)
    if draft.config.dspine is not None and draft.config.dspine.top_k > size:
        raise UsageError(
            f"the draft ranks {draft.config.dspine.top_k} candidates a slot but proposes only {size} tokens; "
            f"set top_k of its config to {size} or less"
        )
