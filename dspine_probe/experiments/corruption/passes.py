"""One draft on one group of blocks, ready to be corrupted in any place.

A `CorruptionRunner` encodes the group's context and every edited context row once; each condition is then one pass of
the draft. Three things can be exchanged: tokens shown in the block, context rows, and, by hooks, vectors that no token
has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from dspine_probe.drafts import Context, Draft
from dspine_probe.experiments.corruption.blocks import BlockGroup, Distance
from dspine_probe.experiments.corruption.replacements import RANK_2, ZERO, embed
from dspine_probe.experiments.emergence.readings import Hooks
from dspine_probe.hooks import HookedDraft

Rows = tuple[Int[Tensor, "edit"], Int[Tensor, "edit"], Sequence[Tensor]]
"""Blocks, positions in them, and what to put there in each of `stored`; no pair of block and position occurs twice."""


class CorruptionRunner:
    """A hooked draft, the blocks of a group, a context for each block, and all edited context rows."""

    def __init__(self, hooked: HookedDraft, group: BlockGroup) -> None:
        self.hooked, self.draft, self.group = hooked, hooked.draft, group
        self.slots = self.draft.config.num_slots
        weight = self.draft.fc.weight
        self.device = weight.device
        self.context = hooked.encode_context(group.taps.to(weight)).select(group.text.to(self.device))
        self.tokens = group.tokens.to(self.device)
        self.gold = self.tokens[:, 1:]
        self.anchors = group.anchors.to(self.device)[:, None]
        reruns = group.reruns
        self.edited = self.draft.encode_context(reruns.taps[:, None].to(weight), start=reruns.positions.to(self.device))

    def hidden(
        self,
        tokens: Int[Tensor, "block slot"] | None = None,
        *,
        shown: int = 1,
        rows: Rows | None = None,
        hooks: Hooks = (),
    ) -> Float[Tensor, "block slot d_model"]:
        """Final states of a pass that shows `tokens` (the true ones by default) in the first `shown` slots.

        By default that is the anchor alone. Context rows may be exchanged, and hooks set, for the pass.
        """
        tokens = self.tokens if tokens is None else tokens.to(self.device)
        slots = torch.arange(1, self.slots + 1, device=self.device)
        visible = torch.where(slots < shown, tokens[:, 1:], -1)
        exchange = nullcontext() if rows is None else exchanged(self.context, *rows)
        with self.hooked.hooks(hooks), exchange:
            return self.draft.run(self.context, tokens[:, :1], self.anchors, visible=visible).hidden

    def replaced(self, slot: int, kind: str) -> tuple[Int[Tensor, "block slot"], Hooks]:
        """The true tokens with that of `slot` replaced, and the hooks that a pass over them needs."""
        tokens = self.tokens.clone()
        tokens[:, slot] = self.group.replaced(kind)[:, slot].to(self.device)
        return tokens.clamp(min=0), hide(self.draft, slot) if kind == ZERO else ()

    def logits(
        self, hidden: Float[Tensor, "block slot d_model"], slots: slice = slice(None)
    ) -> Float[Tensor, "block some_slot draft_vocab"]:
        """Scores of the slots in `slots` (0 is slot 1)."""
        return self.draft.logits(hidden[:, 1:][:, slots].contiguous())

    def rows(self, kind: str, distance: Distance, *, whole: bool, own: bool = False) -> Rows:
        """Rows of the edited text, that of the edited token or all up to the anchor; or what stands there anyway."""
        block, position, row = self.group.rows(kind, distance, whole=whole).to(self.device)
        if own:
            return block, position, [part[block, position] for part in stored(self.context)]
        return block, position, [part[row, 0] for part in stored(self.edited)]

    def noise_rows(self, distance: Distance, generator: torch.Generator) -> Rows:
        """The clean row plus random noise that is, in every tap, as long as the change that a rank-2 token makes."""
        block, position, row = self.group.rows(RANK_2, distance, whole=False)
        clean = self.group.taps[self.group.text[block], position]
        change = (self.group.reruns.taps[row] - clean).unflatten(1, (-1, self.draft.config.hidden_size))
        noisy = (clean + as_long_as(change, generator).flatten(1)).to(self.draft.fc.weight)
        block, position = block.to(self.device), position.to(self.device)
        encoded = self.draft.encode_context(noisy[:, None], start=position)
        return block, position, [part[:, 0] for part in stored(encoded)]

    def codes(self, tokens: Int[Tensor, "*place"]) -> Float[Tensor, "*place rank"]:
        """What a token sends to its successor in a draft with codes, √rank long; a zero vector for NOTHING."""
        assert self.draft.codes is not None
        return embed(self.draft.codes, tokens.to(self.device)) * self.draft.codes.shape[1] ** 0.5

    def noise_anchor(self, generator: torch.Generator) -> Hooks:
        """Hooks for an anchor that is its own embedding (and code) plus noise as long as a rank-2 token's change."""
        own, other = self.tokens[:, 0], self.group.replaced(RANK_2)[:, 0].to(self.device)
        tables = [lambda tokens: embed(self.draft.embedding, tokens)]
        tables += [] if self.draft.codes is None else [self.codes]
        shown = [table(own) + as_long_as(table(other) - table(own), generator) for table in tables]
        return _show_anchor(self.draft, *shown)


