"""Grants places in this engine to gateways. A gateway needs a place before it sends a request.

A place is the right to send this engine one HTTP request. There are as many places as slots in the batch, and a few
more beyond the batch, so that the next request is already here when a slot becomes free. Requests without a place wait
in the gateway, from where they can still go to another engine. Owned by `engine_client`.

If no place is free, the gateway's request for a place is queued. The queue is in the order of arrival, but a request
of level n counts as if it had arrived n * `LEVEL_AGEING_SECONDS` later, as in the scheduler. A place that is granted
but not used is granted again. Requests without the header X-Engine-Place do not come from gateways, and are not counted
here.

In the modes that fill batches (Static, Dynamic), there are no places while a batch runs, and none beyond the batch. If
requests could come while a batch runs, their batching windows would be over when the batch ends. They would then start
the next batch without the requests that still wait in the gateway.
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

QUEUED_REQUESTS_MAX: Final = 256  # requests for a place that may be queued
GRANT_SECONDS: Final = 1.0  # a request must arrive within this time after its grant; far more than a round trip
# How long a gateway's request for a place is queued before it may get one beyond the batch. Meanwhile another engine
# may grant the gateway a place in its batch.
BEYOND_SECONDS: Final = 0.02


class Places:
    """The places of this engine. An HTTP request holds one place, however many engine requests it consists of."""

    def __init__(self, batch_size: int, fills: bool = False) -> None:
        """fills: the mode first fills a batch and then runs it, so that no request joins a running batch."""
        self.batch_size = batch_size
        self._fills = fills
        self._is_running = False
        self._open: dict[str, set[str]] = {}  # by engine request id: the open engine requests of its HTTP request
        self._num_held = 0
        self._num_arriving = 0
        self._granted: deque[asyncio.TimerHandle] = deque()  # granted places that are not used yet, oldest first
        self._line: list[tuple[float, int, asyncio.Future[None]]] = []  # the queue; the number makes entries unique
        self._numbers = count()
        self._patient: set[asyncio.Future[None]] = set()  # entries of the queue that may get a place beyond the batch

    @property
    def _num_taken(self) -> int:
        return self._num_held + self._num_arriving + len(self._granted)

    @property
    def _limit(self) -> int:
        """The number of places now, without those beyond the batch."""
        return 0 if self._fills and self._is_running and self._num_held else self.batch_size

    def observe_step(self, num_running: int) -> None:
        """Grant places that a step has freed. Call after each step, with the number of running engine requests."""
        self._is_running = num_running > 0
        self._grant()

    @contextmanager
    def reserve(self, condition: str | None) -> Iterator[None]:
        """Reserve a place for an arriving request. Raises NoPlace.

        condition: the value of the header X-Engine-Place; a request without this header (None) is not counted.
        """
        if condition is None:
            yield
            return
        if condition == PLACE_GRANTED and self._granted:
            self._granted.popleft().cancel()
        elif self._num_taken >= self._limit:
            raise NoPlace("no place is free in the batch; wait for one with GET /place")
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1
            self._grant()

    def hold(self, request_ids: Iterable[str]) -> None:
        """Give a place to an HTTP request that has arrived and consists of these engine requests."""
        party = set(request_ids)
        self._open.update(dict.fromkeys(party, party))
        self._num_held += 1

    def join(self, request_id: str, others: Iterable[str]) -> None:
        """Add engine requests to the HTTP request of `request_id`. Does nothing if that HTTP request has no place."""
        if (party := self._open.get(request_id)) is not None:
            party.update(others)
            self._open.update(dict.fromkeys(others, party))

    def release(self, request_id: str) -> None:
        """Record that an engine request has ended. Does nothing if its HTTP request has no place."""
        party = self._open.pop(request_id, None)
        if party is None:
            return
        party.remove(request_id)
        if not party:
            self._num_held -= 1
            self._grant()

    async def request(self, level: int = 0) -> None:
        """Wait until a place is granted to a request of this level. Raises Overloaded, or the error of `close`."""
        if len(self._line) >= QUEUED_REQUESTS_MAX:
            raise Overloaded(f"{QUEUED_REQUESTS_MAX} requests for a place are waiting already")
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
        """End all waits for a place with this error."""
        while self._line:
            _, _, turn = self._line.pop(0)
            if not turn.done():
                turn.set_exception(error)

    def _grant(self) -> None:
        loop = asyncio.get_running_loop()
        while self._line and self._num_taken < self._limit_of(self._line[0][2]):
            _, _, turn = self._line.pop(0)
            if not turn.done():  # the gateway has not given up
                turn.set_result(None)
                self._granted.append(loop.call_later(GRANT_SECONDS, self.give_back))

    def _limit_of(self, turn: asyncio.Future[None]) -> int:
        beyond = max(1, self.batch_size // 8) if turn in self._patient and not self._fills else 0
        return self._limit + beyond
