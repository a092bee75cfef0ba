"""Rounds of greedy speculative decoding, read off an answer that is already known.

Under greedy decoding a draft cannot change the answer, only how many rounds it takes. So with the target's greedy
answer and its tapped states at hand, its rounds can be simulated: draft at the anchor, count the leading slots that the
answer confirms, move on by that count plus one. No target pass is needed, and many answers are simulated side by side.
The rounds are those of `generate`, one for one (in exact arithmetic). Entry points: `simulate_rounds`, `Rounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from dspine_probe.decoding.engine import check_draft
from dspine_probe.decoding.requests import token_ids
from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError


class Answer(Protocol):
    """A prompt with the target's greedy answer, and the target's tapped states at every position."""

    @property
    def tokens(self) -> Int[Tensor, "n"]:
        """Token ids, the prompt's first."""

    @property
    def prompt_length(self) -> int:
        """Where the answer begins."""

    @property
    def taps(self) -> Float[Tensor, "n taps_d_model"]:
        """States at the draft's taps, side by side."""


@dataclass(frozen=True)
class Rounds:
    """The rounds of one answer. The prefill gives the first token, so the first anchor is that token.

    anchors: position of the last committed token at the start of each round.
    accepted: drafted tokens each round kept; past the end of the answer nothing can be kept.
    length: tokens of the whole sequence.
    slots: tokens drafted per round.
    """

    anchors: tuple[int, ...]
    accepted: tuple[int, ...]
    length: int
    slots: int

    @property
    def left(self) -> tuple[int, ...]:
        """Tokens of the answer behind each anchor."""
        return tuple(self.length - 1 - anchor for anchor in self.anchors)

    @property
    def committed(self) -> tuple[int, ...]:
        """Tokens each round added: the accepted ones and one of the target's own, unless the answer ended before."""
        return tuple(min(kept + 1, left) for kept, left in zip(self.accepted, self.left, strict=True))


@torch.no_grad()
def simulate_rounds(
    draft: Draft,
    answers: Sequence[Answer],
    *,
    width: int | None = None,
    anchor_override: Sequence[Int[Tensor, "n"]] | None = None,
    batch_size: int = 32,
) -> list[Rounds]:
    """The rounds in which `draft` would have decoded each answer.

    Args:
        draft: any draft; states are cast to its dtype.
        answers: sequences in any order; one without a second answer token has no round.
        width: slots per block, the anchor's included; by default the width the draft was trained with.
        anchor_override: tokens that the draft is given in place of each answer's own when they are anchors, as many
            as the answer has. What is kept and what the context holds stay true, so only the number of rounds changes.
        batch_size: answers simulated side by side.

    Raises:
        UsageError: a token id outside the vocabulary, overrides that do not fit their answers, or a bad width.
    """
    check_draft(draft, draft.config.block_size if width is None else width)
    overrides = [None] * len(answers) if anchor_override is None else anchor_override
    for number, (answer, override) in enumerate(zip(answers, overrides, strict=True)):
        _check_answer(f"answer {number}", answer, override, draft.config.vocab_size)
    by_length = sorted(range(len(answers)), key=lambda i: len(answers[i].tokens) - answers[i].prompt_length)
    found: dict[int, Rounds] = {}
    for start in range(0, len(by_length), batch_size):
        part = by_length[start : start + batch_size]
        anchors = None if anchor_override is None else [anchor_override[i] for i in part]
        simulated = _simulate_batch(draft, [answers[i] for i in part], anchors, width)
        found.update(zip(part, simulated, strict=True))
    return [found[i] for i in range(len(answers))]


def _simulate_batch(
    draft: Draft, answers: Sequence[Answer], anchor_override: Sequence[Tensor] | None, width: int | None
) -> list[Rounds]:
    weight, slots = draft.fc.weight, (width or draft.config.block_size) - 1
    # Behind an answer stands a token that no draft proposes.
    tokens = pad_sequence([answer.tokens.long() for answer in answers], batch_first=True, padding_value=-1)
    tokens = F.pad(tokens, (0, slots), value=-1).to(weight.device)
    seen = tokens
    if anchor_override is not None:
        seen = pad_sequence(list(anchor_override), batch_first=True).to(weight.device)
    taps = pad_sequence([answer.taps for answer in answers], batch_first=True)
    context = draft.encode_context(taps.to(weight.device, weight.dtype), following=tokens[:, 1 : taps.shape[1] + 1])
    last = torch.tensor([len(answer.tokens) - 1 for answer in answers], device=weight.device)
    anchors = torch.tensor([answer.prompt_length for answer in answers], device=weight.device).minimum(last)
    rows = list(range(len(answers)))
    steps: list[list[tuple[int, int]]] = [[] for _ in answers]
    ahead = torch.arange(1, slots + 1, device=weight.device)
    while (live := anchors < last).any():
        if 2 * live.sum() <= len(rows):
            rows = [row for row, alive in zip(rows, live.tolist(), strict=True) if alive]
            context, tokens, seen = context.select(live), tokens[live], seen[live]
            last, anchors, live = last[live], anchors[live], live[live]
        at = anchors[:, None]
        drafted = draft.draft_greedy(context, seen.gather(1, at), at, width=width)
        accepted = (drafted == tokens.gather(1, at + ahead)).long().cumprod(dim=1).sum(dim=1)
        for row, alive, anchor, kept in zip(rows, live.tolist(), anchors.tolist(), accepted.tolist(), strict=True):
            if alive:
                steps[row].append((anchor, kept))
        anchors = (anchors + accepted + 1).minimum(last)
    return [
        Rounds(tuple(a for a, _ in done), tuple(k for _, k in done), len(answer.tokens), slots if done else 0)
        for answer, done in zip(answers, steps, strict=True)
    ]


def _check_answer(name: str, answer: Answer, override: Tensor | None, vocab_size: int) -> None:
    size = len(token_ids(name, answer.tokens, vocab_size))
    given = size if override is None else len(token_ids(f"the override of {name}", override, vocab_size))
    if given != size or len(answer.taps) != size:
        raise UsageError(
            f"{name} has {size} tokens, states at {len(answer.taps)} positions and {given} tokens to stand in as "
            "anchors; give one of each for every position"
        )
