"""The target on edited answers: many one-token edits of a text in one pass.

The text is run once. Every edit adds a branch behind it: the new token, then as many of the text's own tokens as are
wanted. A branch sees the true text before the edit and itself, at the positions that its tokens would have, so its
states are those of the edited text run by itself. Entry points: `rerun`, `Reruns.row`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspine_probe.errors import UsageError
from dspine_probe.experiments.corruption.replacements import embed
from dspine_probe.target import Target


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
        """Which row holds the state of the edited text at `position`, at or behind the edit.

        Raises:
            UsageError: the edit was not followed as far.
        """
        branch = self.branches.get(edit, range(0))
        if not 0 <= position - edit.position < len(branch):
            raise UsageError(f"{edit} was followed for {len(branch)} tokens, which is short of {position}.")
        return branch[position - edit.position]


@torch.no_grad()
def rerun(
    target: Target, texts: Sequence[Int[Tensor, "n"]], lengths: Mapping[Edit, int], taps: Sequence[int]
) -> Reruns:
    """Follow every edit for its number of tokens, the edited one included.

    Args:
        texts: token ids; `Edit.text` is an index into them.
        lengths: how far to follow each edit.
        taps: target layers to read.

    Raises:
        UsageError: a branch would run past the end of its text.
    """
    branches: dict[Edit, range] = {}
    start, parts = 0, []
    for index, text in enumerate(texts):
        mine = {edit: length for edit, length in lengths.items() if edit.text == index}
        for edit, length in mine.items():
            if length < 1 or edit.position < 0 or edit.position + length > len(text):
                raise UsageError(
                    f"an edit at position {edit.position} cannot be followed for {length} tokens in a text of "
                    f"{len(text)}; edit a token of the text and stay inside it."
                )
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
