"""Where drafts are compared: held-out answers of the target, its states, and one list of anchors for every condition.

Every condition of an experiment sees the same blocks in the same order, so any two are paired block by block. States
are kept in fp32. Entry points: `arena_building.build_arena`, `Arena.batches`, `Arena.load`; `contrast.py` turns
numbers per block into estimates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspine_probe.errors import ProbeError, UsageError
from dspine_probe.files import write_atomically
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

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether an arena was saved in `folder`."""
        return (folder / _FILE).is_file()

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
