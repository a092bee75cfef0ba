"""What the decoding loop asks of whatever computes: two protocols, and the proposal that passes between them.

`generate` knows rounds, stops and randomness; it never touches a weight. A `TargetEngine` reads tokens at the end of
every row and takes back what was not kept; a `DraftEngine` grows its context by the target's tapped states and proposes
blocks. `Engines` opens both: `reference.REFERENCE` for any device and dtype, and faster ones beside it. Nothing random
happens in an engine: uniform numbers are handed in, so a row draws the same whatever its neighbours do.

Rows are sequences in flight, numbered from 0. They may have any lengths; a finished one is dropped by `select`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.target import Target


@dataclass(frozen=True)
class Candidates:
    """The distribution a slot's token was drawn from; a token that is not listed had no chance.

    ids: token ids, each at most once in a slot (may be an expanded view).
    probs: their probabilities, summing to 1.
    """

    ids: Int[Tensor, "row draft_slot candidate"]
    probs: Float[Tensor, "row draft_slot candidate"]


@dataclass(frozen=True)
class Proposal:
    """Tokens for slots 1…T of every row, and what each was drawn from given the slots before it.

    `q` is None when the draft chose its tokens without chance: they are then verified as certain.
    """

    tokens: Int[Tensor, "row draft_slot"]
    q: Candidates | None = None


class TargetEngine(Protocol):
    """The target with a cache of its own for every row. Scores and tokens stay on its device."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "row vocab"]:
        """Read whole prompts into empty rows, one each, and keep them; scores after each prompt's last token.

        `taps` then hold the prompts' states, padded on the right to the longest.
        """

    def read(self, tokens: Int[Tensor, "row width"]) -> Float[Tensor, "row width vocab"]:
        """Append tokens at every row's own end, provisionally; scores after each of them."""

    def greedy(self, tokens: Int[Tensor, "row width"]) -> Int[Tensor, "row width"]:
        """As `read`, but only the likeliest token after each (the lowest id of equals); scores need not be formed."""

    @property
    def taps(self) -> Float[Tensor, "row width taps_d_model"]:
        """Tapped states of the tokens of the last `start`, `read` or `greedy`, side by side in the order asked for."""

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[r]` tokens of the last `read` or `greedy` in row r and forget those behind them."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone (ascending), renumbered from 0; `taps` are void until the next pass."""


class DraftEngine(Protocol):
    """A draft with the context of every row: target states at positions 0…n−1. The anchor then stands at position n."""

    def extend(self, taps: Float[Tensor, "row width taps_d_model"], counts: Sequence[int]) -> None:
        """Append the first `counts[r]` states of `taps[r]` to the context of row r."""

    def propose(
        self,
        anchor_tokens: Int[Tensor, "row"],
        *,
        temperature: float = 1.0,
        noise: Float[Tensor, "row draft_slot"] | None = None,
        on_trunk: Callable[[], None] | None = None,
    ) -> Proposal:
        """One block after each row's anchor.

        Args:
            anchor_tokens: the last committed token of every row, on the engine's device.
            temperature: above 0, of the distributions that tokens are drawn from.
            noise: uniform numbers in [0, 1), one per slot; None takes the likeliest tokens and gives no `q`.
            on_trunk: called once between the block's pass and its head, for timing.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone (ascending), renumbered from 0."""


class Engines(Protocol):
    """Opens engines with fresh caches; what is costly to prepare (packed weights, graphs) is kept between calls."""

    @property
    def about(self) -> dict[str, Any]:
        """What computes, for the record of a measurement."""

    def open_target(
        self, target: Target, *, taps: Sequence[int], rows: int, capacity: int, width: int
    ) -> TargetEngine:
        """An engine for up to `rows` rows of up to `capacity` tokens, provisional ones included.

        Args:
            target: the model.
            taps: layers whose states the draft wants; empty for plain decoding.
            rows: most rows at once.
            capacity: most tokens of a row.
            width: tokens per `read`: 1 in plain decoding, else the anchor and its block.

        Raises:
            UsageError: this engine cannot run that target.
        """

    def open_draft(self, draft: Draft, *, rows: int, capacity: int, width: int) -> DraftEngine:
        """An engine for blocks of `width` slots, the anchor's included, over up to `capacity` context positions.

        Raises:
            UsageError: this engine cannot run that draft, or the block is wider than it was trained with.
        """
