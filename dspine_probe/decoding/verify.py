"""Verification of drafted blocks: which proposals are accepted, and the target's own token behind them.

Greedy: a proposal is accepted while it is the token the target would have written. Sampled: a proposal d drawn from q
is accepted with probability min(1, p(d) / q(d)); the first that is rejected is replaced by a draw from the residual
distribution max(p − q, 0), and behind a whole block the target draws freely, so that every token comes with exactly the
target's probability whatever the draft (speculative sampling, arXiv 2211.17192). Deterministic proposals have q = 1.
Entry points: `verify_greedy`, `verify_sampled`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.drafts.proposal import Candidates, Proposal
from dspine_probe.sampling import Sampling, nucleus, pick, tempered


@dataclass(frozen=True)
class Verdict:
    """Per row, how many leading proposals are accepted, and the token that the target puts behind them."""

    accepted: Int[Tensor, "row"]
    bonus_token: Int[Tensor, "row"]


def verify_greedy(drafted: Int[Tensor, "row draft_slot"], wanted: Int[Tensor, "row slot"]) -> Verdict:
    """Compare proposals with the target's likeliest token after the anchor and after every slot."""
    accepted = _leading(drafted == wanted[:, :-1])
    return Verdict(accepted, wanted.gather(1, accepted[:, None])[:, 0])


def verify_sampled(
    proposal: Proposal, scores: Float[Tensor, "row slot vocab"], sampling: Sampling, noise: Float[Tensor, "row slot"]
) -> Verdict:
    """Lossless rejection sampling.

    Args:
        proposal: tokens of slots 1…T with the distributions they were drawn from.
        scores: the target's, after the anchor and after every slot, so T + 1 a row; without slots this draws a token.
        sampling: temperature above 0 and nucleus of the target.
        noise: uniform numbers in [0, 1), independent of the draft's; one for every slot's test, one for the draw.
    """
    p = target_probs(scores, sampling)
    q = proposal.q or _certain(proposal.tokens)
    wanted = p[:, :-1].gather(-1, proposal.tokens[..., None]).squeeze(-1)
    proposed = (q.probs * (q.ids == proposal.tokens[..., None])).sum(dim=-1)
    # Strict: a token that the target never writes is rejected even at noise 0.
    accepted = _leading(noise[:, :-1].to(p.device) * proposed < wanted)
    at = p[torch.arange(len(p), device=p.device), accepted]
    return Verdict(accepted, pick(residual_probs(at, q, accepted), noise[:, -1]))


def target_probs(scores: Float[Tensor, "*rows vocab"], sampling: Sampling) -> Float[Tensor, "*rows vocab"]:
    """What the target draws its tokens from."""
    return nucleus(tempered(scores, sampling.temperature), sampling.top_p)


def residual_probs(
    p: Float[Tensor, "row vocab"], q: Candidates, accepted: Int[Tensor, "row"]
) -> Float[Tensor, "row vocab"]:
    """max(p − q, 0), up to a factor, where a slot was rejected; p behind a block that is accepted as a whole."""
    slots = q.ids.shape[1]
    if not slots:
        return p
    every, slot = torch.arange(len(p), device=p.device), accepted.clamp(max=slots - 1)
    covered = q.probs[every, slot].to(p.dtype) * (accepted < slots)[:, None]
    rest = p.scatter_add(-1, q.ids[every, slot], -covered).clamp(min=0)
    # With p = q no slot is rejected in exact arithmetic; where rounding rejects one, nothing is left but p.
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)


def _certain(tokens: Int[Tensor, "row draft_slot"]) -> Candidates:
    """The distribution of deterministic proposals."""
    ids = tokens[..., None]
    return Candidates(ids, torch.ones_like(ids, dtype=torch.float32))


def _leading(kept: Tensor) -> Int[Tensor, "row"]:
    return kept.long().cumprod(dim=1).sum(dim=1)
