"""What a draft proposes: a token for every slot, and the distribution each was drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts.borrowed import Borrowed
from dspine_probe.sampling import pick, tempered


@dataclass(frozen=True)
class Candidates:
    """The distribution a slot's token was drawn from; tokens that are not listed have probability 0.

    ids: token ids, each at most once in a slot (may be an expanded view).
    probs: their probabilities, summing to 1.
    """

    ids: Int[Tensor, "row draft_slot candidate"]
    probs: Float[Tensor, "row draft_slot candidate"]

    @classmethod
    def all_of(cls, draft: Borrowed, probs: Float[Tensor, "row draft_slot draft_vocab"]) -> Candidates:
        """Every token that the draft may propose."""
        every = draft.to_tokens(torch.arange(probs.shape[-1], device=probs.device))
        return cls(every.expand_as(probs), probs)


@dataclass(frozen=True)
class Proposal:
    """Tokens for slots 1…T of every row, and what each was drawn from given the slots before it.

    `q` is None when the tokens were not drawn; they are then verified as having probability 1.
    """

    tokens: Int[Tensor, "row draft_slot"]
    q: Candidates | None = None


def propose_serially(
    draft: Borrowed,
    anchor_tokens: Int[Tensor, "row"],
    slots: int,
    score: Callable[[int, Int[Tensor, "row"]], Float[Tensor, "row draft_vocab"]],
    *,
    temperature: float = 1.0,
    noise: Float[Tensor, "row draft_slot"] | None = None,
) -> Proposal:
    """One token after another, the likeliest or (with `noise`) drawn, each from the scores given the one before it.

    `score(k, token)` are the scores of proposal k (0…slots − 1) after `token`: the anchor, then the proposal before it.
    """
    token, tokens, given = anchor_tokens, [], []
    for slot in range(slots):
        scores = score(slot, token)
        if noise is None:
            index = scores.argmax(dim=-1)
        else:
            given.append(tempered(scores, temperature))
            index = pick(given[-1], noise[:, slot])
        token = draft.to_tokens(index)
        tokens.append(token)
    path = torch.stack(tokens, dim=1)
    return Proposal(path, Candidates.all_of(draft, torch.stack(given, dim=1)) if given else None)
