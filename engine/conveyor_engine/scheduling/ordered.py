"""Orders items by a key that may change. Used by `waiting_queue` and `deadlines`. It does not know requests."""

from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Key = tuple[float, ...]


class Ordered(Generic[Item]):
    """A binary heap that tracks the place of each item. The lowest key comes first.

    `put` and `remove` cost O(log items). Iterating over the first k items costs O(k log k).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Item]] = []
        self._places: dict[Item, int] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[Item]:
        return (item for _, item in self.entries())

    def entries(self) -> Iterator[tuple[Key, Item]]:
        """Yield keys and items, in order. The heap must not change during the iteration."""
        heap, ahead = self._heap, [(key, 0) for key, _ in self._heap[:1]]
        while ahead:
            _, place = heappop(ahead)
            yield heap[place]
            for below in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heappush(ahead, (heap[below][0], below))

    @property
    def first_key(self) -> Key:
        """The key of the first item. The heap must not be empty."""
        return self._heap[0][0]

    def put(self, item: Item, key: Key) -> None:
        """Add the item, or move it to its new key."""
        place = self._places.get(item)
        if place is None:
            place = len(self._heap)
            self._heap.append((key, item))
        self._settle(place, (key, item))

    def remove(self, item: Item) -> None:
        """Remove the item. Raises KeyError if it is not in the heap."""
        place = self._places.pop(item)
        last = self._heap.pop()
        if place < len(self._heap):
            self._settle(place, last)

    def _settle(self, place: int, entry: tuple[Key, Item]) -> None:
        """Store the entry, starting at the free `place` and moving up or down the heap to where its key belongs."""
        heap, key = self._heap, entry[0]
        while place and key < heap[(place - 1) // 2][0]:
            self._set(place, heap[(place - 1) // 2])
            place = (place - 1) // 2
        while (below := 2 * place + 1) < len(heap):
            if below + 1 < len(heap) and heap[below + 1][0] < heap[below][0]:
                below += 1
            if not heap[below][0] < key:
                break
            self._set(place, heap[below])
            place = below
        self._set(place, entry)

    def _set(self, place: int, entry: tuple[Key, Item]) -> None:
        self._heap[place] = entry
        self._places[entry[1]] = place
