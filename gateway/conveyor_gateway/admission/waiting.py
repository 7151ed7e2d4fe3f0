"""The requests of one service that wait, by level, indexed by their homes and by the engines that cannot take them.

Used by `dispatcher` and `service_queue`. Pure bookkeeping: no clock, no I/O. Each operation costs O(levels x log n) for
n waiting requests, whichever engines they exclude. `served_tokens` decides the order within a level.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator
from operator import itemgetter

from conveyor_gateway.admission.served_tokens import Level, sort_key
from conveyor_gateway.admission.ticket import Ticket, Work


class Waiting:
    """The waiting tickets of a service, and what their clients have been served. Engines are bits of a mask.

    `Ticket.excluded`, `Ticket.home` and the fields that `sort_key` reads must not change while a ticket waits.
    """

    def __init__(self) -> None:
        self._levels = defaultdict[int, Level](Level)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate over the tickets in the order of `sort_key`."""
        return heapq.merge(*self._levels.values(), key=sort_key)

    @property
    def levels(self) -> list[int]:
        """The levels that have waiting tickets."""
        return [number for number, level in self._levels.items() if level.size]

    def keep(self, levels: set[int]) -> None:
        """Drop all levels except these, and those that have requests."""
        for number in [each for each, level in self._levels.items() if each not in levels and level.is_unused]:
            del self._levels[number]

    def count(self, level: int) -> int:
        """Return the number of waiting tickets of this level."""
        return self._levels[level].size if level in self._levels else 0

    def first_of(self, level: int) -> Ticket | None:
        """Return the ticket of this level that is first in the order of `sort_key`; None without one."""
        return self._levels[level].first_of_all() if level in self._levels else None

    def list_clients(self, level: int, most: int) -> Iterator[tuple[str, int, Ticket]]:
        """Yield what `Level.list_clients` does; nothing without tickets of this level."""
        if level in self._levels:
            yield from self._levels[level].list_clients(most)

    def add(self, ticket: Ticket) -> None:
        self._levels[ticket.level].add(ticket)
        self._size += 1

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiting ticket. Raises KeyError if it does not wait."""
        self._levels[ticket.level].remove(ticket)
        self._size -= 1

    def begin(self, ticket: Ticket, waits: bool = True) -> None:
        """Remove a ticket that gets a place, and charge its client. waits: whether the ticket was added."""
        self._levels[ticket.level].begin(ticket, waits)
        self._size -= waits

    def end(self, ticket: Ticket, used: Work | None) -> None:
        """Record that a ticket has left its place. used: what it used; None: not known."""
        self._levels[ticket.level].end(ticket, used)

    def undo(self, ticket: Ticket) -> None:
        """Take back the charge of a ticket that its engine has rejected. It must be added again."""
        self._levels[ticket.level].undo(ticket)

    def first(
        self, wanted: int, below_level: int | None = None, skipped: Collection[str] = frozenset()
    ) -> Ticket | None:
        """Return the ticket below `below_level` that comes next, if the engines of the mask `wanted` have places.

        The level whose oldest ticket is first in the order of `sort_key` goes first, if these engines can serve that
        ticket. skipped: clients that get no place.
        """
        levels = [
            level
            for number, level in self._levels.items()
            if level.size and (below_level is None or number < below_level)
        ]
        if len(levels) > 1:
            oldest = [(sort_key(ticket), level) for level in levels if (ticket := level.oldest(wanted)) is not None]
            levels = [level for _, level in sorted(oldest, key=itemgetter(0))]
        return next((ticket for level in levels if (ticket := level.first(wanted, skipped)) is not None), None)

    def last(self, level: int | None = None) -> Ticket | None:
        """Return the last ticket of the client with most tickets; None without tickets.

        level: without it, the least urgent level.
        """
        if level is None:
            level = max(self.levels, default=None)
        return None if level is None or level not in self._levels else self._levels[level].last()
