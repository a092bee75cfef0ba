"""Batched decoding with continuous batching: a finished row is replaced by the next prompt.

`generate_greedy` writes the T=0 completion of every prompt; `generate_sampled` draws one at a temperature. Both run
`LeanDecoder`, so they take Llama and Qwen3 geometry on any device and dtype, and in fp32 the greedy tokens are those
of `transformers` plain greedy decoding. No speculation happens here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.continuous import Batch, Completion, Rules
from dspine_probe.errors import UsageError
from dspine_probe.target import Target


def generate_greedy(
    target: Target,
    prompts: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    on_complete: Callable[[int, Completion], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    abandon: Callable[[Sequence[int]], bool] | None = None,
) -> list[Completion]:
    """Complete every prompt greedily until a stop id or `max_new_tokens`.

    Args:
        target: a Llama or Qwen3 target on any device.
        prompts: token ids, one non-empty sequence per prompt.
        max_new_tokens: most response tokens per prompt, the stop id included.
        batch_size: rows decoded together.
        on_complete: called with a prompt's index and completion as soon as it is finished, in no fixed order.
        should_stop: asked before new prompts are started; once true, running rows are finished and the rest is left.
        abandon: asked every 32 tokens whether a response is not worth finishing.

    Returns:
        The completions in the order of `prompts`, without those never started.
    """
    return _run(
        target, prompts, Rules(max_new_tokens, _argmax, abandon), batch_size, on_complete, should_stop
    )


def generate_sampled(
    target: Target,
    prompts: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_p: float = 0.95,
    top_k: int = 256,
    on_complete: Callable[[int, Completion], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    abandon: Callable[[Sequence[int]], bool] | None = None,
) -> list[Completion]:
    """As `generate_greedy`, but every token is drawn from the nucleus of mass `top_p` among the `top_k` likeliest."""
    if temperature <= 0 or not 0 < top_p <= 1 or top_k < 1:
        raise UsageError(
            f"sampling was given temperature {temperature}, top_p {top_p}, top_k {top_k}; use temperature > 0, "
            "0 < top_p <= 1 and top_k >= 1, or generate_greedy for temperature 0"
        )

    def choose(logits: Tensor) -> Tensor:
        return sample_nucleus(logits, generator, temperature=temperature, top_p=top_p, top_k=top_k)

    return _run(target, prompts, Rules(max_new_tokens, choose, abandon), batch_size, on_complete, should_stop)


def sample_nucleus(
    logits: Float[Tensor, "row vocab"],
    generator: torch.Generator,
    *,
    temperature: float,
    top_p: float,
    top_k: int,
) -> Int[Tensor, "row"]:
    """Draw one token per row from the smallest set of the `top_k` likeliest tokens that holds mass `top_p`."""
    best, ids = logits.float().div(temperature).topk(min(top_k, logits.shape[-1]), dim=-1)
    p = best.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    return ids.gather(1, torch.multinomial(p, 1, generator=generator))[:, 0]


def _argmax(logits: Tensor) -> Tensor:
    return logits.max(-1).indices  # on CPU several times faster than argmax, same result


def _run(
    target: Target,
    prompts: Iterable[Sequence[int]],
    rules: Rules,
    batch_size: int,
    on_complete: Callable[[int, Completion], None] | None,
    should_stop: Callable[[], bool] | None,
) -> list[Completion]:
    listed = list(prompts)
    if rules.max_new_tokens < 1 or batch_size < 1:
        raise UsageError(
            f"generation was given max_new_tokens {rules.max_new_tokens} and batch_size {batch_size}; "
            "both must be 1 or more"
        )
    _check_prompts(target, listed, rules.max_new_tokens)
    if not listed:
        return []
    batch = Batch(target, listed, rules, min(batch_size, len(listed)))
    done: dict[int, Completion] = {}
    while batch.advance(stopped=should_stop is not None and should_stop()):
        for index, completion in batch.take_finished():
            done[index] = completion
            if on_complete is not None:
                on_complete(index, completion)
    return [done[index] for index in sorted(done)]


def _check_prompts(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    limit = target.model.config.max_position_embeddings
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {index} has no tokens; give at least one token per prompt")
        if len(prompt) + max_new_tokens > limit:
            raise UsageError(
                f"prompt {index} has {len(prompt)} tokens and {max_new_tokens} new ones were asked for, but the "
                f"target holds {limit}; shorten the prompt or lower max_new_tokens"
            )
