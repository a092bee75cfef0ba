"""The blocks of a few answers, made ready for corruption: what may be edited where, and what the target then says.

A block at anchor a predicts tokens a + 1, a + 2, … The token d places before the successor in slot 1 stands at
a + 1 − d: the anchor for d = 1, a context row for d > 1. `prepare` re-runs the target on every edited text that some
condition needs; `BlockGroup` looks the outcome up block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.corruption.config import CorruptionConfig
from dspine_probe.experiments.corruption.replacements import RANK_2
from dspine_probe.experiments.corruption.rerun import Edit, Reruns, rerun
from dspine_probe.target import Target
from dspine_probe.training.anchors import Batch

FIRST = None
"""In place of a distance: the first token of the answer."""
OWN = "own"
"""In place of a kind: the token that stands there anyway."""
UNKNOWN = -2
"""In place of the target's choice where the target was not asked."""
Distance = int | None
Replacements = Mapping[str, Sequence[Int[Tensor, "n"]]]
"""For each kind, for every answer, what replaces each of its tokens."""


@dataclass(frozen=True)
class BlockGroup:
    """All real blocks of a few answers, in the order of their batch.

    text: which of the answers. first: where the answer begins. tokens: what stands in slots 0…T.
    replacements: of these answers. farthest: the largest distance that is edited.
    """

    taps: Float[Tensor, "text ctx taps_d_model"]
    text: Int[Tensor, "block"]
    anchors: Int[Tensor, "block"]
    first: Int[Tensor, "block"]
    tokens: Int[Tensor, "block slot"]
    replacements: Replacements
    reruns: Reruns
    farthest: int

    def __len__(self) -> int:
        return len(self.anchors)

    def position(self, distance: Distance) -> Int[Tensor, "block"]:
        """Where the token stands that is `distance` places before the token of slot 1."""
        return self.first if distance is FIRST else self.anchors + 1 - distance

    def measurable(self, distance: Distance) -> Bool[Tensor, "block"]:
        """Whether that token is in the answer; the first token must lie farther back than every distance."""
        last = self.anchors - self.farthest if distance is FIRST else self.anchors
        position = self.position(distance)
        return (position >= self.first) & (position <= last)

    def replaced(self, kind: str) -> Int[Tensor, "block slot"]:
        """Replacements of the tokens of slots 0…T."""
        places = self.anchors[:, None] + torch.arange(self.tokens.shape[1])
        rows = zip(self.text.tolist(), places, strict=True)
        return torch.stack([self.replacements[kind][text][place] for text, place in rows])

    def rows(
        self, kind: str, distance: Distance, *, whole: bool
    ) -> tuple[Int[Tensor, "edit"], Int[Tensor, "edit"], Int[Tensor, "edit"]]:
        """Block, position and re-run row of every context row to exchange: the edited one, or all from it on."""
        found: list[tuple[int, int, int]] = []
        for block, edit in self._edits(kind, distance):
            stop = int(self.anchors[block]) if whole else edit.position + 1
            found += [(block, place, self.reruns.row(edit, place)) for place in range(edit.position, stop)]
        block, position, row = torch.tensor(found, dtype=torch.long).reshape(-1, 3).T
        return block, position, row

    def choices(self, kind: str, distance: Distance) -> Int[Tensor, "block"]:
        """What the target writes after the anchor of the edited text; UNKNOWN where that token was not edited."""
        chosen = torch.full((len(self),), UNKNOWN)
        for block, edit in self._edits(kind, distance):
            chosen[block] = self.reruns.choice[self.reruns.row(edit, int(self.anchors[block]))]
        return chosen

    def choices_behind(self, kind: str, slot: int) -> Int[Tensor, "block"]:
        """What the target writes behind an edited token of `slot`, all before it intact."""
        places = zip(self.text.tolist(), (self.anchors + slot).tolist(), strict=True)
        edits = [_edit(self.replacements, kind, text, place) for text, place in places]
        return self.reruns.choice[torch.tensor([self.reruns.row(edit, edit.position) for edit in edits])]

    def _edits(self, kind: str, distance: Distance) -> Iterator[tuple[int, Edit]]:
        """The edit of every block in which it can be made."""
        position = self.position(distance)
        for block in self.measurable(distance).nonzero().flatten().tolist():
            yield block, _edit(self.replacements, kind, int(self.text[block]), int(position[block]))


def prepare(
    arena: Arena,
    part: Sequence[int],
    batch: Batch,
    replacements: Replacements,
    target: Target,
    config: CorruptionConfig,
    *,
    later_slots: bool,
) -> BlockGroup:
    """The blocks of `batch`, which holds the answers `part` of the arena, and the target on all edits they need.

    Args:
        replacements: of every answer of the arena.
        later_slots: whether the target is also asked for its choice behind rank-2 tokens inside the block.
    """
    texts = [arena.answers[i].tokens for i in part]
    mine = {kind: [rows[i] for i in part] for kind, rows in replacements.items()} | {OWN: texts}
    anchors = [arena.anchors[i].tolist() for i in part]
    first = [arena.answers[i].prompt_length for i in part]
    lengths: dict[Edit, int] = {}
    for text, (start, places) in enumerate(zip(first, anchors, strict=True)):
        for anchor in places:
            for kind, position, length in _needed(config, start, anchor, arena.slots if later_slots else 1):
                edit = _edit(mine, kind, text, position)
                lengths[edit] = max(length, lengths.get(edit, 0))
    counts = torch.tensor([len(places) for places in anchors])
    return BlockGroup(
        taps=batch.taps,
        text=torch.arange(len(part)).repeat_interleave(counts),
        anchors=batch.anchors[batch.real],
        first=torch.tensor(first).repeat_interleave(counts),
        tokens=batch.tokens[batch.real.flatten()],
        replacements=mine,
        reruns=rerun(target, texts, lengths, arena.about["taps"]),
        farthest=config.farthest,
    )


def _needed(config: CorruptionConfig, first: int, anchor: int, slots: int) -> Iterator[tuple[str, int, int]]:
    """Kind and position of the edits for one block, each with the number of tokens to follow it, up to the anchor."""
    earlier = [anchor + 1 - distance for distance in config.earlier]
    if first < min(earlier):
        earlier.append(first)
    for position in (anchor, *(place for place in earlier if place >= first)):
        for kind in config.kinds:
            yield kind, position, anchor + 1 - position if config.reruns(kind) else 1
    if anchor + 1 - config.farthest >= first:
        yield OWN, anchor + 1 - config.farthest, config.farthest
    for slot in range(1, slots):
        yield RANK_2, anchor + slot, 1


def _edit(replacements: Replacements, kind: str, text: int, position: int) -> Edit:
    return Edit(text, position, int(replacements[kind][text][position]))
