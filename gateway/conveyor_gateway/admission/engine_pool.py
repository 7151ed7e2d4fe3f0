"""Chooses the engine for the next request: the one with the fewest requests of this gateway, below its place limit.

In the modes that fill batches it is the one with the most: an engine that runs a batch rejects requests for the next.

Used by `dispatcher` and `service_queue`, which change an `Engine` through the pool alone. Pure bookkeeping on a clock
that the caller reads: no I/O, no waiting.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# An engine that refused or broke a connection is left out for this time, doubled for each time in a row.
LEFT_OUT_SECONDS: Final = 0.1
MAX_LEFT_OUT_SECONDS: Final = 2.0
# An engine that did not accept a connection in time gets one request. The next follows its answer, or this time.
PROBE_SECONDS: Final = 4.0
# In a mask of engines the lowest bits stand for no engine: `ticket` gives them a meaning.
NUM_RESERVED_BITS: Final = 2


def left_out_seconds(failures: int) -> float:
    """The pause after so many failures in a row."""
    return min(LEFT_OUT_SECONDS * 2.0 ** min(failures - 1, 10), MAX_LEFT_OUT_SECONDS)


@dataclass(slots=True, eq=False)
class Engine:
    """One engine as this gateway sees it. `load` counts the requests of this gateway that have a place there."""

    address: str
    bit: int  # its own in masks of engines, while the pool knows it
    load: int = 0
    ready: bool = True
    failures: int = 0  # in a row
    left_out_until: float = 0.0
    refusals: int = 0  # rejected requests in a row, for which it had no room
    full_until: float = 0.0
    last_chosen: int = 0
    unreachable: bool = False  # the last failed request could not connect in time
    is_occupied: bool = False  # it reported that all its places are taken: requests wait until it grants one

    def rank(self, now_seconds: float) -> tuple[bool, int, int]:
        """Key for the choice of an engine: the lowest is chosen."""
        return self.full_until > now_seconds, self.load, self.last_chosen

    def rank_to_fill(self, now_seconds: float) -> tuple[bool, int, str]:
        """The key in modes that fill batches: the engine with most requests, and the same one for all gateways."""
        return self.full_until > now_seconds, -self.load, self.address


class EnginePool:
    """The engines of one service. Engines that are no longer ready stay until their last request has ended."""

    def __init__(self) -> None:
        self.place_limit = 1
        self.fills_batches = False
        self._engines: dict[str, Engine] = {}
        self._free_bits: list[int] = []  # a heap: bits of engines that are gone
        self._choices = 0

    def configure(self, place_limit: int, fills_batches: bool) -> None:
        self.place_limit, self.fills_batches = place_limit, fills_batches

    @property
    def num_ready(self) -> int:
        return sum(engine.ready for engine in self._engines.values())

    def set_ready(self, addresses: Iterable[str]) -> None:
        """Sends new requests to `addresses` from now on."""
        wanted = set(addresses)
        for address in sorted(wanted):
            if address not in self._engines:
                self._engines[address] = Engine(address, self._allocate_bit())
            self._engines[address].ready = True
        for engine in list(self._engines.values()):
            engine.ready = engine.address in wanted
            self._drop_if_unused(engine)

    def find_places(self, now_seconds: float) -> int:
        """The mask of the engines that have a place."""
        places = 0
        for engine in self._engines.values():
            if self._has_place(engine, now_seconds):
                places |= engine.bit
        return places

    def choose(self, now_seconds: float, excluded: int = 0) -> Engine | None:
        """Occupies a place on the least loaded engine (of several, the one chosen longest ago). None if none is free.

        An engine that recently had no room comes after all others. Engines in the mask `excluded` are not chosen.
        """
        places = [
            engine
            for engine in self._engines.values()
            if not engine.bit & excluded and self._has_place(engine, now_seconds)
        ]
        rank = Engine.rank_to_fill if self.fills_batches else Engine.rank
        best = min(places, key=lambda engine: rank(engine, now_seconds), default=None)
        if best is not None:
            self._occupy(best, now_seconds)
        return best

    def occupy_granted(self, engine: Engine, now_seconds: float) -> bool:
        """Occupies the place that `engine` has granted, even above the limit: a request may have ended unnoticed."""
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
        is_free = engine.load < self.place_limit and not engine.is_occupied
        return is_free and self._may_be_asked(engine, now_seconds)

    def find_occupied(self, now_seconds: float) -> list[Engine]:
        """The engines whose places are all taken, which have to be asked for one."""
        return [each for each in self._engines.values() if each.is_occupied and self._may_be_asked(each, now_seconds)]

    def release(self, engine: Engine) -> None:
        """Frees one place that `choose` occupied."""
        assert engine.load > 0, "a place is freed once"
        engine.load -= 1
        self._drop_if_unused(engine)

    def leave_out(self, engine: Engine, now_seconds: float, unreachable: bool = False) -> None:
        """Leaves out `engine` for a while, which rejected a request or failed. Simultaneous failures count as one."""
        engine.unreachable = unreachable
        if engine.left_out_until > now_seconds:
            return
        engine.failures += 1
        engine.left_out_until = now_seconds + left_out_seconds(engine.failures)

    def note_full(self, engine: Engine, now_seconds: float) -> None:
        """Notes that `engine` had no room for a request. It may have room for smaller ones, so it is chosen last."""
        engine.refusals += 1
        engine.full_until = now_seconds + left_out_seconds(engine.refusals)

    def note_no_place(self, engine: Engine) -> None:
        """Notes that all places of `engine` are taken, also by other gateways, so it has to be asked for one."""
        engine.is_occupied = True

    def note_place_answer(self, engine: Engine, asks_again: bool) -> None:
        """`engine` has answered a question for a place. Requests go there unasked, unless another question follows.

        Where batches are filled they always do: the engine may fill another batch by now.
        """
        engine.is_occupied = asks_again and not self.fills_batches

    def note_answer(self, engine: Engine) -> None:
        """`engine` answered: resets its failures, and lets other requests follow a probe that is under way."""
        if engine.unreachable:
            engine.unreachable, engine.left_out_until = False, 0.0
        engine.failures, engine.refusals, engine.full_until = 0, 0, 0.0

    def next_return_seconds(self, now_seconds: float) -> float | None:
        """When the first of the engines that are left out is back; None if none is left out."""
        returns = [engine.left_out_until for engine in self._engines.values() if engine.left_out_until > now_seconds]
        return min(returns, default=None)

    def _drop_if_unused(self, engine: Engine) -> None:
        if not engine.ready and engine.load == 0 and self._engines.pop(engine.address, None) is not None:
            heapq.heappush(self._free_bits, engine.bit)

    def _allocate_bit(self) -> int:
        """The lowest that no engine has, so that masks stay short.

        A request that excluded the bit's last engine excludes the new one too, until its next retry at most.
        """
        if self._free_bits:
            return heapq.heappop(self._free_bits)
        return 1 << (NUM_RESERVED_BITS + len(self._engines))
