"""What one pass costs, measured apart from any decoding: the parts from which a speedup is predicted.

speedup = AL · t_step / (t_verify + t_trunk + t_head): a round commits AL tokens and costs one verification and one
draft, where plain decoding pays a step for each token. Nothing but the passes is in the times, so what decoding
loses to bookkeeping shows as measured below predicted. Entry points: `pass_costs`, `PassCosts`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.clock import Clock
from dspine_probe.decoding.engine import Engines, Proposal, TargetEngine
from dspine_probe.decoding.verify import verify_greedy, verify_sampled
from dspine_probe.drafts import Draft
from dspine_probe.sampling import Sampling
from dspine_probe.target import Target

_WARM_UP = 2
_GROWTH = 2  # context rows that a draft takes in before each block


@dataclass(frozen=True)
class PassCosts:
    """Median seconds of each pass of one draft beside its target.

    sampling, rows, context, width: tokens chosen how, rows at once, tokens cached in each, slots of a block.
    step: the target on one token a row, the choice of the next included.
    verify: the target on a whole block, acceptance included.
    trunk, head: the draft's context rows and block; from its last states to tokens.
    """

    draft: str
    sampling: Sampling
    rows: int
    context: int
    width: int
    step: float
    verify: float
    trunk: float
    head: float

    @property
    def round(self) -> float:
        """Seconds of a round without bookkeeping."""
        return self.verify + self.trunk + self.head

    def speedup(self, acceptance_length: float) -> float:
        """How many times faster than plain decoding a draft of that acceptance length decodes."""
        return acceptance_length * self.step / self.round


@torch.inference_mode()
def pass_costs(
    target: Target,
    draft: Draft,
    *,
    name: str,
    sampling: Sampling,
    rows: int,
    context: int,
    engines: Engines,
    repeats: int,
    seed: int = 0,
) -> PassCosts:
    """Time the passes interleaved, so that slow moments of the machine affect all alike.

    Args:
        target: the model.
        draft: what proposes blocks, at the width it was trained with.
        name: of the draft, for the record.
        sampling: how tokens are drawn.
        rows: rows at once.
        context: tokens cached in every row; they are random, since time does not depend on them.
        engines: what computes.
        repeats: timings of each pass.
        seed: of tokens and random numbers.
    """
    width = draft.config.block_size
    generator = torch.Generator().manual_seed(seed)
    capacity = context + width + _GROWTH * (repeats + _WARM_UP)
    prompts = torch.randint(target.vocab_size, (rows, context), generator=generator).tolist()
    plain = engines.open_target(target, taps=(), rows=rows, capacity=capacity, width=1)
    checking = engines.open_target(
        target, taps=draft.config.target_layer_ids, rows=rows, capacity=capacity, width=width
    )
    drafting = engines.open_draft(draft, rows=rows, capacity=capacity, width=width)
    plain.prefill(prompts)
    anchors = checking.prefill(prompts).argmax(dim=-1)
    drafting.extend(checking.taps, [context] * rows, prompts)
    clock = Clock(target.device)
    nothing = Proposal(anchors.new_empty(rows, 0))
    for _ in range(repeats + _WARM_UP):
        noise = torch.rand(rows, 2 * width - 1, generator=generator, dtype=torch.float64).to(target.device)
        clock.mark("between")
        _judge(plain, anchors, nothing, sampling, noise[:, :1])
        clock.mark("step")
        proposal = drafting.propose(
            anchors,
            temperature=sampling.drafting,
            noise=noise[:, : width - 1] if sampling.drafting > 0 else None,
            on_trunk=lambda: clock.mark("trunk"),
        )
        clock.mark("head")
        _judge(checking, anchors, proposal, sampling, noise[:, width - 1 :])
        clock.mark("verify")
        for engine in (plain, checking):
            engine.commit([0] * rows)
        clock.mark("between")
        drafting.extend(checking.taps, [_GROWTH] * rows, [[0] * _GROWTH] * rows)
        clock.mark("context")
    medians = _medians(clock)
    return PassCosts(
        name,
        sampling,
        rows,
        context,
        width,
        step=medians["step"],
        verify=medians["verify"],
        trunk=medians["trunk"] + medians["context"],
        head=medians["head"],
    )


def _judge(
    engine: TargetEngine,
    anchors: Int[Tensor, "row"],
    proposal: Proposal,
    sampling: Sampling,
    noise: Float[Tensor, "row slot"],
) -> None:
    """What the loop does with the target in a round, up to the fetch."""
    block = torch.cat([anchors[:, None], proposal.tokens], dim=1)
    if sampling.greedy:
        verdict = verify_greedy(proposal.tokens, engine.greedy(block))
    else:
        verdict = verify_sampled(proposal, engine.forward(block), sampling, noise)
    torch.stack([verdict.accepted, verdict.bonus_token]).tolist()


def _medians(clock: Clock) -> dict[str, float]:
    """Seconds by part, without the first repeats."""
    laps: dict[str, list[float]] = {}
    for part, seconds in clock.laps():
        laps.setdefault(part, []).append(seconds)
    return {part: statistics.median(found[_WARM_UP:]) for part, found in laps.items()}
