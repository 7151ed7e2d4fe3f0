"""Chooses the engine for the next request, among the engines below the place limit.

The load of an engine is the number of this gateway's requests there. A request whose prompt has a known beginning goes
to the home of this beginning, unless the home's load is far above the average. Other requests go to the least loaded
engine. In the modes with a batching window, the pool instead chooses the most loaded engine below the limit. So one
engine's batch is full before another engine's batch begins. An engine rejects requests while it runs a batch.

Used by `dispatcher` and `service_queue`, which change an `Engine` only through the pool. Pure bookkeeping: the caller
passes the time, and nothing here does I/O or waits.
"""

import hashlib
import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

# An engine that refused or broke a connection is left out for this time. It doubles with each failure in a row.
LEFT_OUT_SECONDS: Final = 0.1
MAX_LEFT_OUT_SECONDS: Final = 2.0
# An engine that did not accept a connection in time gets one request as a probe. The next request is sent after the
# probe's answer, or after this time.
PROBE_SECONDS: Final = 4.0
# This many of the lowest bits of a mask do not stand for engines. `ticket` uses them for properties of a request.
NUM_RESERVED_BITS: Final = 2
# A home gets no further request while it has more than this many times the average load. This bounds the load of each
# engine (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016).
MAX_HOME_LOAD: Final = 1.5
_64_BITS: Final = (1 << 64) - 1


def left_out_seconds(failures: int) -> float:
    """Return the pause after this number of failures in a row, in seconds."""
    return min(LEFT_OUT_SECONDS * 2.0 ** min(failures - 1, 10), MAX_LEFT_OUT_SECONDS)


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
    _seed: int = field(init=False)

    def __post_init__(self) -> None:
        self._seed = int.from_bytes(hashlib.blake2b(self.address.encode(), digest_size=8).digest())

    def rank_as_home(self, prefix: int) -> int:
        """Return the engine's rank for this beginning of a prompt: the home has the highest rank.

        These are rendezvous hashes (Thaler and Ravishankar, 1998), so all gateways compute the same ranks. When an
        engine comes or goes, only its own beginnings move.
        """
        return _mix(prefix ^ self._seed)

    def rank(self, now_seconds: float) -> tuple[bool, int, int]:
        """Return the sort key for the choice of an engine. The lowest key is chosen."""
        return self.full_until > now_seconds, self.load, self.last_chosen

    def rank_to_fill(self, now_seconds: float) -> tuple[bool, int, str]:
        """Return the sort key in modes that fill batches: most requests first, and the same order at all gateways."""
        return self.full_until > now_seconds, -self.load, self.address


