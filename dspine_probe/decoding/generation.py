"""What decoding leaves behind: the answer, its rounds, the fate of every slot, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspine_probe.decoding.clock import Timing

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
