"""Making an arena: the target answers prompts, its states are read, and anchors are drawn.

`build_arena` does all of it. Who has answers or states already uses its parts: `read_states`, `choose_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.decoding.continuous import Completion
from dspine_probe.errors import UsageError
from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.evaluation import answer_prompts, read_answers, similar_lengths
from dspine_probe.experiments.progress import Progress, silent
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target
from dspine_probe.training.features import Sequence as Answer

STATES = "states"


def build_arena(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    taps: Sequence[int],
    slots: int = 7,
    per_answer: int = 8,
    max_new_tokens: int = 256,
    batch_size: int = 32,
    seed: int = 0,
    answers: Sequence[Completion] | None = None,
    on_progress: Progress | None = None,
) -> Arena:
    """Let the target answer `prompts` greedily and choose anchors in the answers, uniformly at random.

    Args:
        target: in fp32, so that states do not depend on batching.
        prompts: held out from the training of every draft that will be compared; two or more of each set.
        taps: target blocks whose states the drafts read.
        slots: T; answers with fewer than T + 1 tokens have no anchor and are left out (and counted).
        per_answer: most anchors of one answer.
        answers: the target's answers, when they are at hand already.
        on_progress: called with (stage, done, total).

    Raises:
        UsageError: no prompts, or a set with fewer than two of them.
    """
    refuse_lonely(prompts)
    report = on_progress or silent
    if answers is None:
        answers = answer_prompts(
            target, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, on_progress=report
        )
    rows = read_states(target, prompts, answers, taps, batch_size=batch_size, on_progress=report)
    about = {
        "target": target.name,
        "dtype": str(target.dtype),
        "taps": list(taps),
        "max_new_tokens": max_new_tokens,
    }
    return choose_blocks(rows, prompts, slots=slots, per_answer=per_answer, seed=seed, about=about)


def refuse_lonely(prompts: Sequence[Prompt]) -> None:
    """Refuse a set with a single prompt, which has no interval."""
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        count = sum(prompt.set == name for prompt in prompts)
        if count < 2:
            raise UsageError(
                f"the set {name!r} has {count} prompt; intervals need two or more, so add one or leave the set out."
            )


def choose_blocks(
    rows: Sequence[Answer],
    prompts: Sequence[Prompt],
    *,
    slots: int,
    per_answer: int,
    seed: int,
    about: Mapping[str, Any],
) -> Arena:
    """The arena of answers whose states were read already (`read_states`), one a prompt."""
    refuse_lonely(prompts)
    generator = derive_generator(seed, "anchors")
    chosen = [_choose(row, slots, per_answer, generator) for row in rows]
    kept = [i for i, anchors in enumerate(chosen) if len(anchors)]
    counts = {
        "prompts": len(prompts),
        "too_short": len(prompts) - len(kept),
        "blocks": sum(len(chosen[i]) for i in kept),
        "anchors_per_answer": per_answer,
        "seed": seed,
    }
    return Arena(
        tuple(rows[i] for i in kept),
        tuple(prompts[i].set for i in kept),
        tuple(chosen[i] for i in kept),
        slots,
        {**about, **counts},
    )


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


def _choose(row: Answer, slots: int, most: int, generator: torch.Generator) -> Int[Tensor, "anchor"]:
    places = max(0, len(row) - row.prompt_length - slots)
    return torch.randperm(places, generator=generator)[:most].sort().values + row.prompt_length
