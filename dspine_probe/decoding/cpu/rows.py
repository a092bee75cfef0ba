"""Which cache slot every row of a batch uses, how many of its positions count, and how a pass is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dspine_probe.decoding.cpu.compute import MAX_ROWS, Span
from dspine_probe.errors import UsageError


@dataclass(frozen=True)
class Piece:
    """Part of a pass that a compute takes at once: a contiguous part of [row width], and where it belongs."""

    at: tuple[slice, slice]
    span: Span


class Rows:
    """Rows in flight. Forgetting a position is not counting it; dropping a row is not naming its slot any more."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.slots = list(range(slots))
        self.lengths = [0] * slots

    def open(self, count: int) -> None:
        """Begin with `count` empty rows."""
        self.slots = list(range(count))
        self.lengths = [0] * count

    def pieces(self, width: int, rows: range | None = None) -> Iterator[Piece]:
        """Cut the next `width` tokens of some rows (by default all) into pieces, each after what it has to see.

        Raises:
            UsageError: a row has no room for them.
        """
        rows = range(len(self.slots)) if rows is None else rows
        longest = max(self.lengths[row] for row in rows)
        if longest + width > self.capacity:
            raise UsageError(
                f"a row of {longest} tokens and {width} more do not fit a cache of {self.capacity} positions; "
                "open the engine with more capacity or shorten the prompt"
            )
        together = max(1, MAX_ROWS // width)
        for first in range(rows.start, rows.stop, together):
            part = slice(first, min(first + together, rows.stop))
            for start in range(0, width, MAX_ROWS):
                stop = min(start + MAX_ROWS, width)
                starts = [length + start for length in self.lengths[part]]
                at = slice(part.start - rows.start, part.stop - rows.start), slice(start, stop)
                yield Piece(at, Span(self.slots[part], starts, stop - start))

    def grow(self, counts: Sequence[int]) -> None:
        """Count the next `counts[r]` positions of row r."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.slots = [self.slots[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
