"""The requests of one service that wait, in order, indexed by their homes and by the engines that cannot take them.

Used by `dispatcher` and `service_queue`. Pure bookkeeping: no clock, no I/O.

The index is a treap (Seidel and Aragon, "Randomized search trees", 1996) for each level, ordered by `sort_key`. Each
node also stores the engines that all requests of its subtree exclude, and those that are the home of any of them. A
search skips a subtree that none of the wanted engines can serve. So each operation costs O(levels x log n) for n
waiting requests, whichever engines they exclude.
"""

import heapq
import random
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from conveyor_gateway.admission.ticket import Ticket
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS

# A request at its home overtakes only requests that arrived at most this much earlier.
HOME_SECONDS: Final = 0.5
_NOBODY: Final = -1  # a mask with all bits: an empty subtree excludes every engine

Key = tuple[float, int]


def sort_key(ticket: Ticket) -> Key:
    """Return the key that orders the queue: the lowest key is first. Waiting tickets have different keys.

    Each level counts as LEVEL_AGEING_SECONDS of waiting. A key does not change with time, so two tickets keep their
    order while they wait. A ticket of level l is overtaken only by tickets that arrive within (l - the most urgent
    level) x LEVEL_AGEING_SECONDS after it, plus the difference of their offsets.
    """
    return ticket.admitted_at + ticket.offset_seconds + LEVEL_AGEING_SECONDS * ticket.level, ticket.number


class _Node:
    __slots__ = ("above", "below", "excluded", "excluded_by_all", "home", "homes", "key", "ticket", "weight")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.key = sort_key(ticket)
        self.excluded = self.excluded_by_all = ticket.excluded
        self.home = self.homes = ticket.home & ~ticket.excluded
        self.weight = random.random()
        self.below: _Node | None = None  # requests that come before this one
        self.above: _Node | None = None

    def update(self) -> "_Node":
        self.excluded_by_all = self.excluded & _excluded_by_all(self.below) & _excluded_by_all(self.above)
        self.homes = self.home | _homes(self.below) | _homes(self.above)
        return self


def _excluded_by_all(node: _Node | None) -> int:
    return _NOBODY if node is None else node.excluded_by_all


def _homes(node: _Node | None) -> int:
    return 0 if node is None else node.homes


class _Tree:
    """The waiting tickets of one level."""

    def __init__(self) -> None:
        self.root: _Node | None = None
        self.size = 0

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate over the tickets in the queue's order."""
        path, node = list[_Node](), self.root
        while path or node is not None:
            while node is not None:
                path.append(node)
                node = node.below
            node = path.pop()
            yield node.ticket
            node = node.above

    def add(self, ticket: Ticket) -> None:
        node = _Node(ticket)
        if self.root is None:
            self.root = node
        else:
            below, above = _split(self.root, node.key)
            self.root = _join(_join(below, node), above)
        self.size += 1

    def remove(self, ticket: Ticket) -> None:
        self.root = _remove(self.root, sort_key(ticket))
        self.size -= 1

    def first(self, wanted: int) -> Ticket | None:
        node = self.root
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

    def first_at_home(self, wanted: int) -> Ticket | None:
        node = self.root
        while node is not None and wanted & node.homes:
            if wanted & _homes(node.below):
                node = node.below
            elif wanted & node.home:
                return node.ticket
            else:
                node = node.above
        return None

    def last(self) -> Ticket:
        node = self.root
        assert node is not None, "each level with a tree has tickets"
        while node.above is not None:
            node = node.above
        return node.ticket


class Waiting:
    """The waiting tickets of a service. Engines are bits of a mask (`Engine.bit`).

    `Ticket.excluded`, `Ticket.home` and the fields that `sort_key` reads must not change while a ticket waits.
    """

    def __init__(self) -> None:
        self._trees: dict[int, _Tree] = {}  # by level; only levels with tickets
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate over the tickets in the queue's order."""
        return heapq.merge(*self._trees.values(), key=sort_key)

    @property
    def levels(self) -> Collection[int]:
        """The levels that have waiting tickets."""
        return self._trees.keys()

    def count(self, level: int) -> int:
        """Return the number of waiting tickets of this level."""
        tree = self._trees.get(level)
        return 0 if tree is None else tree.size

    def first_of(self, level: int) -> Ticket | None:
        """Return the first ticket of this level; None without one."""
        tree = self._trees.get(level)
        return None if tree is None else next(iter(tree))

    def add(self, ticket: Ticket) -> None:
        if ticket.level not in self._trees:
            self._trees[ticket.level] = _Tree()
        self._trees[ticket.level].add(ticket)
        self._size += 1

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiting ticket. Raises KeyError if it does not wait."""
        tree = self._trees[ticket.level]
        tree.remove(ticket)
        self._size -= 1
        if not tree.size:
            del self._trees[ticket.level]

    def first(self, wanted: int, below_level: int | None = None) -> Ticket | None:
        """Return the ticket below `below_level` that comes next, if the engines of the mask `wanted` have places.

        This is the first ticket whose `excluded` lacks at least one bit of `wanted`. If none of these engines is its
        home, a ticket at its home may overtake it (HOME_SECONDS).
        """
        trees = [tree for level, tree in self._trees.items() if below_level is None or level < below_level]
        first = min(_found(tree.first(wanted) for tree in trees), key=sort_key, default=None)
        if first is None or first.home & ~first.excluded & wanted:
            return first
        at_home = min(_found(tree.first_at_home(wanted) for tree in trees), key=sort_key, default=None)
        if at_home is not None and sort_key(at_home)[0] <= sort_key(first)[0] + HOME_SECONDS:
            return at_home
        return first

    def last(self) -> Ticket | None:
        """Return the last ticket of the least urgent level; None without tickets."""
        return self._trees[max(self._trees)].last() if self._trees else None


def _found(tickets: Iterable[Ticket | None]) -> Iterator[Ticket]:
    return (ticket for ticket in tickets if ticket is not None)


def _join(below: _Node | None, above: _Node | None) -> _Node | None:
    """Join two trees into one. All keys of `below` are lower than those of `above`."""
    if below is None or above is None:
        return below or above
    if below.weight > above.weight:
        below.above = _join(below.above, above)
        return below.update()
    above.below = _join(below, above.below)
    return above.update()


def _split(node: _Node | None, key: Key) -> tuple[_Node | None, _Node | None]:
    """Split a tree into the tree of lower keys and the tree of keys from `key` on."""
    if node is None:
        return None, None
    if node.key < key:
        node.above, above = _split(node.above, key)
        return node.update(), above
    below, node.below = _split(node.below, key)
    return below, node.update()


def _remove(node: _Node | None, key: Key) -> _Node | None:
    if node is None:
        raise KeyError(key)
    if node.key == key:
        return _join(node.below, node.above)
    if key < node.key:
        node.below = _remove(node.below, key)
    else:
        node.above = _remove(node.above, key)
    return node.update()
