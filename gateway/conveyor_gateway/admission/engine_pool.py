"""Chooses the engine for the next request, among the engines below the place limit.

The load of an engine is the number of this gateway's requests there. A request whose prompt has a known beginning goes
to the home of this beginning, unless the home's load is far above the average. Other requests go to the least loaded
engine. In the modes with a batching window, the pool instead chooses the most loaded engine below the limit. So one
engine's batch is full before another engine's batch begins. An engine rejects requests while it runs a batch.

Used by `dispatcher` and `service_queue`, which change an `Engine` only through the pool. Pure bookkeeping: the caller
passes the time, and nothing here does I/O or waits.
"""

import heapq
import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from conveyor_gateway.admission.engine_order import Engine, FreeEngines, Pauses, Ring

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
_LEFT_OUT_UNTIL: Final = attrgetter("left_out_until")
_FULL_UNTIL: Final = attrgetter("full_until")


def left_out_seconds(failures: int) -> float:
    """Return the pause after this number of failures in a row, in seconds."""
    return min(LEFT_OUT_SECONDS * 2.0 ** min(failures - 1, 10), MAX_LEFT_OUT_SECONDS)


class EnginePool:
    """The engines of one service. Engines that are no longer ready stay until their last request has ended."""

    def __init__(self) -> None:
        self.place_limit = 1
        self.fills_batches = False
        self._engines: dict[str, Engine] = {}
        # An ordered set of the engines that reported that all their places are taken. A request is sent to such an
        # engine only after the engine has granted a place.
        self._occupied: dict[Engine, None] = {}
        self._unqueried: dict[Engine, None] = {}  # those of them without an open query
        self._free_bits: list[int] = []  # a heap: the bits of removed engines
        self._choices = 0
        self._now = 0.0  # the time of the last call
        self._free = FreeEngines()
        self._ready = Ring()
        self._ready_load = 0  # sum of the ready engines' loads
        self._left_out = Pauses(_LEFT_OUT_UNTIL)
        self._full = Pauses(_FULL_UNTIL)

    def configure(self, place_limit: int, fills_batches: bool = False) -> None:
        if (place_limit, fills_batches) != (self.place_limit, self.fills_batches):
            self.place_limit, self.fills_batches = place_limit, fills_batches
            self._free = FreeEngines()
            for engine in self._engines.values():
                self._rank(engine)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def set_ready(self, addresses: Iterable[str]) -> None:
        """Send new requests only to `addresses` from now on."""
        wanted = set(addresses)
        for address in sorted(wanted - self._engines.keys()):
            self._engines[address] = Engine(address, self._allocate_bit(), ready=False)
        for engine in list(self._engines.values()):
            if engine.ready != (engine.address in wanted):
                self._set_ready(engine, not engine.ready)
                self._drop_if_unused(engine)

    def _set_ready(self, engine: Engine, ready: bool) -> None:
        engine.ready = ready
        (self._ready.add if ready else self._ready.remove)(engine)
        self._ready_load += engine.load if ready else -engine.load
        self._rank(engine)

    def _rank(self, engine: Engine) -> None:
        """Update the order after any change of the engine."""
        if not self._has_place(engine):
            self._free.discard(engine)
        elif self.fills_batches:
            self._free.put(engine, engine.rank_to_fill(self._now))
        else:
            self._free.put(engine, engine.rank(self._now))

    def _tick(self, now_seconds: float) -> None:
        """Update the order after pauses that have ended."""
        self._now = now_seconds
        for pauses in (self._left_out, self._full):
            while pauses.heap and (engine := pauses.pop_ended(now_seconds)) is not None:
                if self._engines.get(engine.address) is engine:
                    self._rank(engine)

    def find_places(self, now_seconds: float) -> int:
        """Return the mask of the engines that have a free place."""
        self._tick(now_seconds)
        return self._free.mask

    def choose(self, now_seconds: float, excluded: int = 0, prefix: int | None = None) -> Engine | None:
        """Occupy a place on an engine and return the engine; None if no place is free.

        prefix: the beginning of the prompt (`relaying.prefixes`). Its home is chosen, or among the next in rank the
        first one below the bound. Without a prefix, the least loaded engine is chosen. Among equally loaded engines,
        the one chosen longest ago wins. An engine that recently had no room comes after all others. Engines in the
        mask `excluded` are not chosen.
        """
        self._tick(now_seconds)
        home = None if prefix is None or self.fills_batches else self._choose_home(~excluded, prefix)
        best = home or self._free.first(~excluded)
        if best is not None:
            self._occupy(best)
        return best

    def _choose_home(self, allowed: int, prefix: int) -> Engine | None:
        places = self._free.mask & allowed
        bound = math.ceil(MAX_HOME_LOAD * (self._ready_load + 1) / max(1, self.num_ready))
        near = [
            engine
            for engine in self._ready.find_near(prefix)
            if engine.load < bound and engine.full_until <= self._now and engine.bit & places
        ]
        return max(near, key=lambda engine: engine.rank_as_home(prefix), default=None)

    def find_home(self, prefix: int | None) -> int:
        """Return the mask with the bit of the prefix's home; 0 without a prefix or an engine."""
        if prefix is None:
            return 0
        home = max(self._ready.find_near(prefix), key=lambda engine: engine.rank_as_home(prefix), default=None)
        return 0 if home is None else home.bit

    def occupy_granted(self, engine: Engine, now_seconds: float) -> bool:
        """Occupy the place that `engine` has granted; return False if that is not possible.

        The load may exceed the limit by one, because this gateway may not yet have seen the end of another request.
        """
        self._tick(now_seconds)
        if not self._may_be_queried(engine) or engine.load > self.place_limit:
            return False
        self._occupy(engine)
        return True

    def _occupy(self, engine: Engine) -> None:
        self._choices += 1
        engine.last_chosen = self._choices
        self._change_load(engine, 1)
        if engine.unreachable:
            self._leave_out_until(engine, self._now + PROBE_SECONDS)

    def _change_load(self, engine: Engine, change: int) -> None:
        engine.load += change
        if engine.ready:
            self._ready_load += change
        self._rank(engine)

    def _leave_out_until(self, engine: Engine, at_seconds: float) -> None:
        engine.left_out_until = at_seconds
        self._left_out.note(engine)
        self._rank(engine)

    def _may_be_queried(self, engine: Engine) -> bool:
        return engine.ready and engine.left_out_until <= self._now

    def _has_place(self, engine: Engine) -> bool:
        is_free = engine.load < self.place_limit and engine not in self._occupied
        return is_free and self._may_be_queried(engine)

    def find_unqueried(self, now_seconds: float) -> list[Engine]:
        """Return the engines that `dispatcher` may query for a place, because all their places are taken."""
        self._tick(now_seconds)
        return [each for each in self._unqueried if self._may_be_queried(each)]

    def note_queried(self, engine: Engine) -> None:
        """Record that a query to `engine` is open."""
        self._unqueried.pop(engine, None)

    def release(self, engine: Engine) -> None:
        """Free one place that `choose` occupied."""
        assert engine.load > 0, "each place is freed only once"
        self._change_load(engine, -1)
        self._drop_if_unused(engine)

    def leave_out(self, engine: Engine, now_seconds: float, unreachable: bool = False) -> None:
        """Leave out `engine` for a while after it rejected a request or failed. Simultaneous failures count as one."""
        self._tick(now_seconds)
        engine.unreachable = unreachable
        if engine.left_out_until > now_seconds:
            return
        engine.failures += 1
        self._leave_out_until(engine, now_seconds + left_out_seconds(engine.failures))

    def note_full(self, engine: Engine, now_seconds: float) -> None:
        """Record that `engine` had no room for a request. It may have room for smaller ones, so it is chosen last."""
        self._tick(now_seconds)
        engine.refusals += 1
        engine.full_until = now_seconds + left_out_seconds(engine.refusals)
        self._full.note(engine)
        self._rank(engine)

    def note_no_place(self, engine: Engine) -> None:
        """Record that all places of `engine` are taken, maybe by other gateways.

        Requests now wait until the engine grants a place.
        """
        self._occupied[engine] = self._unqueried[engine] = None
        self._rank(engine)

    def note_place_answer(self, engine: Engine, queries_again: bool) -> None:
        """Record that `engine` has answered a query for a place.

        Requests are sent to the engine without a query from now on, unless another query follows (`queries_again`).
        In the modes that fill batches, `queries_again` has no effect: the engine may already fill another batch.
        """
        if not queries_again or self.fills_batches:
            self._occupied.pop(engine, None)
            self._unqueried.pop(engine, None)
            self._rank(engine)
        elif engine in self._occupied:
            self._unqueried[engine] = None

    def note_answer(self, engine: Engine) -> None:
        """Record that `engine` answered: reset its failures, and send it further requests if this was a probe."""
        if not (engine.unreachable or engine.failures or engine.refusals):
            return
        if engine.unreachable:
            engine.unreachable, engine.left_out_until = False, 0.0
        engine.failures, engine.refusals, engine.full_until = 0, 0, 0.0
        self._rank(engine)

    def next_return_seconds(self, now_seconds: float) -> float | None:
        """Return the time at which the next left-out engine is used again; None if no engine is left out."""
        self._tick(now_seconds)
        return self._left_out.next_end()

    def _drop_if_unused(self, engine: Engine) -> None:
        if not engine.ready and engine.load == 0 and self._engines.pop(engine.address, None) is not None:
            heapq.heappush(self._free_bits, engine.bit)
            self._occupied.pop(engine, None)
            self._unqueried.pop(engine, None)
            engine.left_out_until = engine.full_until = 0.0  # ends its pauses

    def _allocate_bit(self) -> int:
        """Return the lowest bit that no engine has, so that masks stay short.

        A request that excluded the bit's previous engine also excludes the new one, until the request's pause ends.
        """
        if self._free_bits:
            return heapq.heappop(self._free_bits)
        return 1 << (NUM_RESERVED_BITS + len(self._engines))
