"""One draft on one group of blocks, ready to be corrupted in any place.

A `Bench` encodes the group's context and every edited context row once; each condition is then one pass of the draft.
Three things can be exchanged: tokens shown in the block, context rows, and, by hooks, vectors that no token has.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from dspine_probe.drafts import Context, Draft, DSpine
from dspine_probe.experiments.corruption.block_context import rows_of, swapped
from dspine_probe.experiments.corruption.blocks import BlockGroup, Distance
from dspine_probe.experiments.corruption.substitutes import RANK_2, embed
from dspine_probe.experiments.emergence.readings import Hooks
from dspine_probe.hooks import HookedDraft

Rows = tuple[Int[Tensor, "edit"], Int[Tensor, "edit"], Context]
"""Blocks, positions in them, and the context rows to put there."""


class Bench:
    """A hooked draft, the blocks of a group, a context for each block, and all edited context rows."""

    def __init__(self, hooked: HookedDraft, group: BlockGroup) -> None:
        self.hooked, self.draft, self.group = hooked, hooked.draft, group
        self.device, dtype = self.draft.fc.weight.device, self.draft.fc.weight.dtype
        context = hooked.encode_context(group.taps.to(self.device, dtype))
        self.context = context.select(group.text.to(self.device))
        self.tokens = group.tokens.to(self.device)
        self.anchors = group.anchors.to(self.device)[:, None]
        reruns = group.reruns
        self.edited = self.draft.encode_context(
            reruns.taps[:, None].to(self.device, dtype), start=reruns.positions.to(self.device)
        )

    @property
    def slots(self) -> int:
        """T."""
        return self.draft.config.num_slots

    @property
    def gold(self) -> Int[Tensor, "block draft_slot"]:
        """The true tokens of slots 1…T."""
        return self.tokens[:, 1:]

    # ---- passes

    def hidden(
        self,
        *,
        anchor: Int[Tensor, "block"] | None = None,
        visible: Int[Tensor, "block draft_slot"] | None = None,
        rows: Rows | None = None,
        hooks: Hooks = (),
    ) -> Float[Tensor, "block slot d_model"]:
        """Final states of a clean pass, or of one with other anchors, shown tokens, context rows or hooks."""
        shown = self.tokens[:, 0] if anchor is None else anchor.to(self.device)
        given: dict[str, Any] = {} if visible is None else {"visible": visible.to(self.device)}
        with self.hooked.hooks(hooks):
            if rows is None:
                states = self.draft.run(self.context, shown[:, None], self.anchors, **given)
            else:
                with swapped(self.context, *rows):
                    states = self.draft.run(self.context, shown[:, None], self.anchors, **given)
        return states.hidden

    def logits(
        self, hidden: Float[Tensor, "block slot d_model"], slots: slice = slice(None)
    ) -> Float[Tensor, "block some_slot draft_vocab"]:
        """Scores of the slots in `slots` (0 is slot 1)."""
        return self.draft.logits(hidden[:, 1:][:, slots].contiguous())

    # ---- context rows

    def rerun_rows(self, kind: str, distance: Distance, *, whole: bool) -> Rows:
        """Rows of the edited text: that of the edited token, or all from it to the anchor."""
        block, position, row = (part.to(self.device) for part in self.group.rows(kind, distance, whole=whole))
        keys, values = (
            tuple(part[row] for part in parts) for parts in (self.edited.keys, self.edited.values)
        )
        return block, position, Context(keys, values)

    def own_rows(self, kind: str, distance: Distance, *, whole: bool) -> Rows:
        """The same places with what stands there anyway."""
        block, position, _ = (part.to(self.device) for part in self.group.rows(kind, distance, whole=whole))
        return block, position, rows_of(self.context, block, position)

    def noise_rows(self, distance: Distance, generator: torch.Generator) -> Rows:
        """The clean row plus random noise that is, in every tap, as long as the change that a rank-2 token makes."""
        block, position, row = self.group.rows(RANK_2, distance, whole=False)
        clean = self.group.taps[self.group.text[block], position]
        taps = (clean.shape[1] // self.draft.config.hidden_size, self.draft.config.hidden_size)
        change = (self.group.reruns.taps[row] - clean).unflatten(1, taps)
        noisy = (clean + as_long_as(change, generator).flatten(1)).to(self.draft.fc.weight)
        position = position.to(self.device)
        return block.to(self.device), position, self.draft.encode_context(noisy[:, None], start=position)

    # ---- vectors

    def codes(self, tokens: Int[Tensor, "*place"]) -> Float[Tensor, "*place rank"]:
        """What a token says to its successor in a DSpine, √rank long; nothing for NOTHING."""
        assert isinstance(self.draft, DSpine)
        return embed(self.draft.codes, tokens.to(self.device)) * self.draft.codes.shape[1] ** 0.5

    def noise_anchor(self, generator: torch.Generator) -> Hooks:
        """Hooks for an anchor that is its own embedding (and code) plus noise as long as a rank-2 token's change."""
        own, other = self.tokens[:, 0], self.group.slots(RANK_2)[:, 0].to(self.device)
        tables = [lambda tokens: embed(self.draft.embedding, tokens)]
        tables += [self.codes] if isinstance(self.draft, DSpine) else []
        shown = [table(own) + as_long_as(table(other) - table(own), generator) for table in tables]
        return show_anchor(self.draft, *shown)


def as_long_as(
    change: Float[Tensor, "*place size"], generator: torch.Generator
) -> Float[Tensor, "*place size"]:
    """Random directions with the lengths of `change`."""
    noise = F.normalize(torch.randn(change.shape, generator=generator), dim=-1)
    return noise.to(change) * change.norm(dim=-1, keepdim=True)


def show_anchor(
    draft: Draft, embedding: Float[Tensor, "*block d_model"], code: Float[Tensor, "*block rank"] | None = None
) -> Hooks:
    """Hooks after which slot 0 holds `embedding`, and slot 1 of a DSpine receives `code`, in the last write as well."""
    hooks: list[Any] = [("hook_embed", _put(embedding, 0))]
    if isinstance(draft, DSpine):
        assert code is not None
        hooks += [(f"blocks.{layer}.inject.hook_pred", _put(code, 0)) for layer in range(len(draft.blocks))]
        # There, one row a candidate.
        hooks.append(("last_write.hook_pred", _put(code[..., None, :], 0)))
    return hooks


def hide(draft: Draft, slot: int) -> Hooks:
    """Hooks after which nothing stands in a slot of the block: a zero embedding and, for the anchor, a zero code."""
    zero = draft.embedding.new_zeros(draft.config.hidden_size)
    if slot == 0:
        return show_anchor(
            draft, zero, zero.new_zeros(draft.codes.shape[1]) if isinstance(draft, DSpine) else None
        )
    return [("hook_embed", _put(zero, slot))]


def send(draft: DSpine, messages: Float[Tensor, "block draft_slot rank"]) -> Hooks:
    """Hooks after which slots 1…T receive `messages` in every layer."""

    def put(_pred: Tensor, hook: HookPoint) -> Tensor:
        return messages

    return [(f"blocks.{layer}.inject.hook_pred", put) for layer in range(len(draft.blocks))]


def _put(value: Tensor, slot: int) -> Any:
    def put(tensor: Tensor, hook: HookPoint) -> Tensor:
        edited = tensor.clone()
        edited[:, slot] = value
        return edited

    return put
