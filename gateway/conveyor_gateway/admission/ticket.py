"""One request in the queue of its service, from its admission to its end, whatever that is.

Made by `service_queue`, used by `relaying`.
"""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from conveyor_gateway.admission.engine_pool import NUM_RESERVED_BITS, Engine, EnginePool, left_out_seconds
from conveyor_gateway.errors import Code, GatewayError, TimedOut

# Bits of `Ticket.excluded` that stand for no engine: what the ticket is no longer.
FIRST_TRY: Final = 1  # it has been sent to an engine
UNREFUSED: Final = 2  # an engine has refused it, or has failed with it
_NO_ENGINES: Final = (1 << NUM_RESERVED_BITS) - 1


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What a service allows this gateway; `place_limit` is the number of requests on one engine.

    `fills_batches`: an engine's batch is filled before the next engine begins one.
    """

    max_queued_requests: int
    queue_timeout_seconds: float
    place_limit: int
    fills_batches: bool = False


class TicketState(Enum):
    QUEUED = auto()
    DISPATCHED = auto()
    CLOSED = auto()


class Queue(Protocol):
    """The queue as its tickets need it."""

    loop: asyncio.AbstractEventLoop
    pool: EnginePool
    limits: QueueLimits

    @property
    def num_engines(self) -> int: ...

    def check_open(self) -> None: ...

    def note_answer(self, engine: Engine) -> None: ...

    def take_back(self, ticket: "Ticket") -> None: ...

    def finish(self, ticket: "Ticket") -> None: ...


class Ticket:
    """One admitted request. Whoever admits it closes it, whatever happens; closing twice is closing once."""

    __slots__ = (
        "_grant",
        "_queue",
        "_times_full",
        "admitted_at",
        "deadline",
        "engine",
        "excluded",
        "full_until",
        "is_granted",
        "number",
        "state",
        "waited_seconds",
    )

    def __init__(self, queue: Queue, number: int, deadline: float) -> None:
        self._queue = queue
        self.number = number  # those who came earlier have lower ones
        self._grant: asyncio.Future[None] | None = None
        self.admitted_at = queue.loop.time()
        self.deadline = deadline  # on the loop's clock
        self.state = TicketState.QUEUED
        self.engine: Engine | None = None
        self.is_granted = False  # the engine has kept the place
        self.waited_seconds = 0.0
        self.excluded = 0  # the bits of engines without room for this request, and of what it is no longer
        self._times_full = 0
        self.full_until = 0.0

    async def place(self) -> Engine:
        """The engine that takes the request; waits for its turn.

        Raises TimedOut, or the error that the queue was closed with. Waits after `give_back` count together.
        """
        if self.engine is None:
            await self._wait()
        assert self.engine is not None
        return self.engine

    async def _wait(self) -> None:
        self._queue.check_open()
        loop = self._queue.loop
        began = loop.time()
        limit_seconds = self._queue.limits.queue_timeout_seconds
        queue_until = began + limit_seconds - self.waited_seconds
        self._grant = loop.create_future()
        try:
            async with asyncio.timeout_at(min(self.deadline, queue_until)):
                await self._grant
        except TimeoutError:
            engines = f"{self._queue.num_engines} engines are ready"
            if self.deadline <= queue_until:  # not by the clock: uvloop rounds timers to milliseconds, also down
                message = f"the request's time ended while it waited for an engine; {engines}"
                raise TimedOut(message, Code.DEADLINE_EXCEEDED) from None
            message = f"no engine had a place for the request within {limit_seconds:g} s; {engines}"
            raise TimedOut(message, Code.QUEUE_TIMEOUT) from None
        finally:
            self.waited_seconds += loop.time() - began

    def grant(self, engine: Engine, is_granted: bool) -> None:
        """Called by the queue: there is a place on `engine` for this request, which the engine may have kept."""
        self.engine, self.state, self.is_granted = engine, TicketState.DISPATCHED, is_granted
        if self._grant is not None and not self._grant.done():
            self._grant.set_result(None)

    def refuse(self, error: GatewayError) -> None:
        """Called by the queue when it ends: the request will not be taken."""
        if self._grant is not None and not self._grant.done():
            self._grant.set_exception(error)

    def note_failure(self, unreachable: bool = False) -> None:
        """The engine failed (`unreachable`: it took no connection in time) and is left out for a while."""
        assert self.engine is not None, "only a dispatched request has an engine"
        self.excluded |= FIRST_TRY | UNREFUSED
        self._queue.pool.leave_out(self.engine, self._queue.loop.time(), unreachable)

    def note_full(self) -> None:
        """The engine had no room for this request, which goes to other engines, for longer each time.

        Other requests may still go to that engine: it may have room for their choices.
        """
        assert self.engine is not None, "only a dispatched request has an engine"
        now = self._queue.loop.time()
        if now >= self.full_until:
            self.end_exclusions()
        self.excluded |= self.engine.bit | FIRST_TRY | UNREFUSED
        self._times_full += 1
        self.full_until = now + left_out_seconds(self._times_full)
        self._queue.pool.note_full(self.engine, now)

    def note_no_place(self) -> None:
        """All places of the engine are taken: it is asked for one. If it had granted this one, it is full instead."""
        assert self.engine is not None, "only a dispatched request has an engine"
        if self.is_granted:
            self.note_full()
        self.excluded |= FIRST_TRY
        self._queue.pool.note_no_place(self.engine)

    def end_exclusions(self) -> None:
        """The request may go to any engine again."""
        self.excluded &= _NO_ENGINES

    def note_answer(self) -> None:
        """The engine answered: if it was left out, it is back."""
        assert self.engine is not None, "only a dispatched request has an engine"
        self._queue.note_answer(self.engine)

    def give_back(self) -> None:
        """The engine did not take the request: queue again, before all who came later."""
        self._queue.take_back(self)

    def close(self) -> None:
        """The request has ended, or will not be: frees its place in the queue or on the engine."""
        self._queue.finish(self)
