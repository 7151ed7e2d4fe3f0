"""The bounded queue of one service, and the ticket of each request in it.

    admit -> QUEUED --place()--> DISPATCHED --close()--> CLOSED
                ^                    |
                +----- give_back ----+          (the engine did not take it: to its old place in the queue)

Called by `queues` (one queue per service, configured from the catalog) and by `relaying` (one ticket per request).
Binding is late: a request gets its engine when an engine has a place, not when it arrives. Everything runs on one
event loop, so nothing here locks; each method leaves queue and engines consistent before it returns.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import takewhile

from conveyor_gateway.admission.engine_pool import Engine, EnginePool, left_out_seconds
from conveyor_gateway.errors import Code, GatewayError, QueueFull, TimedOut


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What a service allows this gateway; `place_limit` is the number of requests on one engine."""

    max_queued_requests: int
    queue_timeout_seconds: float
    place_limit: int


class TicketState(Enum):
    QUEUED = auto()
    DISPATCHED = auto()
    CLOSED = auto()


class Ticket:
    """One admitted request. Whoever admits it closes it, whatever happens; closing twice is closing once."""

    __slots__ = (
        "_full_engines",
        "_grant",
        "_queue",
        "_times_full",
        "admitted_at",
        "deadline",
        "engine",
        "full_until",
        "number",
        "state",
        "waited_seconds",
    )

    def __init__(self, queue: "ServiceQueue", number: int, deadline: float) -> None:
        self._queue = queue
        self.number = number  # those who came earlier have lower ones
        self._grant: asyncio.Future[None] | None = None
        self.admitted_at = queue.loop.time()
        self.deadline = deadline  # on the loop's clock
        self.state = TicketState.QUEUED
        self.engine: Engine | None = None
        self.waited_seconds = 0.0
        self._full_engines: frozenset[Engine] = frozenset()  # without room for this request
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

    def grant(self, engine: Engine) -> None:
        """Called by the queue: `engine` has kept a place for this request."""
        self.engine, self.state = engine, TicketState.DISPATCHED
        if self._grant is not None and not self._grant.done():
            self._grant.set_result(None)

    def refuse(self, error: GatewayError) -> None:
        """Called by the queue when it ends: the request will not be taken."""
        if self._grant is not None and not self._grant.done():
            self._grant.set_exception(error)

    def note_failure(self, unreachable: bool = False) -> None:
        """The engine failed (`unreachable`: it took no connection in time) and is left out for a while."""
        assert self.engine is not None, "only a dispatched request has an engine"
        self._queue.pool.leave_out(self.engine, self._queue.loop.time(), unreachable)

    def note_full(self) -> None:
        """The engine had no room for this request, which goes to other engines, for longer each time.

        Other requests may still go to that engine: it may have room for their choices.
        """
        assert self.engine is not None, "only a dispatched request has an engine"
        now = self._queue.loop.time()
        self._full_engines = self.full_engines(now) | {self.engine}
        self._times_full += 1
        self.full_until = now + left_out_seconds(self._times_full)
        self._queue.pool.note_full(self.engine, now)

    def full_engines(self, now: float) -> frozenset[Engine]:
        """The engines that this request is not sent to now."""
        return self._full_engines if now < self.full_until else frozenset()

    def note_answer(self) -> None:
        """The engine answered: if it was left out, it is back."""
        assert self.engine is not None, "only a dispatched request has an engine"
        self._queue.pool.note_answer(self.engine)
        self._queue._match()

    def give_back(self) -> None:
        """The engine did not take the request: queue again, before all who came later."""
        self._queue.take_back(self)

    def close(self) -> None:
        """The request has ended, or will not be: frees its place in the queue or on the engine."""
        self._queue.finish(self)


