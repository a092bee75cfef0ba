"""Where drafts are compared: held-out answers of the target, its states, and one list of anchors for every condition.

Every condition of an experiment sees the same blocks in the same order, so any two are paired block by block. States
are kept in fp32. `build_arena` makes an arena from prompts,
`Arena.batches` yields its blocks, `kept_arena` keeps one in a folder, under the key of all it depends on (`arena_key`).
`intervals.py` turns numbers per block into estimates.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from dspine_probe.decoding.continuous import Completion
from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.experiments.common.answers import answer_prompts, read_states
from dspine_probe.experiments.common.kept import differing
from dspine_probe.experiments.common.progress import Progress
from dspine_probe.files import write_atomically
from dspine_probe.prompts import Prompt
from dspine_probe.target import Target
from dspine_probe.training.anchors import Batch, make_batch
from dspine_probe.training.features import Sequence as Answer

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
    states: Sequence[Answer] | None = None,
    on_progress: Progress | None = None,
) -> Arena:
    """Let the target answer `prompts` greedily and choose anchors in the answers, uniformly at random.

    Args:
        target: in fp32, so that states do not depend on batching.
        prompts: held out from the training of every draft that will be compared; two or more of each set.
        taps: target layers whose states the drafts read.
        slots: T; answers with fewer than T + 1 tokens have no anchor and are left out (and counted).
        per_answer: most anchors of one answer.
        answers, states: the target's answers, and its states at them (`read_states`), when they are at hand already.
        on_progress: called with (stage, done, total).

    Raises:
        UsageError: no prompts, or a set with fewer than two of them.
    """
    refuse_lonely(prompts)
    if states is None:
        options: dict[str, Any] = {"batch_size": batch_size, "on_progress": on_progress}
        if answers is None:
            answers = answer_prompts(target, prompts, max_new_tokens=max_new_tokens, **options)
        states = read_states(target, prompts, answers, taps, **options)
    generator = derive_generator(seed, "anchors")
    chosen = [_choose(row, slots, per_answer, generator) for row in states]
    kept = [i for i, anchors in enumerate(chosen) if len(anchors)]
    about = {
        "target": target.name,
        "dtype": str(target.dtype),
        "taps": list(taps),
        "max_new_tokens": max_new_tokens,
        "prompts": len(prompts),
        "too_short": len(prompts) - len(kept),
        "blocks": sum(len(chosen[i]) for i in kept),
        "anchors_per_answer": per_answer,
        "seed": seed,
    }
    return Arena(
        tuple(states[i] for i in kept),
        tuple(prompts[i].set for i in kept),
        tuple(chosen[i] for i in kept),
        slots,
        about,
    )


def arena_key(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    taps: Sequence[int],
    slots: int,
    per_answer: int,
    max_new_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Everything an arena depends on; arguments as for `build_arena`."""
    texts = json.dumps([[prompt.id, prompt.set, prompt.text] for prompt in prompts])
    return {
        "target": _weights_key(target),
        "dtype": str(target.dtype),
        "prompts": hashlib.sha256(texts.encode()).hexdigest()[:16],
        "taps": list(taps),
        "slots": slots,
        "anchors": per_answer,
        "longest answer": max_new_tokens,
        "seed": seed,
    }


def kept_arena(folder: Path | None, key: Mapping[str, Any], build: Callable[[], Arena]) -> Arena:
    """The arena kept in `folder` if it has this key; else the one that `build` makes, kept there.

    Raises:
        UsageError: the folder holds an arena with another key; what differs is named.
    """
    if folder is not None and (folder / _FILE).is_file():
        arena = Arena.load(folder)
        changed = differing(arena.about.get("key", {}), key)
        if changed:
            raise UsageError(
                f"the arena in {folder} was made with another {changed}; give --arena another folder, or delete this "
                "one."
            )
        return arena
    built = build()
    built = replace(built, about={**built.about, "key": dict(key)})
    if folder is not None:
        built.save(folder)
    return built


def refuse_lonely(prompts: Sequence[Prompt]) -> None:
    """Refuse a set with a single prompt, which has no interval."""
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        count = sum(prompt.set == name for prompt in prompts)
        if count < 2:
            raise UsageError(
                f"the set {name!r} has {count} prompt; intervals need two or more, so add one or leave the set out."
            )


def _choose(row: Answer, slots: int, most: int, generator: torch.Generator) -> Int[Tensor, "anchor"]:
    places = max(0, len(row) - row.prompt_length - slots)
    return torch.randperm(places, generator=generator)[:most].sort().values + row.prompt_length


def _weights_key(target: Target) -> str:
    """A hash of the name, shape and about 256 values of every parameter, and of what ends an answer."""
    digest = hashlib.sha256(json.dumps(sorted(target.stop_ids)).encode())
    for name, weight in target.model.named_parameters():
        sample = weight.detach().flatten()[:: max(1, weight.numel() // 256)]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]
