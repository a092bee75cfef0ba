"""Which texts are worth training on: drop reasons for prompts and responses, as token ids.

A reason is one of a few fixed words, so that a run can count them. Nothing is rewritten here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

MIN_RESPONSE = 8
NGRAM = 8
MIN_DISTINCT = 0.5
TAIL = 64


def is_looping(ids: Sequence[int]) -> bool:
    """Whether the text repeats itself: under half its 8-grams are distinct, or its last 64 tokens are periodic.

    A period of at most 32 counts, so that the cycle is seen twice.
    """
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    if len(grams) >= NGRAM and len(set(grams)) < MIN_DISTINCT * len(grams):
        return True
    tail = list(ids[-TAIL:])
    return len(tail) == TAIL and any(tail[p:] == tail[:-p] for p in range(1, TAIL // 2 + 1))


class ResponseFilter:
    """Says for one response after another whether to drop it; remembers what it has seen to find duplicates."""

    def __init__(self, stop_ids: Collection[int]) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._seen: set[Hashable] = set()

    def reason(self, response: Sequence[int]) -> str | None:
        """None to keep it, else "empty", "short", "looping" or "duplicate"; the stop id counts for nothing."""
        body = tuple(response)
        while body and body[-1] in self._stop_ids:
            body = body[:-1]
        if not body:
            return "empty"
        if len(body) < MIN_RESPONSE:
            return "short"
        if is_looping(body):
            return "looping"
        if body in self._seen:
            return "duplicate"
        self._seen.add(body)
        return None
