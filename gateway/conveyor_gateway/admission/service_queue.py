"""The bounded queue of one service, and the states of its tickets.

    admit -> QUEUED --wait_for_engine--> DISPATCHED --finish--> CLOSED
                ^                            |
                +--------- requeue ----------+          (the engine rejected it: back to its old position)

Called by `queues` (one queue per service, configured from the catalog) and by `relaying` (one ticket per request).
Binding is late: a request gets its engine when an engine has a free place, not when it arrives. Everything runs on one
event loop, so no locks are needed.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator

from conveyor_gateway.admission.dispatcher import MAX_WAKES_A_TURN, Dispatcher
from conveyor_gateway.admission.engine_order import Engine
from conveyor_gateway.admission.engine_pool import EnginePool
from conveyor_gateway.admission.limits import QueueLimits
from conveyor_gateway.admission.place_queries import PlaceQueries
from conveyor_gateway.admission.ticket import FIRST_TRY, ONE_TOKEN, UNREFUSED, Ticket, TicketState, Work
from conveyor_gateway.admission.waiting import Waiting
from conveyor_gateway.errors import Code, GatewayError, QueueFull
from conveyor_gateway.watching.classes import UNCLASSED, QueueClass


class ServiceQueue:
    """The requests of one service that wait for an engine, in order, and those at its engines.

    It owns the waiting requests, the engines and the limits. Its dispatcher gives the engines' places to the requests.
    """

    def __init__(self, limits: QueueLimits, loop: asyncio.AbstractEventLoop, engines: PlaceQueries) -> None:
        self.loop = loop
        self.limits = limits
        self.pool = EnginePool()
        self._waiting = Waiting()
        self._dispatcher = Dispatcher(loop, engines, self.pool, self._waiting, limits)
        self._closed_by: GatewayError | None = None
        self._start_failure = ""
        self._admitted = 0
        self._idle_since = loop.time()
        self._started_at = float("-inf")  # when an engine became ready while no other was
        self.configure(limits)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def dispatched(self) -> int:
        return len(self._dispatcher.dispatched)

    @property
    def num_engines(self) -> int:
        return self.pool.num_ready

    @property
    def has_homes(self) -> bool:
        """Whether it matters to which engine a request goes, because another one may have its prefix."""
        return self.num_engines > 1 and not self.pool.fills_batches

    @property
    def idle_seconds(self) -> float:
        """Seconds since the latest of these events: a request ended, or an engine became ready while no other was.

        0 while the queue has requests.
        """
        return 0.0 if self.queued or self.dispatched else self.loop.time() - self._idle_since

    def count_waiting_of(self, level: int) -> int:
        """Number of queued requests of this level, including those moved to it after the timeout of their class."""
        return self._waiting.count(level)

    def find_wait_seconds(self, level: int) -> float:
        """How long the first queued request of this level has waited; 0 without one."""
        first = self._waiting.first_of(level)
        return 0.0 if first is None else self.loop.time() - first.admitted_at

    def list_waiting_clients(self, level: int, most: int) -> list[tuple[str, int, float]]:
        """Return the clients of this level that wait longest, and the one with most requests.

        Each has its number of queued requests, and the seconds that its first one has waited.
        """
        now = self.loop.time()
        found = self._waiting.list_clients(level, most)
        return [(client, number, now - first.admitted_at) for client, number, first in found]

    def count_waiting_beyond(self, window_seconds: float) -> int:
        """Number of queued requests that were admitted more than `window_seconds` ago; a window of 0 counts all."""
        before = self.loop.time() - window_seconds
        return sum(ticket.admitted_at <= before for ticket in self._waiting)

    def count_dispatched_beyond(self, window_seconds: float) -> dict[str, int]:
        """Count the requests at each engine, by address, that were admitted more than `window_seconds` ago.

        A younger request may just be waiting until its batch is full.
        """
        before = self.loop.time() - window_seconds
        tickets = self._dispatcher.dispatched
        return dict(Counter(ticket.bound_engine.address for ticket in tickets if ticket.admitted_at <= before))

    def count_from_start(self) -> int:
        """Number of requests at engines that arrived while no engine was ready."""
        return sum(ticket.admitted_at < self._started_at for ticket in self._dispatcher.dispatched)

    def configure(self, limits: QueueLimits) -> None:
        """Set changed limits. Requests that already wait stay, even above a lowered limit."""
        self.limits = limits
        self.pool.configure(limits.place_limit, limits.fills_batches)
        self._dispatcher.configure(limits)

    def set_engines(self, addresses: Iterable[str]) -> None:
        """Send new requests to `addresses` (`host:port`) from now on. Requests at other engines continue there."""
        had_engines = bool(self.num_engines)
        self.pool.set_ready(addresses)
        if not had_engines:
            self._idle_since = self._started_at = self.loop.time()
        self._refuse_if_failed()
        self._dispatcher.match()

    def set_start_failure(self, reason: str) -> None:
        """Reject waiting and new requests with `reason` while no engine is ready. If `reason` is empty, they wait."""
        if reason != self._start_failure:
            self._start_failure = reason
            self._refuse_if_failed()

    def _refuse_if_failed(self) -> None:
        if self._start_failure and not self.num_engines:
            self._refuse(iter(list(self._waiting)), self._build_start_failure())

    def _build_start_failure(self) -> GatewayError:
        message = f"no engine can start ({self._start_failure}); the owner of the service must fix that"
        return GatewayError(message, Code.START_FAILED)

    def admit(
        self,
        deadline: float,
        request_class: QueueClass = UNCLASSED,
        offset_seconds: float = 0.0,
        prefix: int | None = None,
        client: str = "",
        work: Work = ONE_TOKEN,
    ) -> Ticket:
        """Queue a new request, or dispatch it at once if a place is free. The caller must finish the ticket.

        `deadline` is on the loop's clock. The request counts as if it had arrived `offset_seconds` later (earlier if
        negative). `prefix` is the hashed beginning of its prompt, if engines cache prefixes. `work`: its expected
        tokens, with the most that the answer may have. In a full queue, the new request replaces the last one of a less
        urgent level, or of the client with most requests.
        Raises QueueFull, or the error that the queue was closed with.
        """
        self._check_open()
        self._admitted += 1
        now, level = self.loop.time(), request_class.level
        ticket = Ticket(self._admitted, now, deadline, request_class, level, offset_seconds, client, work)
        ticket.prefix = prefix
        self._dispatcher.enqueue(ticket)
        if ticket.state is TicketState.QUEUED and (error := self._find_full(ticket)) is not None:
            self.finish(ticket)
            raise error
        return ticket

    def _find_full(self, ticket: Ticket) -> QueueFull | None:
        """Make room for a new ticket by removing another one if necessary. Return the error if there is no room."""
        most = ticket.request_class.max_queued_requests
        if most is not None:
            share = max(1, most // self.limits.num_gateways)
            if self._waiting.count(ticket.level) > share:
                field = f"the maxRequests of class {ticket.request_class.name}"
                return self._remove_last(ticket, ticket.level, share, field)
        share = self.limits.max_queued_requests
        if self.queued <= share:
            return None
        return self._remove_last(ticket, None, share, "queue.maxRequests")

    def _remove_last(self, ticket: Ticket, level: int | None, share: int, field: str) -> QueueFull | None:
        """Remove the last ticket of the level, or of all. Return the error if that would be one of `ticket`'s client.

        The last one is of the client with most waiting requests in the level.
        """
        last = self._waiting.last(level)
        if last is None or last.level < ticket.level or (last.level, last.client) == (ticket.level, ticket.client):
            return self._build_full(ticket, share, field)
        error = self._build_full(last, share, field)
        self.finish(last)
        last.refuse(error)
        return None

    def _build_full(self, ticket: Ticket, share: int, field: str) -> QueueFull:
        """Return the error for a queued ticket, with the time after which a similar request would get its turn."""
        seconds = self._dispatcher.estimate_wait_seconds(ticket.level)
        message = f"the queue is full: {share} requests wait, this gateway's share of {field}; retry later"
        return QueueFull(message, Code.QUEUE_FULL, retry_after_seconds=seconds)

    async def wait_for_engine(self, ticket: Ticket) -> Engine:
        """Wait for the request's turn, and return the engine that has a place for it.

        Raises GatewayError, or the error that the queue was closed with. The waits before and after `requeue` count
        together toward the time-out.
        """
        if ticket.engine is None:
            await self._wait(ticket)
        return ticket.bound_engine

    async def _wait(self, ticket: Ticket) -> None:
        self._check_open()
        if ticket.refused_by is not None:
            raise ticket.refused_by
        started = self.loop.time()
        limit_seconds = self._find_timeout_seconds(ticket)
        queue_until = started + limit_seconds - ticket.waited_seconds
        ticket.turn = self.loop.create_future()
        delay = self._plan_delay(ticket)
        try:
            async with asyncio.timeout_at(min(ticket.deadline, queue_until)):
                await ticket.turn
        except TimeoutError:
            engines = f"{self.num_engines} engines are ready"
            if ticket.met_old_engine:
                engines += ", and some do not serve the model yet: the rollout is not complete"
            if ticket.deadline <= queue_until:  # not compared with the clock: uvloop rounds timers, so some end early
                message = f"the request's deadline passed while it waited for an engine; {engines}"
                raise GatewayError(message, Code.DEADLINE_EXCEEDED) from None
            message = f"no engine could take the request within {limit_seconds:g} s; {engines}"
            raise GatewayError(message, Code.QUEUE_TIMEOUT) from None
        finally:
            if delay is not None:
                delay.cancel()
            ticket.waited_seconds += self.loop.time() - started

    def _find_timeout_seconds(self, ticket: Ticket) -> float:
        """Return how long the request may wait: the class's time-out if the class rejects, otherwise the service's."""
        of_class = ticket.request_class.timeout_seconds
        if of_class is None or ticket.request_class.is_delayed:
            return self.limits.queue_timeout_seconds
        return of_class

    def _plan_delay(self, ticket: Ticket) -> asyncio.TimerHandle | None:
        """Delay a waiting request after the timeout of its class."""
        seconds = ticket.request_class.timeout_seconds
        if seconds is None or not ticket.request_class.is_delayed:
            return None
        return self.loop.call_later(seconds - ticket.waited_seconds, self._delay, ticket)

    def _delay(self, ticket: Ticket) -> None:
        """Move a waiting request to the least urgent level."""
        if ticket.state is TicketState.QUEUED:
            self._waiting.remove(ticket)
            ticket.level = max(ticket.level, self.limits.classes.worst_level)
            self._waiting.add(ticket)

    def note_failure(self, ticket: Ticket, unreachable: bool = False) -> None:
        """Leave out the engine for a while, because it failed. `unreachable`: it accepted no connection in time."""
        ticket.excluded |= FIRST_TRY | UNREFUSED
        self.pool.leave_out(ticket.bound_engine, self.loop.time(), unreachable)

    def note_full(self, ticket: Ticket) -> None:
        """Send this request to other engines for a while, because the engine had no room for it.

        Other requests may still be sent to that engine: it may have room for them, for example with fewer choices.
        """
        now = self.loop.time()
        ticket.exclude_engine(now)
        self.pool.note_full(ticket.bound_engine, now)

    def note_behind(self, ticket: Ticket) -> None:
        """Send this request to other engines for a while, because a rollout has yet to replace the engine."""
        ticket.met_old_engine = True
        ticket.exclude_engine(self.loop.time())
        self.pool.note_answer(ticket.bound_engine)

    def note_no_place(self, ticket: Ticket) -> None:
        """Record that all places of the engine are taken.

        If the engine had granted a place to this request, also record that the engine is full.
        """
        if ticket.is_granted:
            self.note_full(ticket)
        ticket.excluded |= FIRST_TRY
        self.pool.note_no_place(ticket.bound_engine)

    def note_answer(self, ticket: Ticket) -> None:
        """Record that the engine answered. If it was left out, it is used again."""
        self.pool.note_answer(ticket.bound_engine)
        self._dispatcher.note_answer()

    def requeue(self, ticket: Ticket) -> None:
        """Put a request that its engine rejected back into the queue, at its old position."""
        self._dispatcher.requeue(ticket)

    def finish(self, ticket: Ticket, used: Work | None = None) -> None:
        """Free the place of a request that has ended, in the queue or on its engine. Later calls have no effect.

        used: the tokens that it used, if they are known.
        """
        if ticket.state is TicketState.CLOSED:
            return
        if ticket.state is TicketState.QUEUED:
            self._waiting.remove(ticket)
        else:
            self._dispatcher.release(ticket, used)
        ticket.state = TicketState.CLOSED
        self._idle_since = self.loop.time()
        self._dispatcher.match()

    def _check_open(self) -> None:
        """Raise the error that the queue was closed with, or the error that no engine can start."""
        if self._closed_by is not None:
            raise self._closed_by
        if self._start_failure and not self.num_engines:
            raise self._build_start_failure()

    def close(self, error: GatewayError) -> None:
        """Reject waiting and new requests with `error`. Requests at engines continue."""
        self._closed_by = error
        self._dispatcher.stop()
        self._refuse(iter(list(self._waiting)), error)

    def _refuse(self, tickets: Iterator[Ticket], error: GatewayError) -> None:
        for number, ticket in enumerate(tickets, start=1):
            ticket.refuse(error)
            if number == MAX_WAKES_A_TURN:
                self.loop.call_soon(self._refuse, tickets, error)
                return