def _mix(bits: int) -> int:
    """Hash 64 bits to 64 bits (SplitMix64's last step: Steele, Lea and Flood, 2014)."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _64_BITS
    return bits ^ (bits >> 31)


class EnginePool:
    """The engines of one service. Engines that are no longer ready stay until their last request has ended."""

    def __init__(self) -> None:
        self.place_limit = 1
        self.fills_batches = False
        self._engines: dict[str, Engine] = {}
        # An ordered set of the engines that reported that all their places are taken. A request is sent to such an
        # engine only after the engine has granted a place.
        self._occupied: dict[Engine, None] = {}
        self._free_bits: list[int] = []  # a heap: the bits of removed engines
        self._choices = 0

    def configure(self, place_limit: int, fills_batches: bool) -> None:
        self.place_limit, self.fills_batches = place_limit, fills_batches

    @property
    def num_ready(self) -> int:
        return sum(engine.ready for engine in self._engines.values())

    def set_ready(self, addresses: Iterable[str]) -> None:
        """Send new requests only to `addresses` from now on."""
        wanted = set(addresses)
        for address in sorted(wanted):
            if address not in self._engines:
                self._engines[address] = Engine(address, self._allocate_bit())
            self._engines[address].ready = True
        for engine in list(self._engines.values()):
            engine.ready = engine.address in wanted
            self._drop_if_unused(engine)

    def find_places(self, now_seconds: float) -> int:
        """Return the mask of the engines that have a free place."""
        places = 0
        for engine in self._engines.values():
            if self._has_place(engine, now_seconds):
                places |= engine.bit
        return places

    def choose(self, now_seconds: float, excluded: int = 0, prefix: int | None = None) -> Engine | None:
        """Occupy a place on an engine and return the engine; None if no place is free.

        prefix: the beginning of the prompt (`relaying.prefixes`). Its home is chosen, or among the next in rank the
        first one below the bound. Without a prefix, the least loaded engine is chosen. Among equally loaded engines,
        the one chosen longest ago wins. An engine that recently had no room comes after all others. Engines in the
        mask `excluded` are not chosen.
        """
        places = [
            engine
            for engine in self._engines.values()
            if not engine.bit & excluded and self._has_place(engine, now_seconds)
        ]
        rank = Engine.rank_to_fill if self.fills_batches else Engine.rank
        home = None if prefix is None or self.fills_batches else self._choose_home(places, now_seconds, prefix)
        best = home or min(places, key=lambda engine: rank(engine, now_seconds), default=None)
        if best is not None:
            self._occupy(best, now_seconds)
        return best

    def _choose_home(self, places: Iterable[Engine], now_seconds: float, prefix: int) -> Engine | None:
        loads = [engine.load for engine in self._engines.values() if engine.ready]
        bound = math.ceil(MAX_HOME_LOAD * (sum(loads) + 1) / max(1, len(loads)))
        near = [engine for engine in places if engine.load < bound and engine.full_until <= now_seconds]
        return max(near, key=lambda engine: engine.rank_as_home(prefix), default=None)

    def find_home(self, prefix: int | None) -> int:
        """Return the mask with the bit of the prefix's home; 0 without a prefix or an engine."""
        if prefix is None:
            return 0
        ready = [engine for engine in self._engines.values() if engine.ready]
        home = max(ready, key=lambda engine: engine.rank_as_home(prefix), default=None)
        return 0 if home is None else home.bit

    def occupy_granted(self, engine: Engine, now_seconds: float) -> bool:
        """Occupy the place that `engine` has granted; return False if that is not possible.

        The load may exceed the limit by one, because this gateway may not yet have seen the end of another request.
        """
        if not self._may_be_asked(engine, now_seconds) or engine.load > self.place_limit:
            return False
        self._occupy(engine, now_seconds)
        return True

    def _occupy(self, engine: Engine, now_seconds: float) -> None:
        self._choices += 1
        engine.last_chosen = self._choices
        engine.load += 1
        if engine.unreachable:
            engine.left_out_until = now_seconds + PROBE_SECONDS

    def _may_be_asked(self, engine: Engine, now_seconds: float) -> bool:
        return engine.ready and engine.left_out_until <= now_seconds

    def _has_place(self, engine: Engine, now_seconds: float) -> bool:
        is_free = engine.load < self.place_limit and engine not in self._occupied
        return is_free and self._may_be_asked(engine, now_seconds)

    def find_occupied(self, now_seconds: float) -> list[Engine]:
        """Return the engines that `dispatcher` may query for a place, because all their places are taken."""
        return [each for each in self._occupied if self._may_be_asked(each, now_seconds)]

    def release(self, engine: Engine) -> None:
        """Free one place that `choose` occupied."""
        assert engine.load > 0, "each place is freed only once"
        engine.load -= 1
        self._drop_if_unused(engine)

    def leave_out(self, engine: Engine, now_seconds: float, unreachable: bool = False) -> None:
        """Leave out `engine` for a while after it rejected a request or failed. Simultaneous failures count as one."""
        engine.unreachable = unreachable
        if engine.left_out_until > now_seconds:
            return
        engine.failures += 1
        engine.left_out_until = now_seconds + left_out_seconds(engine.failures)

    def note_full(self, engine: Engine, now_seconds: float) -> None:
        """Record that `engine` had no room for a request. It may have room for smaller ones, so it is chosen last."""
        engine.refusals += 1
        engine.full_until = now_seconds + left_out_seconds(engine.refusals)

    def note_no_place(self, engine: Engine) -> None:
        """Record that all places of `engine` are taken, maybe by other gateways.

        Requests now wait until the engine grants a place.
        """
        self._occupied[engine] = None

    def note_place_answer(self, engine: Engine, asks_again: bool) -> None:
        """Record that `engine` has answered a query for a place.

        Requests are sent to the engine without a query from now on, unless another query follows (`asks_again`).
        In the modes that fill batches, `asks_again` has no effect, because the engine may already fill another batch.
        """
        if not asks_again or self.fills_batches:
            self._occupied.pop(engine, None)

    def note_answer(self, engine: Engine) -> None:
        """Record that `engine` answered: reset its failures, and send it further requests if this was a probe."""
        if engine.unreachable:
            engine.unreachable, engine.left_out_until = False, 0.0
        engine.failures, engine.refusals, engine.full_until = 0, 0, 0.0

    def next_return_seconds(self, now_seconds: float) -> float | None:
        """Return the time at which the next left-out engine is used again; None if no engine is left out."""
        returns = [engine.left_out_until for engine in self._engines.values() if engine.left_out_until > now_seconds]
        return min(returns, default=None)

    def _drop_if_unused(self, engine: Engine) -> None:
        if not engine.ready and engine.load == 0 and self._engines.pop(engine.address, None) is not None:
            heapq.heappush(self._free_bits, engine.bit)
            self._occupied.pop(engine, None)

    def _allocate_bit(self) -> int:
        """Return the lowest bit that no engine has, so that masks stay short.

        A request that excluded the bit's previous engine also excludes the new one, until the request's pause ends.
        """
        if self._free_bits:
            return heapq.heappop(self._free_bits)
        return 1 << (NUM_RESERVED_BITS + len(self._engines))
