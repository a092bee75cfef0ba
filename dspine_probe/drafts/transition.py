"""The transition cache: scores of every candidate token given every candidate predecessor, walked left to right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts.proposal import Candidates, Proposal
from dspine_probe.sampling import pick, tempered


@dataclass(frozen=True)
class TransitionCache:
    """Candidate tokens of slots 1…T and S[t, a, b], the score of candidate b of slot t after candidate a of slot t − 1.

    Slot 1 follows the anchor, so all rows a of its table are equal.
    """

    candidates: Int[Tensor, "block draft_slot k"]
    scores: Float[Tensor, "block draft_slot k k"]

    def propose(self, temperature: float, noise: Float[Tensor, "block draft_slot"] | None) -> Proposal:
        """The tokens of a walk, greedy or (with `noise`) drawn."""
        if noise is None:
            return Proposal(self.walk_greedy())
        tokens, probs = self.walk_sampled(temperature, noise)
        return Proposal(tokens, Candidates(self.candidates, probs))

    def walk_greedy(self) -> Int[Tensor, "block draft_slot"]:
        """The best candidate of slot 1, then of each slot given the one before it; ties go to the lower index."""
        blocks, slots, _, _ = self.scores.shape
        every = torch.arange(blocks, device=self.scores.device)
        choice = every.new_zeros(blocks)
        path = []
        for slot in range(slots):
            choice = self.scores[every, slot, choice].argmax(dim=-1)
            path.append(choice)
        return self.candidates.gather(-1, torch.stack(path, dim=1)[..., None]).squeeze(-1)

    def walk_sampled(
        self, temperature: float, noise: Float[Tensor, "block draft_slot"]
    ) -> tuple[Int[Tensor, "block draft_slot"], Float[Tensor, "block draft_slot k"]]:
        """Draw a candidate of slot 1, then of each slot given the one drawn before it.

        Args:
            temperature: above 0.
            noise: a uniform number in [0, 1) for every draw.

        Returns:
            The tokens, and the distribution over its candidates that each of them was drawn from: the softmax of
            its row of the table at `temperature`, exactly the one used.
        """
        blocks, slots, _, _ = self.scores.shape
        every = torch.arange(blocks, device=self.scores.device)
        choice = every.new_zeros(blocks)
        path, given = [], []
        for slot in range(slots):
            given.append(tempered(self.scores[every, slot, choice], temperature))
            choice = pick(given[-1], noise[:, slot])
            path.append(choice)
        tokens = self.candidates.gather(-1, torch.stack(path, dim=1)[..., None]).squeeze(-1)
        return tokens, torch.stack(given, dim=1)