def stored(context: Context) -> Sequence[Float[Tensor, "block position head d_head"]]:
    """Keys, then values of every layer."""
    return (*context.keys, *context.values)


@contextmanager
def exchanged(
    context: Context, block: Int[Tensor, "edit"], position: Int[Tensor, "edit"], rows: Sequence[Tensor]
) -> Iterator[None]:
    """Row `position[e]` of block `block[e]` is row e of `rows` while this lasts, in each of `stored(context)`.

    The context is written to in place and restored, because copying it would cost as much as a pass of the draft.
    """

    def write(values: Sequence[Tensor]) -> None:
        for part, new in zip(stored(context), values, strict=True):
            part[block, position] = new

    before = [part[block, position] for part in stored(context)]
    write(rows)
    try:
        yield
    finally:
        write(before)


def as_long_as(change: Float[Tensor, "*place size"], generator: torch.Generator) -> Float[Tensor, "*place size"]:
    """Random directions with the lengths of `change`."""
    noise = F.normalize(torch.randn(change.shape, generator=generator), dim=-1)
    return noise.to(change) * change.norm(dim=-1, keepdim=True)


def hide(draft: Draft, slot: int) -> Hooks:
    """Hooks after which nothing stands in a slot of the block: a zero embedding and, for the anchor, a zero code."""
    zero = draft.embedding.new_zeros(draft.config.hidden_size)
    if slot == 0:
        return _show_anchor(draft, zero, None if draft.codes is None else torch.zeros_like(draft.codes[0]))
    return [("hook_embed", _put(zero, slot))]


def send(draft: Draft, messages: Tensor, slots: int | slice = slice(None)) -> list[Any]:
    """Hooks after which draft slots (0 is slot 1) receive `messages` [block, draft_slot, rank] in every layer."""
    seams = [name for name in draft.code_seams if not name.startswith(draft.late_seams)]
    put = _put(messages, slots)
    return [(f"blocks.{layer}.{name}", put) for layer in range(len(draft.blocks)) for name in seams]


def _show_anchor(
    draft: Draft, embedding: Float[Tensor, "*block d_model"], code: Float[Tensor, "*block rank"] | None = None
) -> Hooks:
    """Hooks after which slot 0 holds `embedding`, and slot 1 of a draft with codes receives `code` wherever it does."""
    hooks: list[Any] = [("hook_embed", _put(embedding, 0))]
    if code is not None:
        # In the late seams, one row a candidate.
        late = [name for name in draft.code_seams if name.startswith(draft.late_seams)]
        hooks += send(draft, code, 0) + [(name, _put(code[..., None, :], 0)) for name in late]
    return hooks


def _put(value: Tensor, slots: int | slice) -> Any:
    def put(tensor: Tensor, hook: HookPoint) -> Tensor:
        edited = tensor.clone()
        edited[:, slots] = value
        return edited

    return put
