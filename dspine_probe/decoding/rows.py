"""A sequence being written: its tokens and rounds, where it ends, and who is called with them.

Stops and the length limit are met here, inside a block as behind it; nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from dspine_probe.decoding.clock import Clock
from dspine_probe.decoding.generation import Generation, Round


@dataclass
class Row:
    """A sequence being written."""

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
    def stopped(self) -> bool:
        """Whether the answer ends with a stop id."""
        return self.tokens[-1] in self.stops

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""
        return self.stopped or len(self.tokens) == self.limit

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
            finish="stop" if self.stopped else "length",
            rounds=tuple(self.rounds),
            timing=clock.timing(self.marks),
        )
