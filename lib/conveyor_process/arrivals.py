"""Queues new connections by the peer that opened them. Pure bookkeeping.

Peers take turns, so a peer that opens many connections delays only itself. If too many connections wait, the peer that
needs most turns loses its newest connection. The cost of an operation does not depend on how many connections wait.
"""

from collections import OrderedDict, defaultdict, deque
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_A_ROUND: Final = 16  # maximum number of connections in a round, because the event loop has other work too


class Peer(NamedTuple):
    """A peer that opens connections. In each turn it gets `count_a_turn` (at least one) connections."""

    name: str
    count_a_turn: int = 1


class _Line(Generic[T]):
    """The connections of one peer, in order."""

    __slots__ = ("items", "peer")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.items = deque[T]()

    @property
    def num_turns(self) -> int:
        """The number of turns that these connections need."""
        return -(-len(self.items) // self.peer.count_a_turn)


class Arrivals(Generic[T]):
    """The queue. At most `most` connections wait. In each round every peer has one turn."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines = OrderedDict[str, _Line[T]]()  # non-empty lines by peer's name, in the order of turns
        self._by_turns = defaultdict[int, dict[str, None]](dict)  # names, by the number of turns that they need
        self._most_turns = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, peer: Peer, arrived: T) -> T | None:
        """Add a connection. If too many wait, return the connection to refuse, which may be `arrived`; else None."""
        line = self._lines.get(peer.name) or _Line[T](peer)
        before = line.num_turns
        line.items.append(arrived)
        self._lines[peer.name] = line
        self._update(line, before, 1)
        return self.drop_newest() if self._size > self._most else None

    def drop_newest(self) -> T:
        """Remove and return the newest connection of the peer that needs most turns.

        At least one connection must wait.
        """
        line = self._lines[next(reversed(self._by_turns[self._most_turns]))]
        before = line.num_turns
        dropped = line.items.pop()
        self._update(line, before, -1)
        return dropped

    def take_round(self) -> list[T]:
        """Remove and return the connections of the next round, at most MAX_A_ROUND."""
        taken: list[T] = []
        for line in list(islice(self._lines.values(), MAX_A_ROUND)):
            before = line.num_turns
            count = min(line.peer.count_a_turn, len(line.items), MAX_A_ROUND - len(taken))
            taken += (line.items.popleft() for _ in range(count))
            if count:
                self._lines.move_to_end(line.peer.name)
            self._update(line, before, -count)
        return taken

    def _update(self, line: _Line[T], turns_before: int, more: int) -> None:
        """Update the index after the number of connections in `line` has changed by `more`."""
        self._size += more
        name, turns = line.peer.name, line.num_turns
        if not line.items:
            del self._lines[name]
        if turns == turns_before:
            return
        self._by_turns[turns_before].pop(name, None)
        if not self._by_turns[turns_before]:
            del self._by_turns[turns_before]
        if turns:
            self._by_turns[turns][name] = None
        self._most_turns = max(self._most_turns, turns)
        while self._most_turns and self._most_turns not in self._by_turns:
            self._most_turns -= 1
