"""The blocks of a few answers, made ready for corruption: what may be edited where, and what the target then says.

A block at anchor a predicts tokens a + 1, a + 2, … The token d places before the successor in slot 1 stands at
a + 1 − d: the anchor for d = 1, a context row for d > 1, a token inside the block for d < 1. `prepare` re-runs the
target on every edited text that some condition needs; `BlockGroup` looks the outcome up block by block.

`rerun` runs a text once. Every edit adds a branch behind it: the new token, then as many of the text's own tokens as
are wanted. A branch sees the true text before the edit and itself, at the positions that its tokens would have, so its
states are those of the edited text run by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dspine_probe.experiments.common.arena import Arena
from dspine_probe.experiments.corruption.config import EARLIER, FARTHEST, CorruptionConfig
from dspine_probe.experiments.corruption.replacements import RANK_2, embed
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


class Edit(NamedTuple):
    """Another token at one position of one text; the token NOTHING is a zero embedding."""

    text: int
    position: int
    token: int


@dataclass(frozen=True)
class Reruns:
    """The target's states on all branches, end to end.

    taps: tapped states. positions: where each branch token stands in its text. choice: the token that the target
    would write next. branches: the rows of each edit, that of the edited token first.
    """

    taps: Float[Tensor, "branch_token taps_d_model"]
    positions: Int[Tensor, "branch_token"]
    choice: Int[Tensor, "branch_token"]
    branches: Mapping[Edit, range]

    def row(self, edit: Edit, position: int) -> int:
        """Which row holds the state of the edited text at `position`, at or behind the edit."""
        return self.branches[edit][position - edit.position]


@dataclass(frozen=True)
class BlockGroup:
    """All real blocks of a few answers, in the order of their batch.

    text: which of the answers. first: where the answer begins. tokens: what stands in slots 0…T.
    replacements: of these answers.
    """

    taps: Float[Tensor, "text ctx taps_d_model"]
    text: Int[Tensor, "block"]
    anchors: Int[Tensor, "block"]
    first: Int[Tensor, "block"]
    tokens: Int[Tensor, "block slot"]
    replacements: Replacements
    reruns: Reruns

    def __len__(self) -> int:
        return len(self.anchors)

    def measurable(self, distance: Distance) -> Bool[Tensor, "block"]:
        """Whether that token is in the answer; the first token must lie farther back than every distance."""
        return self.anchors + 1 - (FARTHEST + 1 if distance is FIRST else distance) >= self.first

    def replaced(self, kind: str) -> Int[Tensor, "block slot"]:
        """Replacements of the tokens of slots 0…T."""
        places = self.anchors[:, None] + torch.arange(self.tokens.shape[1])
        rows = zip(self.text.tolist(), places, strict=True)
        return torch.stack([self.replacements[kind][text][place] for text, place in rows])

    def rows(self, kind: str, distance: Distance, *, whole: bool) -> Int[Tensor, "3 edit"]:
        """Block, position and re-run row of every context row to exchange: the edited one, or all from it on."""
        found: list[tuple[int, int, int]] = []
        for block, edit in self._edits(kind, distance):
            stop = int(self.anchors[block]) if whole else edit.position + 1
            found += [(block, place, self.reruns.row(edit, place)) for place in range(edit.position, stop)]
        return torch.tensor(found, dtype=torch.long).reshape(-1, 3).T

    def choices(self, kind: str, distance: Distance) -> Int[Tensor, "block"]:
        """What the target writes behind the anchor of the edited text, or behind an edited token farther on.

        UNKNOWN where the token was not edited.
        """
        chosen = torch.full((len(self),), UNKNOWN)
        for block, edit in self._edits(kind, distance):
            chosen[block] = self.reruns.choice[self.reruns.row(edit, max(int(self.anchors[block]), edit.position))]
        return chosen

    def _edits(self, kind: str, distance: Distance) -> Iterator[tuple[int, Edit]]:
        """The edit of every block in which it can be made."""
        position = self.first if distance is FIRST else self.anchors + 1 - distance
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
    )


def _needed(config: CorruptionConfig, first: int, anchor: int, slots: int) -> Iterator[tuple[str, int, int]]:
    """Kind and position of the edits for one block, each with the number of tokens to follow it, up to the anchor."""
    earlier = [anchor + 1 - distance for distance in EARLIER]
    if first < min(earlier):
        earlier.append(first)
    for position in (anchor, *(place for place in earlier if place >= first)):
        for kind in config.kinds:
            yield kind, position, anchor + 1 - position if config.reruns(kind) else 1
    if anchor + 1 - FARTHEST >= first:
        yield OWN, anchor + 1 - FARTHEST, FARTHEST
    for slot in range(1, slots):
        yield RANK_2, anchor + slot, 1


def _edit(replacements: Replacements, kind: str, text: int, position: int) -> Edit:
    return Edit(text, position, int(replacements[kind][text][position]))


@torch.no_grad()
def rerun(
    target: Target, texts: Sequence[Int[Tensor, "n"]], lengths: Mapping[Edit, int], taps: Sequence[int]
) -> Reruns:
    """Follow every edit for its number of tokens, the edited one included.

    Args:
        texts: token ids; `Edit.text` is an index into them.
        lengths: how far to follow each edit, inside its text.
        taps: target layers to read.
    """
    branches: dict[Edit, range] = {}
    start, parts = 0, []
    for index, text in enumerate(texts):
        mine = {edit: length for edit, length in lengths.items() if edit.text == index}
        for edit, length in mine.items():
            branches[edit] = range(start, start + length)
            start += length
        if mine:
            parts.append(_one_text(target, text, mine, taps))
    tapped, positions, choice = (torch.cat(column) for column in zip(*parts, strict=True))
    return Reruns(tapped, positions, choice, branches)


def _one_text(
    target: Target, text: Int[Tensor, "n"], lengths: Mapping[Edit, int], taps: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Tapped states, positions and next tokens of the branches of one text."""
    trunk = max(edit.position for edit in lengths)  # nothing is seen behind the last edit
    ids, position, branch, cut = [text[:trunk]], [torch.arange(trunk)], [torch.full((trunk,), -1)], [0]
    for index, (edit, length) in enumerate(lengths.items()):
        stop = edit.position + length
        ids += [torch.tensor([edit.token]), text[edit.position + 1 : stop]]
        position.append(torch.arange(edit.position, stop))
        branch.append(torch.full((length,), index))
        cut.append(edit.position)
    placed, of = torch.cat(position), torch.cat(branch)
    # A token sees its own part up to itself, and a branch sees the text before its edit.
    sees = (of[:, None] == of) & (placed <= placed[:, None])
    sees |= (of == -1) & (placed < torch.tensor(cut)[of + 1][:, None])
    bias = torch.zeros(sees.shape, dtype=target.dtype).masked_fill(~sees, float("-inf")).to(target.device)
    with target.capture(taps) as caught:
        final = target.model.base_model(
            inputs_embeds=embed(target.embedding, torch.cat(ids).to(target.device))[None],
            attention_mask=bias[None, None],
            position_ids=placed[None].to(target.device),
            use_cache=False,
        ).last_hidden_state
    tapped = torch.cat([caught[tap] for tap in taps], dim=-1)[0, trunk:]
    choice = target.logits(final[0, trunk:]).argmax(-1)
    return tapped.cpu(), placed[trunk:], choice.cpu()
