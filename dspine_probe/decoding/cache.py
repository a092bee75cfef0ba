"""A key and value cache that is allocated once and whose rows end at different positions; prompts side by side.

Rolling a row back means forgetting its length: what lies behind a row's end is stale, to be masked and written over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspine_probe.errors import UsageError


class RowCache:
    """Keys and values of rows that end at different positions."""

    def __init__(self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, like: Tensor) -> None:
        self.keys = like.new_zeros(layers, rows, capacity, heads, head_dim)
        self.values = torch.zeros_like(self.keys)
        self.capacity = capacity
        self.lengths: list[int] = []

    def next(self, width: int) -> Int[Tensor, "row width"]:
        """Positions of the next `width` tokens of every row.

        Raises:
            UsageError: the longest row has no room for them.
        """
        require_room(max(self.lengths), width, self.capacity)
        ends = torch.tensor(self.lengths, device=self.keys.device)
        return ends[:, None] + torch.arange(width, device=ends.device)

    def write(
        self,
        layer: int,
        at: Int[Tensor, "row width"],
        keys: Float[Tensor, "row width kv_head d_head"],
        values: Float[Tensor, "row width kv_head d_head"],
    ) -> None:
        """Store a layer's new keys and values at positions `at`."""
        owner = torch.arange(len(at), device=at.device)[:, None]
        self.keys[layer, owner, at], self.values[layer, owner, at] = keys, values

    def commit(self, counts: Sequence[int]) -> None:
        """Count the next `counts[r]` positions of row r as its own."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Close the gaps between these rows in place; a row only ever moves down."""
        for new, old in enumerate(rows):
            if new != old:
                for cache in (self.keys, self.values):
                    cache[:, new, : self.lengths[old]] = cache[:, old, : self.lengths[old]]
        self.lengths = [self.lengths[row] for row in rows]


def require_room(length: int, width: int, capacity: int) -> None:
    """Refuse to write behind the end of a cache.

    Raises:
        UsageError: a row of `length` tokens has no room for `width` more.
    """
    if length + width > capacity:
        raise UsageError(
            f"a row of {length} tokens and {width} more do not fit a cache of {capacity} positions; "
            "open the engine with more capacity or shorten the prompt"
        )


def padded_prompts(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "row width"], Int[Tensor, "row"]]:
    """Prompts padded on the right to the longest, and where each of them ends."""
    listed = [torch.tensor(prompt, dtype=torch.long, device="cpu") for prompt in prompts]
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device="cpu")
    return pad_sequence(listed, batch_first=True).to(device), last.to(device)
