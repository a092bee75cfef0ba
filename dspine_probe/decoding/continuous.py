"""Continuous batching: many prompts through few rows, a finished row's place taken by the next prompt.

`generate_greedy` writes the completion of every prompt at T = 0, `generate_sampled` draws one; corpora are made with
them. No draft takes part: with many rows a target has no arithmetic to spare for tokens that may be refused. In fp32
the greedy tokens are those of plain greedy decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.engine import Engines, TargetEngine
from dspine_probe.decoding.fast_cpu import FastCpu
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.decoding.requests import check, prompts_of
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

ABANDON_STEPS = 32


@dataclass(frozen=True)
class Completion:
    """One answered prompt.

    `response_ids` ends with the stop id exactly when `finish` is "stop"; "abandoned" ones were given up early.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finish: Literal["stop", "length", "abandoned"]


def generate_greedy(
    target: Target,
    prompts: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    on_complete: Callable[[int, Completion], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    abandon: Callable[[Sequence[int]], bool] | None = None,
    engines: Engines | None = None,
) -> list[Completion]:
    """Complete every prompt greedily until a stop id or `max_new_tokens`.

    Args:
        target: the model.
        prompts: token ids, one non-empty sequence per prompt.
        max_new_tokens: most response tokens per prompt, the stop id included.
        batch_size: most rows in flight.
        on_complete: called with a prompt's index and completion as soon as it is finished, in no fixed order.
        should_stop: asked before new prompts are started; once true, running rows are finished and the rest is left.
        abandon: asked every 32 tokens whether a response is not worth finishing.
        engines: what computes; by default the fast engine in the target's dtype where it takes the target.

    Returns:
        The completions in the order of `prompts`, without those never started.

    Raises:
        UsageError: a prompt is empty or does not fit the context.
    """

    listed = prompts_of(target, prompts)
    return _Queue(target, listed, max_new_tokens, batch_size, abandon, engines, None, on_complete, should_stop).run()


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
    abandon: Callable[[Sequence[int]], bool] | None = None,
    engines: Engines | None = None,
) -> list[Completion]:
    """As `generate_greedy`, but every token is drawn from the nucleus of mass `top_p` among the `top_k` likeliest."""
    if temperature <= 0 or not 0 < top_p <= 1 or top_k < 1:
        raise UsageError(
            f"sampling was given temperature {temperature}, top_p {top_p}, top_k {top_k}; use temperature > 0, "
            "0 < top_p <= 1 and top_k >= 1, or generate_greedy for temperature 0"
        )

    def choose(scores: Float[Tensor, "row vocab"]) -> Int[Tensor, "row"]:
        return sample_nucleus(scores, generator, temperature=temperature, top_p=top_p, top_k=top_k)

    return _Queue(target, prompts_of(target, prompts), max_new_tokens, batch_size, abandon, engines, choose).run()


def sample_nucleus(
    logits: Float[Tensor, "row vocab"], generator: torch.Generator, *, temperature: float, top_p: float, top_k: int
) -> Int[Tensor, "row"]:
    """Draw one token per row from the smallest set of the `top_k` likeliest tokens that holds mass `top_p`."""
    best, ids = logits.float().div(temperature).topk(min(top_k, logits.shape[-1]), dim=-1)
    p = best.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    return ids.gather(1, torch.multinomial(p, 1, generator=generator))[:, 0]


@dataclass
class _Flight:
    """A prompt being answered."""

    index: int
    response: list[int] = field(default_factory=list)


@dataclass
class _Queue:
    """Prompts that wait, those in flight, and the completions of the rest; without `choose` the likeliest tokens."""

    target: Target
    prompts: list[list[int]]
    limit: int
    rows: int
    abandon: Callable[[Sequence[int]], bool] | None
    engines: Engines | None
    choose: Callable[[Float[Tensor, "row vocab"]], Int[Tensor, "row"]] | None
    on_complete: Callable[[int, Completion], None] | None = None
    should_stop: Callable[[], bool] | None = None
    done: dict[int, Completion] = field(default_factory=dict)

    @torch.inference_mode()
    def run(self) -> list[Completion]:
        """Answer all prompts, at most `rows` at once."""
        if self.rows < 1:
            raise UsageError(f"batch_size is {self.rows}; give 1 or more")
        check(self.target, None, self.prompts, self.limit)
        if not self.prompts:
            return []
        waiting, flights = deque(range(len(self.prompts))), list[_Flight]()
        rows = min(self.rows, len(self.prompts))
        engine = self._open(rows)
        while True:
            if self.should_stop is not None and self.should_stop():
                waiting.clear()
            if waiting and len(flights) < (rows if engine.admits else 1):
                new = [_Flight(waiting.popleft()) for _ in range(min(rows - len(flights), len(waiting)))]
                flights += new
                scores = engine.prefill([self.prompts[flight.index] for flight in new])
                chosen = self.choose(scores) if self.choose else scores.max(dim=-1).indices
            elif flights:
                new = flights
                last = torch.tensor([[flight.response[-1]] for flight in flights], device=self.target.device)
                chosen = self.choose(engine.forward(last)[:, 0]) if self.choose else engine.greedy(last)[:, 0]
                engine.commit([1] * len(flights))
            else:
                return [self.done[index] for index in sorted(self.done)]
            for flight, token in zip(new, chosen.tolist(), strict=True):
                flight.response.append(token)
            left = [row for row, flight in enumerate(flights) if not self._finished(flight)]
            if len(left) < len(flights):
                flights = [flights[row] for row in left]
                engine.select(left)

    def _open(self, rows: int) -> TargetEngine:
        sizes = {"rows": rows, "capacity": max(map(len, self.prompts)) + self.limit, "width": 1}
        if self.engines is not None:
            return self.engines.open_target(self.target, taps=(), **sizes)
        try:
            fast = FastCpu(self.target.dtype) if self.target.device.type == "cpu" else REFERENCE
            return fast.open_target(self.target, taps=(), **sizes)
        except UsageError:
            return REFERENCE.open_target(self.target, taps=(), **sizes)

    def _finished(self, flight: _Flight) -> bool:
        response = flight.response
        if response[-1] in self.target.stop_ids:
            finish: Literal["stop", "length", "abandoned"] = "stop"
        elif len(response) == self.limit:
            finish = "length"
        elif self.abandon is not None and len(response) % ABANDON_STEPS == 0 and self.abandon(response):
            finish = "abandoned"
        else:
            return False
        completion = Completion(tuple(self.prompts[flight.index]), tuple(response), finish)
        self.done[flight.index] = completion
        if self.on_complete is not None:
            self.on_complete(flight.index, completion)
        return True
