"""Amounts by key, with the key that is the first to lose. Used by `parts` only."""

import heapq
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_NOTHING: Final = (0, 0)


class Amounts(Generic[K]):
    """Finds the key with the highest rank; of these the one with the largest amount, and of equals the youngest.

    The youngest is the one with the highest `number`, or without numbers the one that changed last. An operation costs
    O(log keys) on average.
    """

    def __init__(self) -> None:
        self._entries: dict[K, tuple[int, int, int, int, K]] = {}
        self._heap: list[tuple[int, int, int, int, K]] = []  # may have stale entries, which later calls drop
        self._changes = 0

    def __getitem__(self, key: K) -> int:
        return -self._entries.get(key, _NOTHING)[1]

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: K, amount: int, rank: int = 0, number: int = 0) -> None:
        """Add `amount`, which may be negative. Drop the key if its total becomes 0. Its rank and number are fixed."""
        entries, heap = self._entries, self._heap
        total = amount - entries.get(key, _NOTHING)[1]
        if not total:
            entries.pop(key, None)
            return
        self._changes += 1
        entry = entries[key] = (-rank, -total, -number, -self._changes, key)
        heapq.heappush(heap, entry)
        if len(heap) > 2 * len(entries) + 16:
            heap[:] = entries.values()
            heapq.heapify(heap)

    def find_first(self) -> K | None:
        while self._heap and self._entries.get(self._heap[0][-1]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None
