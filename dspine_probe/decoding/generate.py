"""Speculative decoding, round by round, for every draft and any number of prompts at once.

A round drafts a block after the last committed token of every row (the anchor) and verifies it in one forward pass of
the target, which also yields the states that extend the draft's context. What the target accepts is committed, with one
token of its own behind it, so the answer is that of plain decoding: token for token if greedy (in fp32), in
distribution if sampled. Without a draft the same loop decodes plainly. The prefill gives the first token; rounds are
counted after it. Nothing here is recorded for gradients: to train on states, run the draft itself (`HookedDraft`).

Entry points: `generate` for one prompt, `generate_batch` for several side by side. The arithmetic is in an engine
(`engine.Engines`), acceptance in `verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

import torch
from jaxtyping import Float
from torch import Tensor

from dspine_probe.decoding.clock import Clock
from dspine_probe.decoding.engine import Engines
from dspine_probe.decoding.generation import Generation, Round, Row
from dspine_probe.decoding.reference import REFERENCE
from dspine_probe.decoding.requests import check, prompts_of
from dspine_probe.decoding.verify import Verdict, target_probs, verify_greedy, verify_sampled
from dspine_probe.drafts import Draft
from dspine_probe.drafts.proposal import Proposal
from dspine_probe.errors import ProbeError
from dspine_probe.sampling import GREEDY, Sampling, pick
from dspine_probe.target import Target

__all__ = ["Generation", "Round", "generate", "generate_batch"]


def generate(
    target: Target,
    draft: Draft | None,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    width: int | None = None,
    stop_ids: Sequence[int] | None = None,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    on_tokens: Callable[[tuple[int, ...]], None] | None = None,
    engines: Engines = REFERENCE,
) -> Generation:
    """Answer one prompt.

    Args:
        target: the model whose answer is written.
        draft: what proposes tokens; None decodes one token a round.
        prompt_ids: token ids of the prompt: a flat list, tensor or array.
        max_new_tokens: most tokens of the answer, the stop id included.
        width: slots per block, the anchor's included; by default the width the draft was trained with.
        stop_ids: ids that end the answer; by default the target's.
        sampling: how tokens are drawn; greedy by default.
        generator: random generator, needed unless greedy.
        on_tokens: called with the tokens of the prefill and of every round as soon as they are final.
        engines: what computes.

    Raises:
        UsageError: the prompt is empty, holds ids that the target lacks or does not fit its context, the block is
            wider than trained, or the engine cannot run these models.
        ProbeError: the GPU ran out of memory; tokens already streamed are no answer.
    """
    stream = None if on_tokens is None else lambda _row, tokens: on_tokens(tokens)
    return generate_batch(
        target,
        draft,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        width=width,
        stop_ids=stop_ids,
        sampling=sampling,
        generators=None if generator is None else [generator],
        on_tokens=stream,
        engines=engines,
    )[0]


@torch.no_grad()
def generate_batch(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    width: int | None = None,
    stop_ids: Sequence[int] | None = None,
    sampling: Sampling = GREEDY,
    generators: Sequence[torch.Generator] | None = None,
    on_tokens: Callable[[int, tuple[int, ...]], None] | None = None,
    engines: Engines = REFERENCE,
) -> list[Generation]:
    """Answer prompts side by side; a finished row leaves the batch. Arguments are those of `generate`, except:

    Args:
        prompts: token ids, of any lengths.
        generators: one per prompt. A row draws a fixed number of values from its own a round, so its answer does not
            depend on its neighbours, up to the rounding of batched arithmetic.
        on_tokens: called with the prompt's index and its new tokens.

    Returns:
        One answer per prompt, in order.
    """
    listed = prompts_of(target, prompts)
    width = check(target, draft, listed, max_new_tokens, width, sampling, generators)
    if not listed:
        return []
    stops = frozenset(target.stop_ids if stop_ids is None else stop_ids)
    rows = [
        Row(index, prompt, generator, stops, max_new_tokens, on_tokens)
        for index, (prompt, generator) in enumerate(zip(listed, generators or repeat(None), strict=False))
    ]
    try:
        batch = _Batch(target, draft, rows, width, sampling, engines)
        batch.run()
        return [row.generation(batch.clock) for row in rows]
    except torch.OutOfMemoryError as error:
        raise ProbeError(
            f"the GPU ran out of memory while decoding {len(listed)} prompts of up to {max(map(len, listed))} "
            f"tokens side by side, with up to {max_new_tokens} new ones; give fewer at once or lower max_new_tokens"
        ) from error


class _Batch:
    """Rows in flight, the engines they share, and the clock."""

    def __init__(
        self, target: Target, draft: Draft | None, rows: Sequence[Row], width: int, sampling: Sampling, engines: Engines
    ) -> None:
        self.device, self.clock = target.device, Clock(target.device)
        self.rows, self.sampling, self.slots = list(rows), sampling, width - 1
        count, capacity = len(rows), max(len(row.prompt) + row.limit for row in rows) + width
        taps = () if draft is None else draft.config.target_layer_ids
        self.target = engines.open_target(target, taps=taps, rows=count, capacity=capacity, width=width)
        self.draft = None
        if draft is not None:
            self.draft = engines.open_draft(draft, rows=count, capacity=capacity, width=width)

    def run(self) -> None:
        """Write every row to its end."""
        scores = self.target.prefill([row.prompt for row in self.rows])
        if self.sampling.greedy:
            self.anchors = scores.max(dim=-1).indices
        else:
            self.anchors = pick(target_probs(scores, self.sampling), self._noise(1)[:, 0])
        first = self.anchors.tolist()
        self.clock.mark("prefill")
        for row, token in zip(self.rows, first, strict=True):
            row.commit([token])
        self._advance([len(row.prompt) for row in self.rows])
        while self.rows:
            self._round()

    def _round(self) -> None:
        noise = None if self.sampling.greedy else self._noise(2 * self.slots + 1)
        proposal = self._propose(None if noise is None else noise[:, : self.slots])
        verdict = self._verify(proposal, None if noise is None else noise[:, self.slots :])
        # One fetch: the round's only wait for the device.
        fetched = [proposal.tokens, verdict.accepted[:, None], verdict.bonus_token[:, None]]
        results = torch.cat(fetched, dim=1).tolist()
        self.clock.mark("verify")
        kept = [
            row.finish_round(drafted, accepted, bonus)
            for row, (*drafted, accepted, bonus) in zip(self.rows, results, strict=True)
        ]
        self.target.commit(kept)
        self.anchors = verdict.bonus_token
        self._advance(kept)

    def _propose(self, noise: Float[Tensor, "row draft_slot"] | None) -> Proposal:
        if self.draft is None:
            return Proposal(self.anchors.new_empty(len(self.rows), 0))
        temperature = self.sampling.drafting
        proposal = self.draft.propose(
            self.anchors,
            temperature=temperature,
            noise=noise if temperature > 0 else None,
            on_trunk=lambda: self.clock.mark("draft"),
        )
        self.clock.mark("head")
        return proposal

    def _verify(self, proposal: Proposal, noise: Float[Tensor, "row slot"] | None) -> Verdict:
        block = torch.cat([self.anchors[:, None], proposal.tokens], dim=1)
        if noise is None:
            return verify_greedy(proposal.tokens, self.target.greedy(block))
        return verify_sampled(proposal, self.target.forward(block), self.sampling, noise)

    def _advance(self, kept: Sequence[int]) -> None:
        """Let finished rows go, and extend the context of the others by the states of their kept tokens."""
        self.clock.mark("bookkeeping")
        alive = [number for number, row in enumerate(self.rows) if not row.done]
        for row in self.rows:
            row.marks = len(self.clock.parts)
        taps = None if self.draft is None else self.target.taps
        if len(alive) < len(self.rows):
            self.rows = [self.rows[number] for number in alive]
            if not alive:
                return
            kept = [kept[number] for number in alive]
            taps = None if taps is None else taps[alive]
            self.anchors = self.anchors[alive]
            self.target.select(alive)
            if self.draft is not None:
                self.draft.select(alive)
            self.clock.mark("bookkeeping")
        if self.draft is not None and taps is not None:
            self.draft.extend(taps, kept, [row.last(count) for row, count in zip(self.rows, kept, strict=True)])
            self.clock.mark("draft")

    def _noise(self, count: int) -> Float[Tensor, "row number"]:
        """Uniform numbers, each row's from its own generator."""
        drawn = []
        for row in self.rows:
            assert row.generator is not None
            drawn.append(torch.rand(count, generator=row.generator, device=row.generator.device, dtype=torch.float64))
        return torch.stack(drawn).to(self.device)
