"""Where drafts are compared: held-out answers of the target, its states, and one list of anchors for every condition.

Every condition of an experiment sees the same blocks in the same order, so any two are paired block by block. States
are kept in fp32. Entry points: `build_arena`, `Arena.batches`; `contrast.py` turns numbers per block into estimates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.decoding.batch import Completion
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.evaluation import answer_prompts
from dspine_probe.files import write_atomically
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target
from dspine_probe.training.anchors import Batch, make_batch
from dspine_probe.training.features import Sequence as Answer

Progress = Callable[[str, int, int], None]
STATES = "states"
_FILE = "arena.safetensors"


@dataclass(frozen=True)
class Arena:
    """Held-out answers and the blocks drafted on them.

    answers: prompt and greedy answer with the target's tapped and final states at every position.
    sets: the set each answer's prompt belongs to.
    anchors: of each answer, ascending positions inside the response, each with at least `slots` response tokens behind.
    slots: T, labels of every block.
    about: target, limits, counts and seed, for the record of a result.
    """

    answers: tuple[Answer, ...]
    sets: tuple[str, ...]
    anchors: tuple[Int[Tensor, "anchor"], ...]
    slots: int
    about: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.answers:
            raise UsageError("no answer is long enough for a block; give more prompts or longer answers.")

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Answers by length, so that batches pad little."""
        return tuple(sorted(range(len(self.answers)), key=lambda i: len(self.answers[i])))

    @cached_property
    def prompt(self) -> Int[Tensor, "block"]:
        """Which answer each block comes from, in the order of `batches`."""
        return torch.cat([torch.full((len(self.anchors[i]),), i) for i in self.order])

    @cached_property
    def set_names(self) -> tuple[str, ...]:
        """Names of the sets, in order of first appearance."""
        return tuple(dict.fromkeys(self.sets))

    @cached_property
    def set_index(self) -> Int[Tensor, "block"]:
        """Which set each block belongs to, in the order of `batches`."""
        return torch.tensor([self.set_names.index(name) for name in self.sets])[self.prompt]

    def batches(self, *, answers_per_batch: int = 8) -> Iterator[Batch]:
        """All blocks, sequence by sequence; rows with `batch.real` false fill up short answers and are not counted."""
        for start in range(0, len(self.order), answers_per_batch):
            part = self.order[start : start + answers_per_batch]
            yield make_batch(
                [self.answers[i] for i in part],
                [self.anchors[i] for i in part],
                block_size=self.slots + 1,
                gamma=math.inf,
                anchors_per_sequence=max(len(self.anchors[i]) for i in part),
            )

    def save(self, folder: Path) -> None:
        """Write `arena.safetensors` into `folder`."""
        tensors = {
            "tokens": torch.cat([a.tokens for a in self.answers]),
            "taps": torch.cat([a.taps for a in self.answers]),
            "final": torch.cat([a.final for a in self.answers]),
            "lengths": torch.tensor([len(a) for a in self.answers]),
            "prompt_lengths": torch.tensor([a.prompt_length for a in self.answers]),
            "anchors": torch.cat(self.anchors),
            "anchor_counts": torch.tensor([len(a) for a in self.anchors]),
        }
        ids = [answer.id for answer in self.answers]
        record = {"ids": ids, "sets": self.sets, "slots": self.slots, "about": dict(self.about)}
        metadata = {"arena": json.dumps(record)}
        write_atomically(folder / _FILE, lambda path: save_file(tensors, path, metadata))

    @classmethod
    def load(cls, folder: Path) -> Arena:
        """Read back what `save` wrote.

        Raises:
            UsageError: there is no arena in the folder.
            ProbeError: the file is damaged.
        """
        path = folder / _FILE
        if not path.is_file():
            raise UsageError(f"{path} was not found; build an arena and save it there.")
        try:
            with safe_open(path, "pt") as file:
                record = json.loads(file.metadata()["arena"])
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise ProbeError(f"{path} cannot be read ({error}); build the arena again.") from error
        lengths = found["lengths"].tolist()
        rows = zip(
            record["ids"],
            found["tokens"].split(lengths),
            found["prompt_lengths"].tolist(),
            found["taps"].split(lengths),
            found["final"].split(lengths),
            strict=True,
        )
        return cls(
            tuple(Answer(*row) for row in rows),
            tuple(record["sets"]),
            found["anchors"].split(found["anchor_counts"].tolist()),
            record["slots"],
            record["about"],
        )


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
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        count = sum(prompt.set == name for prompt in prompts)
        if count < 2:
            raise UsageError(
                f"the set {name!r} has {count} prompt; intervals need two or more, so add one or leave the set out."
            )
    report = on_progress or _silent
    if answers is None:
        answers = answer_prompts(
            target, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, on_progress=report
        )
    generator = derive_generator(seed, "anchors")
    chosen = [_choose(a, slots, per_answer, generator) for a in answers]
    kept = [i for i, anchors in enumerate(chosen) if len(anchors)]
    states = _states(target, [answers[i] for i in kept], taps, batch_size, report)
    about = {
        "target": target.name,
        "dtype": str(target.dtype),
        "taps": list(taps),
        "prompts": len(prompts),
        "too_short": len(prompts) - len(kept),
        "blocks": sum(len(chosen[i]) for i in kept),
        "anchors_per_answer": per_answer,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    found = tuple(
        Answer(prompts[i].id, tokens, len(answers[i].prompt_ids), tapped, final)
        for i, (tokens, tapped, final) in zip(kept, states, strict=True)
    )
    return Arena(found, tuple(prompts[i].set for i in kept), tuple(chosen[i] for i in kept), slots, about)


def _choose(answer: Completion, slots: int, most: int, generator: torch.Generator) -> Int[Tensor, "anchor"]:
    places = max(0, len(answer.response_ids) - slots)
    chosen = torch.randperm(places, generator=generator)[:most].sort().values
    return chosen + len(answer.prompt_ids)


def _states(
    target: Target, answers: Sequence[Completion], taps: Sequence[int], batch_size: int, report: Progress
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, tapped states and final states of every answer."""
    tokens = [torch.tensor([*answer.prompt_ids, *answer.response_ids]) for answer in answers]
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        # Causal attention never looks right, so padding needs no mask.
        padded = pad_sequence([tokens[i] for i in part], batch_first=True).to(target.device)
        states = target.hidden_states(padded, taps)
        for row, i in enumerate(part):
            length = len(tokens[i])
            found[i] = (tokens[i], states.taps[row, :length].cpu(), states.final[row, :length].cpu())
        report(STATES, len(found), len(order))
    return [found[i] for i in range(len(tokens))]


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass
