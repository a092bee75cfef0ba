"""What the decoding loop asks of whatever computes: two protocols, and the proposal that passes between them.

`generate` knows rounds, stops and randomness; it never touches a weight. A `TargetEngine` runs forward over tokens at
the end of every row and commits those that are kept; a `DraftEngine` extends its context by the target's tapped states
and proposes blocks. `Engines` opens both; `engines` lists those there are. Nothing random happens in an engine: uniform
numbers are handed in, so a row draws the same whatever its neighbours do.

Rows are sequences in flight, numbered from 0. They may have any lengths; a finished one is dropped by `select`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts import Draft
from dspine_probe.drafts.proposal import Proposal
from dspine_probe.errors import UsageError
from dspine_probe.target import Target

__all__ = ["DraftEngine", "Engines", "Proposal", "TargetEngine", "check_draft"]


class TargetEngine(Protocol):
    """The target with a cache of its own for every row. Scores and tokens stay on its device.

    admits: whether `prefill` may be called while rows are in flight; the new ones are then numbered behind those.
    """

    admits: bool

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "row vocab"]:
        """Run whole prompts into empty rows, one each, and commit them; scores after each prompt's last token.

        `taps` then hold the prompts' states, padded on the right to the longest.
        """

    def forward(self, tokens: Int[Tensor, "row width"]) -> Float[Tensor, "row width vocab"]:
        """Append tokens at every row's own end, provisionally; scores after each of them."""

    def greedy(self, tokens: Int[Tensor, "row width"]) -> Int[Tensor, "row width"]:
        """As `forward`, but only the likeliest token after each (the lowest id of equals); no scores need be formed."""

    @property
    def taps(self) -> Float[Tensor, "row width taps_d_model"]:
        """Tapped states of the last `prefill`, `forward` or `greedy`, side by side in the order asked for."""

    def commit(self, counts: Sequence[int]) -> None:
        """Commit the first `counts[r]` tokens of the last `forward` or `greedy` in row r and forget the others."""

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone (ascending), renumbered from 0; `taps` are void until the next pass."""


class DraftEngine(Protocol):
    """A draft with the context of every row: target states at positions 0…n−1. The anchor then stands at position n."""

    def extend(
        self,
        taps: Float[Tensor, "row width taps_d_model"],
        counts: Sequence[int],
        following: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Append the first `counts[r]` states of `taps[r]` to the context of row r.

        `following` are the tokens after those states, which some drafts read.
        """

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

    def open_target(self, target: Target, *, taps: Sequence[int], rows: int, capacity: int, width: int) -> TargetEngine:
        """An engine for up to `rows` rows of up to `capacity` tokens, provisional ones included.

        Args:
            target: the model.
            taps: layers whose states the draft wants; empty for plain decoding.
            rows: most rows at once.
            capacity: most tokens of a row.
            width: tokens per `forward`: 1 in plain decoding, else the anchor and its block.

        Raises:
            UsageError: this engine cannot run that target.
        """

    def open_draft(self, draft: Draft, *, rows: int, capacity: int, width: int) -> DraftEngine:
        """An engine for blocks of `width` slots, the anchor's included, over up to `capacity` context positions.

        It begins with `rows` rows whose context is empty.

        Raises:
            UsageError: this engine cannot run that draft, or the block is wider than it was trained with.
        """


def check_draft(draft: Draft, width: int) -> None:
    """Refuse blocks that this draft cannot fill.

    Raises:
        UsageError: they have too few or too many slots, or there are more candidates than tokens to propose.
    """
    if width < 2:
        raise UsageError(f"a block of {width} slots drafts nothing; give 2 or more, the anchor's slot included")
    if width > draft.config.block_size:
        raise UsageError(
            f"a block of {width} slots is wider than the {draft.config.block_size} this draft was trained with; "
            "give no more than those"
        )
    if (draft.candidate_count or 0) > len(draft.head):
        raise UsageError(
            f"the draft ranks {draft.candidate_count} candidates a slot but proposes only {len(draft.head)} tokens; "
            f"set top_k of its config to {len(draft.head)} or less"
        )
