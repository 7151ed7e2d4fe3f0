"""Which engine takes the next request: the one that has the fewest of this gateway's, below its place limit.

Used by `admission` only. Pure bookkeeping on a clock that the caller reads: no I/O, no waiting.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

# An engine that refused or broke a connection is left out this long, doubled for each time in a row.
LEFT_OUT_SECONDS: Final = 0.1
MAX_LEFT_OUT_SECONDS: Final = 2.0
# An engine that took no connection in time gets one request, and the next when that is answered or has surely failed.
PROBE_SECONDS: Final = 4.0


@dataclass(slots=True, eq=False)
class Engine:
    """One engine as this gateway sees it. `load` counts its places that are taken by requests of this gateway."""

    address: str
    load: int = 0
    ready: bool = True
    failures: int = 0  # in a row
    left_out_until: float = 0.0
    full_for: int | None = None  # the number of the request that it had no room for, until it answers one
    last_chosen: int = 0
    unreachable: bool = False  # the last request that it did not take could not connect in time


class EnginePool:
    """The engines of one service. Engines that are no longer ready stay until their last request has ended."""

    def __init__(self) -> None:
        self.place_limit = 1
        self._engines: dict[str, Engine] = {}
        self._choices = 0

    @property
    def num_ready(self) -> int:
        return sum(engine.ready for engine in self._engines.values())

    def set_ready(self, addresses: Iterable[str]) -> None:
        """`addresses` are the engines that take new requests from now on."""
        wanted = set(addresses)
        for address in wanted:
            self._engines.setdefault(address, Engine(address)).ready = True
        for engine in list(self._engines.values()):
            engine.ready = engine.address in wanted
            self._forget_if_unused(engine)

    def choose(self, now_seconds: float, but: Collection[Engine] = ()) -> Engine | None:
        """A place on the least loaded engine (of several: the one chosen longest ago), or None if there is no place.

        `but` are engines that this one request does not go to.
        """
        best: Engine | None = None
        for engine in self._engines.values():
            is_free = engine.load < self.place_limit and engine.left_out_until <= now_seconds
            if engine.ready and is_free and engine not in but:
                rank = (engine.load, engine.last_chosen)
                if best is None or rank < (best.load, best.last_chosen):
                    best = engine
        if best is not None:
            self._choices += 1
            best.last_chosen = self._choices
            best.load += 1
            if best.unreachable:
                best.left_out_until = now_seconds + PROBE_SECONDS
        return best

    def release(self, engine: Engine) -> None:
        """Gives back one place that `choose` gave."""
        assert engine.load > 0, "a place is given back once"
        engine.load -= 1
        self._forget_if_unused(engine)

    def leave_out(self, engine: Engine, now_seconds: float, unreachable: bool = False) -> None:
        """`engine` did not take a request: others are asked for a while. Failures of one moment count as one."""
        engine.unreachable = unreachable
        if engine.left_out_until > now_seconds:
            return
        engine.failures += 1
        pause = min(LEFT_OUT_SECONDS * 2 ** min(engine.failures - 1, 10), MAX_LEFT_OUT_SECONDS)
        engine.left_out_until = now_seconds + pause

    def note_full(self, engine: Engine, number: int, now_seconds: float) -> None:
        """`engine` has no room for the request `number`, which may want more of it than others do.

        It is left out for all when it refuses a second request without having answered one in between.
        """
        if engine.full_for not in (None, number):
            self.leave_out(engine, now_seconds)
        engine.full_for = number

    def praise(self, engine: Engine) -> None:
        """`engine` answered: its failures are forgotten, and others need not wait for what became of its probe."""
        if engine.unreachable:
            engine.unreachable, engine.left_out_until = False, 0.0
        engine.failures, engine.full_for = 0, None

    def next_return_seconds(self, now_seconds: float) -> float | None:
        """When the first of the engines that are left out is back; None if none is."""
        returns = [engine.left_out_until for engine in self._engines.values() if engine.left_out_until > now_seconds]
        return min(returns, default=None)

    def _forget_if_unused(self, engine: Engine) -> None:
        if not engine.ready and engine.load == 0:
            self._engines.pop(engine.address, None)
