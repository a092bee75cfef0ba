"""Greedy speculative decoding of one sequence, round by round.

A round drafts a block after the last committed token (the anchor) and verifies it in one pass of the target, which
also yields the states the draft's context grows by. The longest prefix that the target would have written itself is
kept, with one token of the target's own behind it, so in fp32 the answer is that of plain greedy decoding, which
runs through the same loop when no draft is given. The prefill gives the first token; rounds are counted after it.
Entry point: `generate`. Batches and sampling are elsewhere or nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from dspine_probe.drafts import Context, Draft
from dspine_probe.errors import UsageError
from dspine_probe.target import Target


@dataclass(frozen=True)
class Round:
    """One draft and its verification.

    anchor: position of the last committed token in the whole sequence.
    drafted: tokens proposed for the positions after it.
    accepted: how many of them were kept.
    committed: tokens this round added. They end with one of the target's own unless the answer ended before it.
    """

    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    committed: tuple[int, ...]


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds spent in the prefill, drafting (context rows included), verifying, and all else."""

    prefill: float
    draft: float
    verify: float
    other: float

    @property
    def total(self) -> float:
        """Seconds from the prompt to the last token."""
        return self.prefill + self.draft + self.verify + self.other


@dataclass(frozen=True)
class Generation:
    """An answer and how it came about; `tokens` ends with the stop id exactly when `finish` is "stop"."""

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    rounds: tuple[Round, ...]
    timing: Timing

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per round; NaN if the prefill already ended the answer."""
        return (len(self.tokens) - 1) / len(self.rounds) if self.rounds else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, per second after the prefill."""
        seconds = self.timing.total - self.timing.prefill
        return (len(self.tokens) - 1) / seconds if seconds > 0 else float("nan")


@torch.inference_mode()
def generate(
    target: Target,
    draft: Draft | None,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    width: int | None = None,
    stop_ids: Sequence[int] | None = None,
) -> Generation:
    """Answer one prompt greedily.

    Args:
        target: the model whose greedy answer is written.
        draft: what proposes tokens; None decodes one token a round.
        prompt_ids: token ids of the prompt.
        max_new_tokens: most tokens of the answer, the stop id included.
        width: slots per block, the anchor's included; by default the width the draft was trained with.
        stop_ids: ids that end the answer; by default the target's.

    Raises:
        UsageError: the prompt is empty or does not fit the context, or the block is wider than trained.
    """
    started = time.perf_counter()
    _check(target, prompt_ids, max_new_tokens, width)
    stops = frozenset(target.stop_ids if stop_ids is None else stop_ids)
    clock = _Clock()
    taps = () if draft is None else tuple(draft.config.target_layer_ids)
    proposer = None if draft is None else _Proposer(draft, width)
    tokens: list[int] = []
    rounds: list[Round] = []
    with target.capture(taps) as caught:
        verifier = _Verifier(target, caught, taps)
        with clock.measure("prefill"):
            tokens += verifier.read(torch.tensor(prompt_ids, device=target.device), last=True)
        while len(tokens) < max_new_tokens and tokens[-1] not in stops:
            anchor = len(prompt_ids) + len(tokens) - 1
            with clock.measure("draft"):
                drafted = (
                    [] if proposer is None else proposer.propose(verifier.new_taps(), tokens[-1], anchor)
                )
            with clock.measure("verify"):
                block = torch.tensor([tokens[-1], *drafted], device=target.device)
                wanted = verifier.read(block)
            matches = _matching(drafted, wanted)
            committed = _until_stop([*drafted[:matches], wanted[matches]], stops)[
                : max_new_tokens - len(tokens)
            ]
            verifier.keep(len(committed), of=len(block))
            tokens += committed
            rounds.append(Round(anchor, tuple(drafted), min(matches, len(committed)), tuple(committed)))
    return Generation(
        prompt_ids=tuple(prompt_ids),
        tokens=tuple(tokens),
        finish="stop" if tokens[-1] in stops else "length",
        rounds=tuple(rounds),
        timing=clock.timing(time.perf_counter() - started),
    )


class _Proposer:
    """The draft with its growing context."""

    def __init__(self, draft: Draft, width: int | None) -> None:
        self.draft, self.width = draft, width
        self.context: Context | None = None

    def propose(self, taps: Float[Tensor, "1 new taps_d_model"], token: int, anchor: int) -> list[int]:
        """Tokens after `token` at position `anchor`; `taps` are the rows committed since the last call."""
        weight = self.draft.fc.weight
        start = 0 if self.context is None else self.context.length
        new = self.draft.encode_context(taps.to(weight.device, weight.dtype), start=start)
        self.context = new if self.context is None else self.context.extend(new)
        at = torch.tensor([[anchor]], device=weight.device)
        block = self.draft.draft_greedy(self.context, torch.full_like(at, token), at, width=self.width)
        return [int(proposed) for proposed in block[0].tolist()]


class _Verifier:
    """The target with its cache of committed rows."""

    def __init__(self, target: Target, caught: dict[int, Tensor], taps: tuple[int, ...]) -> None:
        self.target, self.caught, self.taps = target, caught, taps
        self.cache = DynamicCache(config=target.model.config)
        self.kept = 0

    def read(self, ids: Int[Tensor, "new"], *, last: bool = False) -> list[int]:
        """Append `ids` and return the likeliest token after each of them, or after the last alone."""
        decoder = self.target.model.base_model
        final = decoder(input_ids=ids[None], cache=self.cache, use_cache=True).last_hidden_state[0]
        self.kept = len(ids)
        wanted = self.target.logits(final[-1:] if last else final).argmax(dim=-1)
        return [int(token) for token in wanted.tolist()]

    def keep(self, rows: int, *, of: int) -> None:
        """Forget all but the first `rows` of the last `of` rows read."""
        self.cache.crop(rows - of)
        self.kept = rows

    def new_taps(self) -> Float[Tensor, "1 new taps_d_model"]:
        """Tapped states of the kept rows of the last pass."""
        return torch.cat([self.caught[tap][:, : self.kept] for tap in self.taps], dim=-1)


class _Clock:
    """Seconds by activity. Each ends by fetching tokens, which on a GPU waits for the work to be done."""

    def __init__(self) -> None:
        self.spent = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spent[activity] += time.perf_counter() - started

    def timing(self, total: float) -> Timing:
        return Timing(**self.spent, other=total - sum(self.spent.values()))


def _matching(drafted: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the longest prefix on which the draft says what the target wants."""
    pairs = zip(drafted, wanted, strict=False)
    return next((slot for slot, (token, truth) in enumerate(pairs) if token != truth), len(drafted))


def _until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """The tokens up to and including the first stop id."""
    return next((tokens[: at + 1] for at, token in enumerate(tokens) if token in stops), tokens)


def _check(target: Target, prompt_ids: Sequence[int], max_new_tokens: int, width: int | None) -> None:
    if not prompt_ids:
        raise UsageError("the prompt is empty; give at least one token")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
    if width is not None and width < 2:
        raise UsageError(
            f"a block of {width} slots drafts nothing; give 2 or more, the anchor's slot included"
        )
    if len(prompt_ids) + max_new_tokens > target.max_positions:
        raise UsageError(
            f"the prompt has {len(prompt_ids)} tokens and {max_new_tokens} new ones were asked for, but target "
            f"{target.name!r} holds {target.max_positions}; shorten the prompt or lower max_new_tokens"
        )
