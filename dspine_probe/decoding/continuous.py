"""Continuous batching: the rows in flight, and the queue of prompts that take the place of finished ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.lean import LeanDecoder
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
class Rules:
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


def _ordered(prompts: Sequence[Sequence[int]], batch: int) -> list[int]:
    """Prompt indices sorted by length inside windows, up and down in turn, so that neighbours are alike."""
    window = SORT_WINDOW * batch
    order: list[int] = []
    for turn, start in enumerate(range(0, len(prompts), window)):
        part = range(start, min(start + window, len(prompts)))
        order += sorted(part, key=lambda i: len(prompts[i]), reverse=turn % 2 == 1)
    return order


def common_prefix(prompts: Sequence[Sequence[int]]) -> Sequence[int]:
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


class Batch:
    """The rows in flight and the queue behind them."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        rules: Rules,
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
        self.decoder.share_prefix(common_prefix(prompts))

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
