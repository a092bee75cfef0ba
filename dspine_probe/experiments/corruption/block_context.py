"""A context for every block, in which single rows can be exchanged.

A draft's context holds keys and values of the target's states, one row a position. To give blocks of one answer
different pasts, each block gets its own copy; edited rows are encoded once, and `swapped` puts them in for the
length of a `with` block. Entry points: `rows_of`, `swapped`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Tensor

from dspine_probe.drafts import Context


def rows_of(context: Context, block: Int[Tensor, "edit"], position: Int[Tensor, "edit"]) -> Context:
    """Single rows of a context, each a context of length 1."""
    return Context(
        tuple(k[block, position][:, None] for k in context.keys),
        tuple(v[block, position][:, None] for v in context.values),
    )


@contextmanager
def swapped(
    context: Context, block: Int[Tensor, "edit"], position: Int[Tensor, "edit"], rows: Context
) -> Iterator[None]:
    """Row `position[e]` of block `block[e]` is `rows[e]` while this lasts; no pair may occur twice.

    The context is written to in place and restored, because copying it would cost as much as a pass of the draft.
    """
    before = rows_of(context, block, position)
    _write(context, block, position, rows)
    try:
        yield
    finally:
        _write(context, block, position, before)


def _write(context: Context, block: Tensor, position: Tensor, rows: Context) -> None:
    with torch.no_grad():
        for old, new in zip((*context.keys, *context.values), (*rows.keys, *rows.values), strict=True):
            old[block, position] = new[:, 0]
