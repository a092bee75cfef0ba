"""Batched decoding with continuous batching: a finished row is replaced by the next prompt.

`generate_greedy` writes the T=0 completion of every prompt; `generate_sampled` draws one at a temperature. Both run
`LeanDecoder`, so they take Llama and Qwen3 geometry on any device and dtype, and in fp32 the greedy tokens are those
of `transformers` plain greedy decoding. No speculation happens here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.lean import LeanDecoder
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

SORT_WINDOW = 8
PREFILL_TOKENS = 4096
RESORT_STEPS = 32
ABANDON_STEPS = 32

Chooser = Callable[[Float[Tensor, "row vocab"]], Int[Tensor, "row"]]


@dataclass(frozen=True)
class Completion:
    """One answered prompt.

    `response_ids` ends with the stop id exactly when `finish` is "stop"; "abandoned" ones were given up early.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finish: Literal["stop", "length", "abandoned"]


@dataclass(frozen=True)
class _Rules:
    """How the next token is chosen and when a response ends."""

    max_new_tokens: int
    choose: Chooser
    abandon: Callable[[Sequence[int]], bool] | None


@dataclass
class _Row:
    """A sequence being written: which prompt it answers, its tokens so far and how many are cached."""

    index: int
    prompt: Sequence[int]
    response: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return len(self.prompt) + len(self.response) - 1


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
        target, prompts, _Rules(max_new_tokens, _argmax, abandon), batch_size, on_complete, should_stop
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

    return _run(
        target, prompts, _Rules(max_new_tokens, choose, abandon), batch_size, on_complete, should_stop
    )


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
    rules: _Rules,
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
    batch = _Batch(target, listed, rules, min(batch_size, len(listed)))
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


def _ordered(prompts: Sequence[Sequence[int]], batch: int) -> list[int]:
    """Prompt indices sorted by length inside windows, up and down in turn, so that neighbours are alike."""
    window = SORT_WINDOW * batch
    order: list[int] = []
    for turn, start in enumerate(range(0, len(prompts), window)):
        part = range(start, min(start + window, len(prompts)))
        order += sorted(part, key=lambda i: len(prompts[i]), reverse=turn % 2 == 1)
    return order


def _common_prefix(prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    """What all prompts begin with, short of the last token of any."""
    first, last = (
        min(prompts, key=tuple),
        max(prompts, key=tuple),
    )  # in dictionary order: what these two share, all share
    limit = min(map(len, prompts)) - 1
    same = 0
    while same < limit and first[same] == last[same]:
        same += 1
    return first[:same]


class _Batch:
    """The rows in flight and the queue behind them."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        rules: _Rules,
        rows: int,
    ) -> None:
        self.prompts, self.rules = prompts, rules
        self.stop_ids = frozenset(target.stop_ids)
        self.queue = _ordered(prompts, rows)[::-1]
        self.rows: list[_Row | None] = [None] * rows
        self.refill_at = max(1, rows // 16)
        self.steps = 0
        self.finished: list[tuple[int, Completion]] = []
        capacity = max(len(p) for p in prompts) + rules.max_new_tokens
        self.decoder = LeanDecoder(target.model, rows=rows, capacity=capacity)
        self.decoder.share_prefix(_common_prefix(prompts))

    def advance(self, *, stopped: bool) -> bool:
        """Refill or decode one token of every row; false once nothing is left to do."""
        if stopped:
            self.queue.clear()
        free = [r for r, row in enumerate(self.rows) if row is None]
        if self.queue and (len(free) >= self.refill_at or len(free) == len(self.rows)):
            self._refill(free)
            return True
        if len(free) == len(self.rows):
            return False
        self._tidy(len(free))
        self._step()
        return True

    def take_finished(self) -> list[tuple[int, Completion]]:
        """The completions finished since the last call."""
        taken, self.finished = self.finished, []
        return taken

    def _refill(self, free: list[int]) -> None:
        chosen: list[int] = []
        tokens = 0
        while self.queue and len(chosen) < len(free) and tokens <= PREFILL_TOKENS:
            chosen.append(self.queue.pop())
            tokens += len(self.prompts[chosen[-1]])
        slots = free[: len(chosen)]
        logits = self.decoder.prefill(slots, [self.prompts[i] for i in chosen])
        for slot, index, token in zip(slots, chosen, self.rules.choose(logits).tolist(), strict=True):
            self.rows[slot] = _Row(index, self.prompts[index])
            self._append(slot, token)

    def _step(self) -> None:
        last = [0 if row is None else row.response[-1] for row in self.rows]
        lengths = [0 if row is None else row.cached for row in self.rows]
        tokens = torch.tensor(last, device=self.decoder.embedding.device)
        for slot, token in enumerate(self.rules.choose(self.decoder.step(tokens, lengths)).tolist()):
            if self.rows[slot] is not None:
                self._append(slot, token)
        self.steps += 1

    def _append(self, slot: int, token: int) -> None:
        row = self.rows[slot]
        assert row is not None
        row.response.append(token)
        finish = self._finish(row.response)
        if finish is not None:
            self.finished.append((row.index, Completion(tuple(row.prompt), tuple(row.response), finish)))
            self.rows[slot] = None

    def _finish(self, response: list[int]) -> Literal["stop", "length", "abandoned"] | None:
        if response[-1] in self.stop_ids:
            return "stop"
        if len(response) == self.rules.max_new_tokens:
            return "length"
        given_up = (
            self.rules.abandon is not None
            and len(response) % ABANDON_STEPS == 0
            and self.rules.abandon(response)
        )
        return "abandoned" if given_up else None

    def _tidy(self, free: int) -> None:
        """Keep rows in order of length; drop free rows for good once no prompt waits for them."""
        shrink = not self.queue and free * 4 >= len(self.rows)
        if not shrink and (self.steps % RESORT_STEPS or len(self.rows) < RESORT_STEPS):
            return
        order = [r for r, row in enumerate(self.rows) if row is not None]
        order.sort(key=lambda r: self.rows[r].cached)  # type: ignore[union-attr]
        longest = self.rows[order[-1]].cached  # type: ignore[union-attr]
        self.decoder.select(order, longest)
        spare = 0 if shrink else len(self.rows) - len(order)
        self.rows = [self.rows[r] for r in order] + [None] * spare
