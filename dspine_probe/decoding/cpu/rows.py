"""Which cache slot every row of a batch uses, how many of its positions count, and how a pass is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dspine_probe.decoding.cache import require_room

MAX_ROWS = 256
"""Most token rows of one call of a kernel; longer prompts are read in pieces."""


@dataclass(frozen=True)
class Span:
    """Where the rows of a pass belong: `width` tokens for each of some cache slots, from position `starts[i]` on."""

    slots: Sequence[int]
    starts: Sequence[int]
    width: int

    @property
    def rows(self) -> int:
        """Token rows of the pass."""
        return len(self.slots) * self.width


@dataclass(frozen=True)
class Piece:
    """Part of a pass that the kernels take at once: a contiguous part of [row width], and where it belongs."""

    at: tuple[slice, slice]
    span: Span


class RowSlots:
    """Rows in flight. Forgetting a position is not counting it; dropping a row is not naming its slot any more."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.most, self.capacity = slots, capacity
        self.slots: list[int] = []
        self.lengths: list[int] = []

    def add(self, count: int) -> range:
        """The numbers of `count` new, empty rows behind those in flight."""
        taken, first = set(self.slots), len(self.slots)
        self.slots += [slot for slot in range(self.most) if slot not in taken][:count]
        self.lengths += [0] * count
        return range(first, first + count)

    def pieces(self, width: int, rows: range | None = None) -> Iterator[Piece]:
        """Cut the next `width` tokens of some rows (by default all) into pieces, each after what it has to see.

        Raises:
            UsageError: a row has no room for them.
        """
        rows = range(len(self.slots)) if rows is None else rows
        require_room(max(self.lengths[row] for row in rows), width, self.capacity)
        together = max(1, MAX_ROWS // width)
        for first in range(rows.start, rows.stop, together):
            part = slice(first, min(first + together, rows.stop))
            for start in range(0, width, MAX_ROWS):
                stop = min(start + MAX_ROWS, width)
                starts = [length + start for length in self.lengths[part]]
                at = slice(part.start - rows.start, part.stop - rows.start), slice(start, stop)
                yield Piece(at, Span(self.slots[part], starts, stop - start))

    def tokens(self, counts: Sequence[int]) -> Iterator[tuple[slice, Span]]:
        """The next `counts[r]` tokens of every row end to end, cut into pieces; no token sees another of them.

        Raises:
            UsageError: a row has no room for them.
        """
        for length, count in zip(self.lengths, counts, strict=True):
            require_room(length, count, self.capacity)
        slots = [slot for slot, count in zip(self.slots, counts, strict=True) for _ in range(count)]
        starts = [length + at for length, count in zip(self.lengths, counts, strict=True) for at in range(count)]
        for first in range(0, len(slots), MAX_ROWS):
            part = slice(first, min(first + MAX_ROWS, len(slots)))
            yield part, Span(slots[part], starts[part], 1)

    def grow(self, counts: Sequence[int]) -> None:
        """Count the next `counts[r]` positions of row r."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.slots = [self.slots[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
