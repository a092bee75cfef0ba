"""From prompts to acceptance: the target answers greedily once, then every draft is simulated over the same answers.

Answers and states are computed once and shared by all drafts, so drafts are compared on equal text. Rounds are exact
(see `decoding.offline`); no draft is decoded for real here. Entry points: `evaluate`, and `tapped` for the states that
a draft reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.decoding.continuous import Completion
from dspine_probe.decoding.offline import Answer, simulate_rounds
from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.acceptance.counts import AcceptanceCounts, RequestCounts, count_rounds
from dspine_probe.experiments.acceptance.table import AcceptanceResult
from dspine_probe.experiments.common.answers import answer_prompts, read_answers, similar_lengths
from dspine_probe.experiments.common.progress import Progress, silent
from dspine_probe.experiments.common.records import draft_record
from dspine_probe.experiments.common.request import Request
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target

WALKS = "walks"


@dataclass(frozen=True)
class TappedAnswer:
    """A prompt, its greedy answer and the states one draft reads."""

    tokens: Int[Tensor, "n"]
    prompt_length: int
    taps: Float[Tensor, "n taps_d_model"]


@dataclass(frozen=True)
class AcceptanceOptions:
    """Acceptance has no sizes of its own; seed: of the bootstrap."""

    seed: int = 0


def run(request: Request, options: AcceptanceOptions) -> AcceptanceResult:
    """Acceptance of a request's drafts on its answers; their states are shared if all drafts read the same taps."""
    taps = {tuple(draft.config.target_layer_ids) for draft in request.drafts.values()}
    return evaluate(
        request.target,
        request.drafts,
        request.prompts,
        max_new_tokens=request.max_new_tokens,
        answers=request.answers,
        states=request.states if len(taps) == 1 else None,
        batch_size=request.batch_size,
        seed=options.seed,
        on_progress=request.on_progress,
    )


def evaluate(
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    answers: Sequence[Completion] | None = None,
    states: Sequence[Answer] | None = None,
    batch_size: int = 16,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> AcceptanceResult:
    """Exact greedy acceptance of drafts on prompts.

    Args:
        target: writes the answers; its fp32 states make the rounds those of real fp32 decoding.
        drafts: by the name they get in the result.
        prompts: one user turn each, with the set they belong to.
        max_new_tokens: most tokens of an answer.
        answers: the target's answers, if they are at hand (`answer_prompts`).
        states: the answers with the taps that every draft reads, if they are at hand (`read_states`).
        batch_size: prompts answered, and answers simulated, side by side.
        seed: of the bootstrap.
        on_progress: called with "answers" or "walks", how many prompts are done, and how many there are.

    Raises:
        UsageError: no draft, no prompt, or a prompt that does not fit the target.
    """
    if not drafts or not prompts:
        raise UsageError(
            f"evaluation was given {len(drafts)} drafts and {len(prompts)} prompts; give one or more of both"
        )
    report, started = on_progress or silent, time.perf_counter()
    if answers is None:
        answers = answer_prompts(
            target, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, on_progress=report
        )
    found: dict[tuple[str, int], RequestCounts] = {}
    by_draft: Iterable[tuple[str, Sequence[Answer]]]
    done = 0
    for part in similar_lengths(answers, batch_size):
        if states is None:
            by_draft = tapped(target, drafts, [answers[i] for i in part])
        else:
            by_draft = ((name, [states[i] for i in part]) for name in drafts)
        for name, rows in by_draft:
            slots = drafts[name].config.num_slots
            for i, rounds in zip(part, simulate_rounds(drafts[name], rows, batch_size=batch_size), strict=True):
                stopped, prompt = answers[i].finish == "stop", prompts[i]
                found[name, i] = count_rounds(name, prompt.set, prompt.id, rounds, stopped=stopped, slots=slots)
        done += len(part)
        report(WALKS, done, len(answers))
    requests = tuple(found[name, i] for name in drafts for i in range(len(prompts)))
    config = {"target": target.name, "dtype": str(target.dtype), "max_new_tokens": max_new_tokens}
    records = {name: draft_record(draft) for name, draft in drafts.items()}
    return AcceptanceResult.of(AcceptanceCounts(requests, seed), config, records, time.perf_counter() - started)


def tapped(
    target: Target, drafts: Mapping[str, Draft], answers: Sequence[Completion]
) -> Iterator[tuple[str, list[TappedAnswer]]]:
    """For each draft the answers with the states it reads, from one pass of the target over all taps in use."""
    taps = sorted({tap for draft in drafts.values() for tap in draft.config.target_layer_ids})
    sequences, states = read_answers(target, answers, taps)
    by_tap = dict(zip(taps, states.taps.split(target.hidden_size, dim=-1), strict=True))
    for name, draft in drafts.items():
        read = torch.cat([by_tap[tap] for tap in draft.config.target_layer_ids], dim=-1)
        rows = zip(sequences, answers, read, strict=True)
        yield (name, [TappedAnswer(tokens, len(a.prompt_ids), row[: len(tokens)]) for tokens, a, row in rows])
