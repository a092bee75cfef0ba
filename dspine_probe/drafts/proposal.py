"""What a draft proposes: a token for every slot, and the distribution each was drawn from."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """The distribution a slot's token was drawn from; tokens that are not listed have probability 0.

    ids: token ids, each at most once in a slot (may be an expanded view).
    probs: their probabilities, summing to 1.
    """

    ids: Int[Tensor, "row draft_slot candidate"]
    probs: Float[Tensor, "row draft_slot candidate"]


@dataclass(frozen=True)
class Proposal:
    """Tokens for slots 1…T of every row, and what each was drawn from given the slots before it.

    `q` is None when the tokens were not drawn; they are then verified as having probability 1.
    """

    tokens: Int[Tensor, "row draft_slot"]
    q: Candidates | None = None
