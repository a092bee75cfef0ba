"""The target's greedy answers to prompts, and its states at them: what every experiment on held-out text starts from.

`answer_prompts` writes the answers, `read_states` runs the target over them once and keeps the states the drafts read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspine_probe.decoding.continuous import Completion, generate_greedy
from dspine_probe.experiments.common.progress import Progress, silent
from dspine_probe.prompts import Prompt, encode_prompt
from dspine_probe.target import Target, TargetStates
from dspine_probe.training.features import Sequence as Answer

ANSWERS, STATES = "answers", "states"


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

    encoded = [encode_prompt(target.encode_chat, prompt) for prompt in prompts]
    return generate_greedy(target, encoded, max_new_tokens=max_new_tokens, batch_size=batch_size, on_complete=count)


def read_states(
    target: Target,
    prompts: Sequence[Prompt],
    answers: Sequence[Completion],
    taps: Sequence[int],
    *,
    batch_size: int = 32,
    on_progress: Progress | None = None,
) -> list[Answer]:
    """Every answer with the target's tapped and final states, in the order of the prompts."""
    report = on_progress or silent
    found: dict[int, Answer] = {}
    for part in similar_lengths(answers, batch_size):
        sequences, states = read_answers(target, [answers[i] for i in part], taps)
        for i, tokens, tapped, final in zip(part, sequences, states.taps, states.final, strict=True):
            length, begins = len(tokens), len(answers[i].prompt_ids)
            found[i] = Answer(prompts[i].id, tokens, begins, tapped[:length].cpu(), final[:length].cpu())
        report(STATES, len(found), len(answers))
    return [found[i] for i in range(len(answers))]


def second_choices(
    target: Target, states: Float[Tensor, "*batch d_model"], tokens: Int[Tensor, "*batch"]
) -> Int[Tensor, "*batch"]:
    """After each of the target's final `states`, the likeliest token that is not the one in `tokens`."""
    scores = target.logits(states.to(target.head))
    scores = scores.scatter(-1, tokens[..., None].to(scores.device), float("-inf"))
    return scores.argmax(dim=-1).to(tokens.device)


def similar_lengths(answers: Sequence[Completion], batch_size: int) -> Iterator[list[int]]:
    """Sequences of similar length together, so that one long prompt does not pad many short ones."""
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].prompt_ids) + len(answers[i].response_ids))
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
