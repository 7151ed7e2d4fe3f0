"""Orders the engines of a service, so that a choice among n engines costs O(log n). Pure.

Used by `engine_pool` only. `FreeEngines` are in the order in which they are chosen. `Ring` finds the home of a prompt's
beginning.
"""

import hashlib
import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

# If a request excludes this many engines that come first, any other engine is chosen.
MAX_SKIPPED: Final = 32
# A home is searched among this many engines. With more engines, those that follow the prefix on the ring count.
NUM_NEAR: Final = 64
_64_BITS: Final = (1 << 64) - 1


def _mix(bits: int) -> int:
    """Hash 64 bits to 64 bits (SplitMix64's last step: Steele, Lea and Flood, 2014)."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _64_BITS
    return bits ^ (bits >> 31)


@dataclass(slots=True, eq=False)
class Engine:
    """One engine as this gateway sees it. `load` counts the requests of this gateway that have a place there."""

    address: str
    bit: int  # the engine's bit in masks of engines
    load: int = 0
    ready: bool = True
    failures: int = 0  # number of failures in a row
    left_out_until: float = 0.0
    refusals: int = 0  # number of requests in a row that it rejected because it had no room
    full_until: float = 0.0
    last_chosen: int = 0
    unreachable: bool = False  # the last failed request could not connect in time
    seed: int = field(init=False)  # its position on the ring

    def __post_init__(self) -> None:
        self.seed = int.from_bytes(hashlib.blake2b(self.address.encode(), digest_size=8).digest())

    def rank_as_home(self, prefix: int) -> int:
        """Return the engine's rank for this beginning of a prompt: the home has the highest rank.

        These are rendezvous hashes (Thaler and Ravishankar, 1998), so all gateways compute the same ranks. When an
        engine comes or goes, only its own beginnings move.
        """
        return _mix(prefix ^ self.seed)

    def rank(self, now_seconds: float) -> tuple[bool, int, int]:
        """Return the sort key for the choice of an engine. The lowest key is chosen."""
        return self.full_until > now_seconds, self.load, self.last_chosen

    def rank_to_fill(self, now_seconds: float) -> tuple[bool, int, str]:
        """Return the sort key in modes that fill batches: most requests first, and the same order at all gateways."""
        return self.full_until > now_seconds, -self.load, self.address


class FreeEngines:
    """The engines with a free place, in a heap by rank.

    An engine whose rank has changed is pushed again, and its earlier entry is skipped.
    """

    def __init__(self) -> None:
        self.mask = 0
        self._heap: list[tuple[Any, int, Engine]] = []  # rank, number of the entry, engine
        self._entries: dict[Engine, int] = {}  # the number of each engine's valid entry
        self._by_bit: dict[int, Engine] = {}  # by the number of the bit
        self._pushed = 0

    def put(self, engine: Engine, rank: Hashable) -> None:
        """Add the engine, or change its rank."""
        self._pushed += 1
        self._entries[engine] = self._pushed
        self._by_bit[engine.bit.bit_length()] = engine
        self.mask |= engine.bit
        heapq.heappush(self._heap, (rank, self._pushed, engine))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def discard(self, engine: Engine) -> None:
        if self._entries.pop(engine, None) is not None:
            del self._by_bit[engine.bit.bit_length()]
            self.mask &= ~engine.bit

    def first(self, allowed: int) -> Engine | None:
        """Return the first engine of the mask `allowed`; after MAX_SKIPPED others, any engine of the mask."""
        if not (allowed := allowed & self.mask):
            return None
        found, skipped = None, list[tuple[Any, int, Engine]]()
        while found is None and len(skipped) < MAX_SKIPPED:
            entry = self._heap[0]
            if not self._is_valid(entry):
                heapq.heappop(self._heap)
            elif entry[-1].bit & allowed:
                found = entry[-1]
            else:
                skipped.append(heapq.heappop(self._heap))
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found or self._by_bit[allowed.bit_length()]

    def _is_valid(self, entry: tuple[Any, int, Engine]) -> bool:
        return self._entries.get(entry[-1]) == entry[1]


class Ring:
    """The ready engines, ordered by the hashes of their addresses."""

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._engines)

    def add(self, engine: Engine) -> None:
        self._engines.append(engine)
        self._is_sorted = False

    def remove(self, engine: Engine) -> None:
        del self._engines[self._engines.index(engine, self._find(engine.seed))]

    def find_near(self, prefix: int) -> Iterable[Engine]:
        """Return up to NUM_NEAR engines: all engines, or those that follow the prefix on the ring."""
        if len(self._engines) <= NUM_NEAR:
            return self._engines
        start = self._find(_mix(prefix))
        near = self._engines[start : start + NUM_NEAR]
        return near + self._engines[: NUM_NEAR - len(near)]

    def _find(self, seed: int) -> int:
        if not self._is_sorted:
            self._engines.sort(key=attrgetter("seed"))
            self._is_sorted = True
        return bisect_left(self._engines, seed, key=attrgetter("seed"))


@dataclass(slots=True)
class Pauses:
    """When the engines' pauses end, the next end first. `find_end` returns an engine's end; a past one counts as none.

    The caller notes each new end. Earlier ends of the same engine are skipped.
    """

    find_end: Callable[[Engine], float]
    heap: list[tuple[float, int, Engine]] = field(default_factory=list)
    _noted: int = 0

    def note(self, engine: Engine) -> None:
        self._noted += 1
        heapq.heappush(self.heap, (self.find_end(engine), self._noted, engine))

    def pop_ended(self, now_seconds: float) -> Engine | None:
        """Return an engine whose pause has ended, once for each pause; None without one."""
        while self.heap and self.heap[0][0] <= now_seconds:
            at, _, engine = heapq.heappop(self.heap)
            if self.find_end(engine) == at:
                return engine
        return None

    def next_end(self) -> float | None:
        while self.heap and self.find_end(self.heap[0][-1]) != self.heap[0][0]:
            heapq.heappop(self.heap)
        return self.heap[0][0] if self.heap else None
