"""The requests of one service that wait, in order, indexed by the engines that cannot take them.

Used by `dispatcher` and `service_queue`. Pure bookkeeping: no clock, no I/O.

The index is a treap (Seidel and Aragon, "Randomized search trees", 1996) ordered by `sort_key`. Each node also stores
which engines every request of its subtree excludes. A search skips a subtree that none of the wanted engines can serve,
so each operation costs O(log n) in the number of waiting requests, whatever they exclude.
"""

import random
from collections.abc import Iterator
from typing import Final

from conveyor_gateway.admission.ticket import Ticket

_NOBODY: Final = -1  # all bits: what an empty subtree excludes


def sort_key(ticket: Ticket) -> int:
    """The order of the queue: the lowest key is first. Keys of waiting tickets differ."""
    return ticket.number


class _Node:
    __slots__ = ("above", "below", "excluded", "excluded_by_all", "key", "ticket", "weight")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.key = sort_key(ticket)
        self.excluded = self.excluded_by_all = ticket.excluded
        self.weight = random.random()
        self.below: _Node | None = None  # requests that come before this one
        self.above: _Node | None = None

    def update(self) -> "_Node":
        self.excluded_by_all = self.excluded & _excluded_by_all(self.below) & _excluded_by_all(self.above)
        return self


def _excluded_by_all(node: _Node | None) -> int:
    return _NOBODY if node is None else node.excluded_by_all


class Waiting:
    """Waiting tickets. Engines are bits of a mask (`Engine.bit`); `Ticket.excluded` must not change while it waits."""

    def __init__(self) -> None:
        self._root: _Node | None = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Ticket]:
        """In order."""
        path, node = list[_Node](), self._root
        while path or node is not None:
            while node is not None:
                path.append(node)
                node = node.below
            node = path.pop()
            yield node.ticket
            node = node.above

    def add(self, ticket: Ticket) -> None:
        node = _Node(ticket)
        below, above = _split(self._root, node.key)
        self._root = _join(_join(below, node), above)
        self._size += 1

    def remove(self, ticket: Ticket) -> None:
        """Removes a ticket that waits. Raises KeyError."""
        self._root = _remove(self._root, sort_key(ticket))
        self._size -= 1

    def first(self, wanted: int) -> Ticket | None:
        """The first ticket that does not exclude all bits of `wanted`."""
        node = self._root
        if not wanted & ~_excluded_by_all(node):
            return None
        while node is not None:
            if wanted & ~_excluded_by_all(node.below):
                node = node.below
            elif wanted & ~node.excluded:
                return node.ticket
            else:
                node = node.above
        return None


def _join(below: _Node | None, above: _Node | None) -> _Node | None:
    """One tree of two, where all keys of `below` are lower."""
    if below is None or above is None:
        return below or above
    if below.weight > above.weight:
        below.above = _join(below.above, above)
        return below.update()
    above.below = _join(below, above.below)
    return above.update()


def _split(node: _Node | None, key: int) -> tuple[_Node | None, _Node | None]:
    """The tree of lower keys and the tree of higher ones."""
    if node is None:
        return None, None
    if node.key < key:
        node.above, above = _split(node.above, key)
        return node.update(), above
    below, node.below = _split(node.below, key)
    return below, node.update()


def _remove(node: _Node | None, key: int) -> _Node | None:
    if node is None:
        raise KeyError(key)
    if node.key == key:
        return _join(node.below, node.above)
    if key < node.key:
        node.below = _remove(node.below, key)
    else:
        node.above = _remove(node.above, key)
    return node.update()
