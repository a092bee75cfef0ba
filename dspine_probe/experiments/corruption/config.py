"""What is corrupted how: the settings of the corruption experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from dspine_probe.drafts import Draft
from dspine_probe.errors import UsageError
from dspine_probe.experiments.common.request import option
from dspine_probe.experiments.corruption.replacements import FREQUENCY, KINDS, RANK_2, ZERO

EARLIER, FARTHEST = (2, 3), 3
"""Distances from the successor that are compared with the predecessor's, and the largest of them."""


@dataclass(frozen=True)
class CorruptionConfig:
    """Kinds, sizes and seeds.

    kinds: of replacement, at every place. message_kinds: of them, those sent in protocol C.
    rerun: whether the target is re-run from a rank-2 token on up to the anchor: then all rows in between are exchanged
        too, and the target's own answer is known. Otherwise, and for other kinds, the edited row alone is exchanged.
    noise: whether a random vector as long as a rank-2 token's change is tried in every place too.
    anchors_per_answer, decoded_per_set: use fewer than the arena holds; None takes all.
    """

    kinds: tuple[str, ...] = KINDS
    message_kinds: tuple[str, ...] = (RANK_2, FREQUENCY, ZERO)
    rerun: bool = True
    noise: bool = True
    anchors_per_answer: int | None = None
    decoded_per_set: int | None = None
    answers_per_batch: int = 8
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not {RANK_2, *self.message_kinds} <= {*self.kinds} <= {*KINDS}:
            raise UsageError(
                f"kinds are {list(self.kinds)}; give {RANK_2!r}, all of message_kinds {list(self.message_kinds)}, and "
                f"any others of {list(KINDS)}."
            )
        sizes = (self.anchors_per_answer, self.decoded_per_set, self.answers_per_batch)
        if any(size is not None and size < 1 for size in sizes):
            raise UsageError(f"anchors_per_answer, decoded_per_set and answers_per_batch are {sizes}; give 1 or more.")

    def reruns(self, kind: str) -> bool:
        """Whether edits of this kind are followed up to the anchor."""
        return self.rerun and kind == RANK_2

    @classmethod
    def fast(cls) -> Self:
        """A smaller run of protocols A and C: two anchors an answer, a misleading token and none at all."""
        fewer = {"anchors_per_answer": 2, "decoded_per_set": 3, "answers_per_batch": 20}
        return cls(kinds=(RANK_2, ZERO), message_kinds=(RANK_2,), rerun=False, noise=False, **fewer)


@dataclass(frozen=True)
class CorruptionOptions:
    """What the command asks for."""

    fine_tuned: Mapping[str, Draft] | None = option(
        None, "PARENT=FOLDER: a draft trained with --visible-prefix from that draft (protocol B); repeatable."
    )
    fast: bool = option(False, "Fewer anchors and kinds of corruption.")
    seed: int = 0
