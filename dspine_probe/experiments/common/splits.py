"""Prompt-wise splits: everything that stems from one prompt is on one side.

A split by token lets a reader recognise the prompt and manufactures accuracy out of nothing, so tokens are never split.
Entry point: `split_prompts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dspine_probe.errors import UsageError

_TRAIN, _VALIDATION, _TEST, _UNUSED = range(4)
ONE_SET = "all"


class HasPrompt(Protocol):
    """A sequence that says where its prompt ends."""

    @property
    def tokens(self) -> Int[Tensor, "n"]: ...

    @property
    def prompt_length(self) -> int: ...


@dataclass(frozen=True)
class Split:
    """For every sequence: its part, its group (what was kept together) and its set, as indices."""

    part: Int[Tensor, "sequence"]
    group: Int[Tensor, "sequence"]
    set: Int[Tensor, "sequence"]
    set_names: tuple[str, ...]

    def train(self, sequence: Int[Tensor, "row"]) -> Bool[Tensor, "row"]:
        """Which of these sequences readers are trained on."""
        return self.part[sequence] == _TRAIN

    def validation(self, sequence: Int[Tensor, "row"]) -> Bool[Tensor, "row"]:
        """Which of these sequences choices are made on."""
        return self.part[sequence] == _VALIDATION

    def test(self, sequence: Int[Tensor, "row"]) -> Bool[Tensor, "row"]:
        """Which of these sequences are reported on."""
        return self.part[sequence] == _TEST

    def summary(self) -> dict[str, Any]:
        """Prompts in every part, and test prompts in every set."""
        sizes = {
            name: len(self.group[self.part == part].unique())
            for name, part in (("train_prompts", _TRAIN), ("validation_prompts", _VALIDATION), ("test_prompts", _TEST))
        }
        tested = self.part == _TEST
        sets = {
            name: len(self.group[tested & (self.set == index)].unique()) for index, name in enumerate(self.set_names)
        }
        return sizes | {"test_prompts_by_set": sets}


def split_prompts(
    sequences: Sequence[HasPrompt],
    *,
    usable: Sequence[int],
    sets: Sequence[str] | None,
    groups: Sequence[str] | None,
    train_share: float,
    validation_share: float,
    generator: torch.Generator,
) -> Split:
    """Assign whole groups to training, validation and test, in the same shares within every set.

    Args:
        sequences: all sequences; only those whose index is in `usable` take part.
        sets: name of each sequence's set; one set by default. The first sequence of a group decides for the group.
        groups: name of each sequence's group; by default sequences with the same prompt tokens form one.

    Raises:
        UsageError: the shares leave nothing to test on, a list has the wrong length, or a set has under three groups.
    """
    if min(train_share, validation_share) <= 0 or train_share + validation_share >= 1:
        raise UsageError(
            f"shares {train_share} and {validation_share} must be above 0 and leave some prompts to test on."
        )
    names = groups or [str(s.tokens[: s.prompt_length].tolist()) for s in sequences]
    of_set = sets or [ONE_SET] * len(sequences)
    if not len(names) == len(of_set) == len(sequences):
        raise UsageError(
            f"{len(sequences)} sequences came with {len(of_set)} sets and {len(names)} groups; give one each."
        )
    group_ids = {name: index for index, name in enumerate(dict.fromkeys(names))}
    set_names = tuple(dict.fromkeys(of_set))
    group = torch.tensor([group_ids[name] for name in names])
    set_of_group: dict[int, str] = {}
    for index in usable:
        set_of_group.setdefault(int(group[index]), of_set[index])
    part_of_group = torch.full((len(group_ids),), _UNUSED)
    for name in set_names:
        members = torch.tensor([g for g, owner in set_of_group.items() if owner == name], dtype=torch.long)
        part_of_group[members] = _parts(len(members), name, train_share, validation_share, generator)
    used = torch.zeros(len(sequences), dtype=torch.bool)
    used[list(usable)] = True
    part = torch.where(used, part_of_group[group], _UNUSED)
    set_index = torch.tensor([set_names.index(set_of_group.get(int(g), of_set[i])) for i, g in enumerate(group)])
    return Split(part, group, set_index, set_names)


def part_sizes(count: int, train_share: float, validation_share: float) -> tuple[int, int, int]:
    """How many of a set's `count` groups, three or more, are trained, validated and tested on."""
    validation = max(1, round(validation_share * count))
    train = min(max(1, round(train_share * count)), count - validation - 1)
    return train, validation, count - train - validation


def _parts(
    count: int, name: str, train_share: float, validation_share: float, generator: torch.Generator
) -> Int[Tensor, "group"]:
    if count < 3:
        raise UsageError(f"the set {name!r} has {count} prompts with a response long enough; three are the least.")
    train, validation, _ = part_sizes(count, train_share, validation_share)
    ordered = torch.full((count,), _TEST)
    ordered[:train] = _TRAIN
    ordered[train : train + validation] = _VALIDATION
    parts = torch.empty_like(ordered)
    parts[torch.randperm(count, generator=generator)] = ordered
    return parts
