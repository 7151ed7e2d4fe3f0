"""The places of this engine, which gateways ask for, so that a request waits where it may still go to another engine.

Owned by `engine_client`. A place is one in the batch, or one of a few beyond it: what has those is here already when a
place in the batch becomes free. Who finds none free asks, and stands in line, in the order of the scheduler: by level,
and a level yields to a better one for `LEVEL_AGEING_SECONDS` only. What was granted and is not taken is granted again.
Requests without a word of places come from others than gateways, and are not counted here.

Where nobody joins a batch that runs (Static, Dynamic), there are places in the one that fills, and none beyond it: what
came early would begin the next batch alone.
"""

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

from conveyor_engine.errors import NoPlace, Overloaded
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS, PLACE_GRANTED

ASKERS_MAX: Final = 256
GRANT_SECONDS: Final = 1.0  # in which the request has to come; far more than a round trip
BEYOND_SECONDS: Final = 0.02  # until who asks may have a place beyond the batch: another engine's may have one in it


class Places:
    """Each HTTP request has one place, however many engine requests it is: those take turns in the batch."""

    def __init__(self, batch_size: int, fills: bool = False) -> None:
        """`fills`: nobody joins a batch that runs."""
        self.batch_size = batch_size
        self._fills = fills
        self._is_running = False
        self._open: dict[str, set[str]] = {}  # by the id of an engine request, those of its HTTP request that are open
        self._num_held = 0
        self._num_arriving = 0
        self._granted: deque[asyncio.TimerHandle] = deque()  # not taken yet, oldest first
        self._line: list[tuple[float, int, asyncio.Future[None]]] = []  # in order; the number makes keys differ
        self._numbers = count()
        self._patient: set[asyncio.Future[None]] = set()  # of those in line; they may have places beyond the batch

    @property
    def _num_taken(self) -> int:
        return self._num_held + self._num_arriving + len(self._granted)

    @property
    def _limit(self) -> int:
        """The number of places in the batch."""
        return 0 if self._fills and self._is_running and self._num_held else self.batch_size

    def observe_step(self, num_running: int) -> None:
        """So many engine requests run."""
        self._is_running = num_running > 0
        self._grant()

    @contextmanager
    def reserve(self, wish: str | None) -> Iterator[None]:
        """A place for a request that arrives, with its header; None is not counted. Raises NoPlace."""
        if wish is None:
            yield
            return
        if wish == PLACE_GRANTED and self._granted:
            self._granted.popleft().cancel()
        elif self._num_taken >= self._limit:
            raise NoPlace("no place is free in the batch; ask for one")
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1
            self._grant()

    def hold(self, request_ids: Iterable[str]) -> None:
        """The request that these are has arrived."""
        party = set(request_ids)
        self._open.update(dict.fromkeys(party, party))
        self._num_held += 1

    def release(self, request_id: str) -> None:
        """One has ended; it may be of a request without a place."""
        party = self._open.pop(request_id, None)
        if party is None:
            return
        party.remove(request_id)
        if not party:
            self._num_held -= 1
            self._grant()

    async def ask(self, level: int = 0) -> None:
        """Returns when a place is granted to a request of this level. Raises Overloaded, or what closed the line."""
        if len(self._line) >= ASKERS_MAX:
            raise Overloaded(f"{ASKERS_MAX} gateways ask for a place already")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        entry = (loop.time() + level * LEVEL_AGEING_SECONDS, next(self._numbers), turn)
        insort(self._line, entry)
        self._grant()
        timer = loop.call_later(BEYOND_SECONDS, self._wait_no_longer, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back()
            raise
        finally:
            timer.cancel()
            self._patient.discard(turn)
            if entry in self._line:
                self._line.remove(entry)

    def _wait_no_longer(self, turn: asyncio.Future[None]) -> None:
        self._patient.add(turn)
        self._grant()

    def give_back(self) -> None:
        """Return a granted place that is no longer needed."""
        if self._granted:
            self._granted.popleft().cancel()
            self._grant()

    def close(self, error: Exception) -> None:
        """No place will be granted: those in line hear why."""
        while self._line:
            _, _, turn = self._line.pop(0)
            if not turn.done():
                turn.set_exception(error)

    def _grant(self) -> None:
        loop = asyncio.get_running_loop()
        while self._line and self._num_taken < self._limit_of(self._line[0][2]):
            _, _, turn = self._line.pop(0)
            if not turn.done():  # it has not left
                turn.set_result(None)
                self._granted.append(loop.call_later(GRANT_SECONDS, self.give_back))

    def _limit_of(self, turn: asyncio.Future[None]) -> int:
        beyond = max(1, self.batch_size // 8) if turn in self._patient and not self._fills else 0
        return self._limit + beyond
