"""What decoding leaves behind: the answer, its rounds, the fate of every slot; and a sequence while it is written.

Nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dspine_probe.decoding.clock import Clock, Timing

Fate = Literal["accepted", "rejected", "unused"]


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

    @property
    def fates(self) -> tuple[Fate, ...]:
        """Of slots 1…T: kept, refused by the target, or behind that or behind the answer's end."""
        tested = min(len(self.committed), len(self.drafted))
        kept: list[Fate] = ["accepted"] * self.accepted
        refused: list[Fate] = ["rejected"] * (tested - self.accepted)
        unused: list[Fate] = ["unused"] * (len(self.drafted) - tested)
        return (*kept, *refused, *unused)


@dataclass(frozen=True)
class Generation:
    """An answer and how it came about; `tokens` ends with the stop id exactly when `finish` is "stop".

    In a batch, `timing` runs until this row was done: rows wait for each other, and these times overlap.
    """

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
        seconds = self.timing.decoding
        return (len(self.tokens) - 1) / seconds if seconds > 0 else float("nan")


@dataclass
class Row:
    """A sequence being written: stops and the length limit are met here, inside a block as behind it."""

    index: int
    prompt: Sequence[int]
    generator: torch.Generator | None
    stops: frozenset[int]
    limit: int
    on_tokens: Callable[[int, tuple[int, ...]], None] | None
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    marks: int = 0  # of the batch's clock, when this row was done

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""
        return self.tokens[-1] in self.stops or len(self.tokens) == self.limit

    def last(self, count: int) -> list[int]:
        """The last tokens of the sequence, the prompt's among them."""
        return [*self.prompt, *self.tokens][-count:]

    def commit(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append tokens up to the first stop id or the limit; what was appended."""
        stop = next((at + 1 for at, token in enumerate(tokens) if token in self.stops), len(tokens))
        added = tuple(tokens[: min(stop, self.limit - len(self.tokens))])
        self.tokens += added
        if self.on_tokens is not None:
            self.on_tokens(self.index, added)
        return added

    def finish_round(self, drafted: Sequence[int], accepted: int, bonus_token: int) -> int:
        """Commit the accepted tokens and the target's own; how many tokens that is."""
        anchor = len(self.prompt) + len(self.tokens) - 1
        added = self.commit([*drafted[:accepted], bonus_token])
        self.rounds.append(Round(anchor, tuple(drafted), min(accepted, len(added)), added))
        return len(added)

    def generation(self, clock: Clock) -> Generation:
        """The finished answer."""
        return Generation(
            prompt_ids=tuple(self.prompt),
            tokens=tuple(self.tokens),
            finish="stop" if self.tokens[-1] in self.stops else "length",
            rounds=tuple(self.rounds),
            timing=clock.timing(self.marks),
        )