class ServiceQueue:
    """Requests of one service that wait for an engine, in order, and the engines that they wait for."""

    def __init__(self, limits: QueueLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.pool = EnginePool()
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()
        self._closed_by: GatewayError | None = None
        self._wake_up: asyncio.TimerHandle | None = None
        self._admitted = 0
        self._dispatched: set[Ticket] = set()
        self._idle_since = loop.time()
        self.configure(limits)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def dispatched(self) -> int:
        return len(self._dispatched)

    @property
    def num_engines(self) -> int:
        return self.pool.num_ready

    @property
    def idle_seconds(self) -> float:
        """Since the last request ended, or since the first engine came after none, whichever is later."""
        return 0.0 if self._waiting or self._dispatched else self.loop.time() - self._idle_since

    def count_waiting_beyond(self, window_seconds: float) -> int:
        """Queued requests that were admitted more than `window_seconds` ago; a window of 0 counts all."""
        before = self.loop.time() - window_seconds
        return sum(ticket.admitted_at <= before for ticket in self._waiting)

    def count_dispatched_beyond(self, window_seconds: float) -> dict[str, int]:
        """By engine's address, its requests that were admitted more than `window_seconds` ago; not if there are none.

        One that is younger may only wait for others to come into its batch.
        """
        before = self.loop.time() - window_seconds
        engines = [ticket.engine for ticket in self._dispatched if ticket.admitted_at <= before]
        return dict(Counter(engine.address for engine in engines if engine is not None))

    def configure(self, limits: QueueLimits) -> None:
        """Takes changed limits. Those who wait already stay, even above a lowered limit."""
        self.limits = limits
        self.pool.place_limit = limits.place_limit
        self._match()

    def set_engines(self, addresses: Iterable[str]) -> None:
        """`addresses` (`host:port`) take new requests from now on; requests already at others go on there."""
        had_engines = bool(self.num_engines)
        self.pool.set_ready(addresses)
        if not had_engines:
            self._idle_since = self.loop.time()
        self._match()

    def admit(self, deadline: float) -> Ticket:
        """A ticket at the tail of the queue; with a free place, already dispatched. Raises QueueFull.

        `deadline` is on the loop's clock. Also raises the error that the queue was closed with.
        """
        self.check_open()
        self._admitted += 1
        ticket = Ticket(self, self._admitted, deadline)
        self._waiting[ticket] = None
        self._match()
        if ticket.state is TicketState.QUEUED and self.queued > self.limits.max_queued_requests:
            self.finish(ticket)
            raise QueueFull(
                f"{self.limits.max_queued_requests} requests wait here already, this gateway's share of "
                "queue.maxRequests",
                Code.QUEUE_FULL,
            )
        return ticket

    def take_back(self, ticket: Ticket) -> None:
        """See `Ticket.give_back`."""
        assert ticket.state is TicketState.DISPATCHED, "only a dispatched request comes back"
        self._release(ticket)
        ticket.state = TicketState.QUEUED
        earlier = list(takewhile(lambda waiting: waiting.number < ticket.number, self._waiting))
        self._waiting[ticket] = None
        for first in (ticket, *reversed(earlier)):
            self._waiting.move_to_end(first, last=False)
        self._match()

    def finish(self, ticket: Ticket) -> None:
        """See `Ticket.close`."""
        if ticket.state is TicketState.CLOSED:
            return
        if ticket.state is TicketState.QUEUED:
            del self._waiting[ticket]
        else:
            self._release(ticket)
        ticket.state = TicketState.CLOSED
        self._idle_since = self.loop.time()
        self._match()

    def check_open(self) -> None:
        """Raises the error that the queue was closed with."""
        if self._closed_by is not None:
            raise self._closed_by

    def close(self, error: GatewayError) -> None:
        """Ends the queue: those who wait, and those who come, get `error`; those at engines go on."""
        self._closed_by = error
        for ticket in list(self._waiting):
            ticket.refuse(error)
        if self._wake_up is not None:
            self._wake_up.cancel()

    def _release(self, ticket: Ticket) -> None:
        assert ticket.engine is not None
        self.pool.release(ticket.engine)
        ticket.engine = None
        self._dispatched.remove(ticket)

    def _match(self) -> None:
        """Gives places to the head of the queue, as long as there are any."""
        if self._closed_by is not None:
            return
        now = self.loop.time()
        while (match := self._find_match(now)) is not None:
            ticket, engine = match
            del self._waiting[ticket]
            self._dispatched.add(ticket)
            ticket.grant(engine)
        if self._waiting:
            self._match_again(now)

    def _find_match(self, now: float) -> tuple[Ticket, Engine] | None:
        """The first request for which an engine has a place. Only requests that full engines refused are overtaken."""
        for ticket in self._waiting:
            full_engines = ticket.full_engines(now)
            engine = self.pool.choose(now, full_engines)
            if engine is not None:
                return ticket, engine
            if not full_engines:
                return None
        return None

    def _match_again(self, now: float) -> None:
        """Sets a timer for the return of a left-out engine, which no event announces."""
        if self._wake_up is not None:
            self._wake_up.cancel()
        left_out = takewhile(lambda ticket: ticket.full_engines(now), self._waiting)
        returns = [ticket.full_until for ticket in left_out]
        if (back := self.pool.next_return_seconds(now)) is not None:
            returns.append(back)
        self._wake_up = self.loop.call_at(min(returns), self._match) if returns else None
