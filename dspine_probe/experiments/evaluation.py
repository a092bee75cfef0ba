"""From prompts to acceptance: the target answers greedily once, then every draft is walked over the same answers.

Answers and states are computed once and shared by all drafts, so drafts are compared on equal text. Rounds are exact
(see `decoding.offline`); no draft is decoded for real here. Entry points: `evaluate`; or its
halves `answer_prompts` and `accept`, with `tapped` for the states that a draft reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspine_probe.decoding.batch import generate_greedy
from dspine_probe.decoding.continuous import Completion
from dspine_probe.decoding.offline import Answer, walk
from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.acceptance import AcceptanceResult, RequestCounts, measure
from dspine_probe.experiments.progress import Progress, silent
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target, TargetStates

ANSWERS, WALKS = "answers", "walks"


@dataclass(frozen=True)
class TappedAnswer:
    """A prompt, its greedy answer and the states one draft reads."""

    tokens: Int[Tensor, "n"]
    prompt_length: int
    taps: Float[Tensor, "n taps_d_model"]


def evaluate(
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
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
        batch_size: prompts answered, and answers walked, side by side.
        seed: of the bootstrap.
        on_progress: called with "answers" or "walks", how many prompts are done, and how many there are.

    Raises:
        UsageError: no draft, no prompt, or a prompt that does not fit the target.
    """
    report = on_progress or silent
    answers = answer_prompts(
        target, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, on_progress=report
    )
    return accept(
        target,
        drafts,
        prompts,
        answers,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        on_progress=report,
    )


def answer_prompts(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    on_progress: Progress | None = None,
) -> list[Completion]:
    """The target's greedy answers, in the order of the prompts."""
    report, done = on_progress or silent, 0

    def count(_index: int, _completion: Completion) -> None:
        nonlocal done
        done += 1
        report(ANSWERS, done, len(prompts))

    encoded = [target.encode_chat(prompt.text) for prompt in prompts]
    return generate_greedy(
        target, encoded, max_new_tokens=max_new_tokens, batch_size=batch_size, on_complete=count
    )


def accept(
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Prompt],
    answers: Sequence[Completion],
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    seed: int = 0,
    states: Sequence[Answer] | None = None,
    on_progress: Progress | None = None,
) -> AcceptanceResult:
    """Walk every draft over answers already written (`answer_prompts`); arguments as for `evaluate`.

    With `states` (`arena_building.read_states`, with the taps that every draft reads) the target is not run again.
    """
    if not drafts or not prompts:
        raise UsageError(
            f"evaluation was given {len(drafts)} drafts and {len(prompts)} prompts; give one or more of both"
        )
    report = on_progress or silent
    found: dict[tuple[str, int], RequestCounts] = {}
    by_draft: Iterable[tuple[str, Sequence[Answer]]]
    walked = 0
    for part in similar_lengths(answers, batch_size):
        if states is None:
            by_draft = tapped(target, drafts, [answers[i] for i in part])
        else:
            by_draft = ((name, [states[i] for i in part]) for name in drafts)
        for name, rows in by_draft:
            draft = drafts[name]
            for i, rounds in zip(part, walk(draft, rows, batch_size=batch_size), strict=True):
                stopped, slots = answers[i].finish == "stop", draft.config.num_slots
                found[name, i] = measure(
                    name, prompts[i].set, prompts[i].id, rounds, stopped=stopped, slots=slots
                )
        walked += len(part)
        report(WALKS, walked, len(answers))
    requests = tuple(found[name, i] for name in drafts for i in range(len(prompts)))
    config = {
        "target": target.name,
        "dtype": str(target.dtype),
        "max_new_tokens": max_new_tokens,
        "prompts": len(prompts),
        "drafts": {name: draft.config.to_dict() for name, draft in drafts.items()},
    }
    return AcceptanceResult(requests, config, seed)


def similar_lengths(answers: Sequence[Completion], batch_size: int) -> Iterator[list[int]]:
    """Sequences of similar length together, so that one long prompt does not pad many short ones."""
    order = sorted(
        range(len(answers)), key=lambda i: len(answers[i].prompt_ids) + len(answers[i].response_ids)
    )
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def read_answers(
    target: Target, answers: Sequence[Completion], taps: Sequence[int]
) -> tuple[list[Int[Tensor, "n"]], TargetStates]:
    """Tokens of every answer, its prompt's first, and the target's states at them, padded on the right."""
    tokens = [torch.tensor([*answer.prompt_ids, *answer.response_ids]) for answer in answers]
    # Causal attention never looks right, so padding needs no mask.
    padded = pad_sequence(tokens, batch_first=True).to(target.device)
    return tokens, target.hidden_states(padded, taps)


def tapped(
    target: Target, drafts: Mapping[str, Draft], answers: Sequence[Completion]
) -> Iterator[tuple[str, list[TappedAnswer]]]:
    """For each draft the answers with the states it reads, from one pass of the target over all taps in use."""
    taps = sorted({tap for draft in drafts.values() for tap in draft.config.target_layer_ids})
    sequences, states = read_answers(target, answers, taps)
    by_tap = dict(zip(taps, states.taps.split(target.hidden_size, dim=-1), strict=True))
    for name, draft in drafts.items():
        read = torch.cat([by_tap[tap] for tap in draft.config.target_layer_ids], dim=-1)
        yield (
            name,
            [
                TappedAnswer(tokens, len(answer.prompt_ids), row[: len(tokens)])
                for tokens, answer, row in zip(sequences, answers, read, strict=True)
            ],
        )
