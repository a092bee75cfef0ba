"""The blocks of a few answers, made ready for corruption: what may be edited where, and what the target then says.

A block at anchor a predicts tokens a + 1, a + 2, … The token d places before the successor in slot 1 stands at
a + 1 − d: the anchor for d = 1, a context row for d > 1. `prepare` chooses stand-ins for all of them and re-runs the
target on every edited text that some condition needs; `BlockGroup` looks them up block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.experiments.arena import Arena
from dspine_probe.experiments.corruption.rerun import Edit, Reruns, rerun
from dspine_probe.experiments.corruption.substitutes import RANK_2
from dspine_probe.target import Target
from dspine_probe.training.anchors import Batch

FIRST = None
"""In place of a distance: the first token of the answer."""
OWN = "own"
"""In place of a kind: the token that stands there anyway."""
Distance = int | None


@dataclass(frozen=True)
class Reach:
    """Which edits are needed, so that the target is re-run on those and no others.

    kinds: of stand-ins. earlier: distances beyond 1. rerun_kinds: kinds for which the text is followed from earlier
    edits up to the anchor. later_slots: whether the target is asked for its answer behind edits in the block.
    """

    kinds: Sequence[str]
    earlier: Sequence[int]
    rerun_kinds: Sequence[str]
    later_slots: bool

    @property
    def farthest(self) -> int:
        """The largest distance."""
        return max((1, *self.earlier))


@dataclass(frozen=True)
class BlockGroup:
    """All real blocks of a few answers, in the order of their batch.

    text: which of the answers. first: where the answer begins. tokens: what stands in slots 0…T.
    stand_ins: for each kind, in every answer, what stands in for each of its tokens.
    """

    taps: Float[Tensor, "text ctx taps_d_model"]
    text: Int[Tensor, "block"]
    anchors: Int[Tensor, "block"]
    first: Int[Tensor, "block"]
    tokens: Int[Tensor, "block slot"]
    stand_ins: Mapping[str, Sequence[Int[Tensor, "n"]]]
    reruns: Reruns
    farthest: int

    def __len__(self) -> int:
        return len(self.anchors)

    def position(self, distance: Distance) -> Int[Tensor, "block"]:
        """Where the token lies that is `distance` places before the token of slot 1."""
        return self.first if distance is FIRST else self.anchors + 1 - distance

    def measurable(self, distance: Distance) -> Bool[Tensor, "block"]:
        """Whether that token is in the answer; the first token must lie farther back than every distance."""
        last = self.anchors - self.farthest if distance is FIRST else self.anchors
        position = self.position(distance)
        return (position >= self.first) & (position <= last)

    def slots(self, kind: str) -> Int[Tensor, "block slot"]:
        """Stand-ins for the tokens of slots 0…T."""
        places = self.anchors[:, None] + torch.arange(self.tokens.shape[1])
        rows = zip(self.text.tolist(), places, strict=True)
        return torch.stack([self.stand_ins[kind][text][place] for text, place in rows])

    def rows(
        self, kind: str, distance: Distance, *, whole: bool
    ) -> tuple[Int[Tensor, "edit"], Int[Tensor, "edit"], Int[Tensor, "edit"]]:
        """Block, position and re-run row of every context row to exchange: the edited one, or all from it on."""
        found: list[tuple[int, int, int]] = []
        for block in self.measurable(distance).nonzero().flatten().tolist():
            edit, stop = self._edit(block, kind, distance), int(self.anchors[block])
            for position in range(edit.position, stop if whole else edit.position + 1):
                found.append((block, position, self.reruns.row(edit, position)))
        block, position, row = torch.tensor(found, dtype=torch.long).reshape(-1, 3).T
        return block, position, row

    def choices(self, kind: str, distance: Distance) -> Int[Tensor, "block"]:
        """What the target writes after the anchor of the edited text; −2 where that token was not edited."""
        chosen = torch.full((len(self),), -2)
        for block in self.measurable(distance).nonzero().flatten().tolist():
            edit = self._edit(block, kind, distance)
            chosen[block] = self.reruns.choice[self.reruns.row(edit, int(self.anchors[block]))]
        return chosen

    def choices_behind(self, kind: str, slot: int) -> Int[Tensor, "block"]:
        """What the target writes behind an edited token of `slot`, all before it intact."""
        places = (self.anchors + slot).tolist()
        edits = [
            _edit(self.stand_ins, kind, text, place)
            for text, place in zip(self.text.tolist(), places, strict=True)
        ]
        return self.reruns.choice[torch.tensor([self.reruns.row(edit, edit.position) for edit in edits])]

    def _edit(self, block: int, kind: str, distance: Distance) -> Edit:
        return _edit(self.stand_ins, kind, int(self.text[block]), int(self.position(distance)[block]))


def prepare(
    arena: Arena,
    part: Sequence[int],
    batch: Batch,
    stand_ins: Mapping[str, Sequence[Int[Tensor, "n"]]],
    target: Target,
    reach: Reach,
) -> BlockGroup:
    """The blocks of `batch`, which holds the answers `part` of the arena, and the target on all edits within reach.

    Args:
        stand_ins: of every answer of the arena, by kind.
    """
    texts = [arena.answers[i].tokens for i in part]
    mine = {kind: [rows[i] for i in part] for kind, rows in stand_ins.items()} | {OWN: texts}
    anchors = [arena.anchors[i].tolist() for i in part]
    first = [arena.answers[i].prompt_length for i in part]
    lengths: dict[Edit, int] = {}
    for text, (start, places) in enumerate(zip(first, anchors, strict=True)):
        for anchor in places:
            for edit, length in _needed(mine, text, start, anchor, reach, arena.slots):
                lengths[edit] = max(length, lengths.get(edit, 0))
    counts = torch.tensor([len(places) for places in anchors])
    return BlockGroup(
        taps=batch.taps,
        text=torch.arange(len(part)).repeat_interleave(counts),
        anchors=batch.anchors[batch.real],
        first=torch.tensor(first).repeat_interleave(counts),
        tokens=batch.tokens[batch.real.flatten()],
        stand_ins=mine,
        reruns=rerun(target, texts, lengths, arena.about["taps"]),
        farthest=reach.farthest,
    )


def _needed(
    stand_ins: Mapping[str, Sequence[Tensor]], text: int, first: int, anchor: int, reach: Reach, slots: int
) -> Iterator[tuple[Edit, int]]:
    """Edits for one block, each with the number of tokens to follow it, up to the anchor."""
    earlier = [anchor + 1 - distance for distance in reach.earlier]
    if first < min(earlier):
        earlier.append(first)
    for position in (anchor, *(place for place in earlier if place >= first)):
        for kind in reach.kinds:
            length = anchor + 1 - position if kind in reach.rerun_kinds else 1
            yield _edit(stand_ins, kind, text, position), length
    if anchor + 1 - reach.farthest >= first:
        yield _edit(stand_ins, OWN, text, anchor + 1 - reach.farthest), reach.farthest
    if reach.later_slots:
        for slot in range(1, slots):
            yield _edit(stand_ins, RANK_2, text, anchor + slot), 1


def _edit(stand_ins: Mapping[str, Sequence[Tensor]], kind: str, text: int, position: int) -> Edit:
    return Edit(text, position, int(stand_ins[kind][text][position]))
