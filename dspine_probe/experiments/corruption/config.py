"""What is corrupted how: the settings of the corruption experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from dspine_probe.errors import UsageError
from dspine_probe.experiments.corruption.substitutes import FREQUENCY, KINDS, RANK_2, ZERO


@dataclass(frozen=True)
class CorruptionConfig:
    """Kinds, places, sizes and seeds.

    kinds: stand-ins, at every place. message_kinds: of them, those sent in protocol C.
    earlier: distances compared with the predecessor's, 2 or more.
    rerun_kinds: kinds for which the target is re-run from an earlier token on up to the anchor: then all rows in
        between are exchanged too, and the target's own answer is known. Of other kinds, the edited row is exchanged.
    walk_kinds: kinds applied in every round of a decode.
    noise: whether a random vector as long as a rank-2 token's change is tried in every place too.
    anchors_per_answer, walked_per_set: use fewer than the arena holds; None takes all.
    precise: multiply fp32 numbers in full; by default bf16 or TF32 units are used where the machine has them.
    """

    kinds: tuple[str, ...] = KINDS
    message_kinds: tuple[str, ...] = (RANK_2, FREQUENCY, ZERO)
    earlier: tuple[int, ...] = (2, 3)
    rerun_kinds: tuple[str, ...] = (RANK_2,)
    walk_kinds: tuple[str, ...] = (RANK_2,)
    noise: bool = True
    anchors_per_answer: int | None = None
    walked_per_set: int | None = None
    answers_per_batch: int = 8
    precise: bool = False
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if RANK_2 not in self.kinds or any(kind not in KINDS for kind in self.kinds):
            raise UsageError(f"kinds are {list(self.kinds)}; give {RANK_2!r} and any of {list(KINDS[1:])}.")
        for name in ("message_kinds", "rerun_kinds", "walk_kinds"):
            extra = [kind for kind in getattr(self, name) if kind not in self.kinds]
            if extra:
                raise UsageError(f"{name} has {extra}, but kinds are {list(self.kinds)}; add them there too.")
        if list(self.earlier) != sorted(set(self.earlier)) or min(self.earlier, default=0) < 2:
            raise UsageError(
                f"earlier distances are {list(self.earlier)}; give one or more from 2 up, each once and ascending."
            )
        for name in ("anchors_per_answer", "walked_per_set", "answers_per_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; give 1 or more.")

    @property
    def farthest(self) -> int:
        """The largest distance."""
        return self.earlier[-1]

    @classmethod
    def fast(cls) -> Self:
        """A smaller run of protocols A and C: two anchors an answer, a misleading token and none at all."""
        return cls(
            kinds=(RANK_2, ZERO),
            message_kinds=(RANK_2,),
            rerun_kinds=(),
            noise=False,
            anchors_per_answer=2,
            walked_per_set=3,
            answers_per_batch=20,
        )
