"""The bounded queue of one service, and what becomes of each ticket in it.

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
from itertools import takewhile

from conveyor_gateway.admission.asking import Asking, Granting
from conveyor_gateway.admission.engine_pool import Engine, EnginePool
from conveyor_gateway.admission.ticket import QueueLimits, Ticket, TicketState
from conveyor_gateway.errors import Code, GatewayError, QueueFull


class ServiceQueue:
    """Requests of one service that wait for an engine, in order, and the engines that they wait for."""

    def __init__(self, limits: QueueLimits, loop: asyncio.AbstractEventLoop, granting: Granting) -> None:
        self.loop = loop
        self.pool = EnginePool()
        self._asking = Asking(granting, self._take_answer)
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
        self.pool.place_limit, self.pool.fills_batches = limits.place_limit, limits.fills_batches
        self.match()

    def set_engines(self, addresses: Iterable[str]) -> None:
        """`addresses` (`host:port`) take new requests from now on; requests already at others go on there."""
        had_engines = bool(self.num_engines)
        self.pool.set_ready(addresses)
        if not had_engines:
            self._idle_since = self.loop.time()
        self.match()

    def admit(self, deadline: float) -> Ticket:
        """A ticket at the tail of the queue; with a free place, already dispatched. Raises QueueFull.

        `deadline` is on the loop's clock. Also raises the error that the queue was closed with.
        """
        self.check_open()
        self._admitted += 1
        ticket = Ticket(self, self._admitted, deadline)
        self._waiting[ticket] = None
        self.match()
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
        self.match()

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
        self.match()

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
        self._asking.stop()

    def _release(self, ticket: Ticket) -> None:
        assert ticket.engine is not None
        self.pool.release(ticket.engine)
        ticket.engine = None
        self._dispatched.remove(ticket)

    def match(self) -> None:
        """Gives places to the head of the queue, as long as there are any, and asks for more."""
        if self._closed_by is not None:
            return
        now = self.loop.time()
        self._bind(now)
        if self._waiting:
            self._match_again(now)
        self._asking.ask(self.pool.find_taken(now))

    def _bind(self, now: float) -> None:
        while (match := self._find_match(now)) is not None:
            ticket, engine = match
            del self._waiting[ticket]
            self._dispatched.add(ticket)
            ticket.grant(engine)

    def _take_answer(self, engine: Engine, granted: bool) -> bool:
        """Whether a request uses the place that `engine` has kept. One that keeps none is left out for a while."""
        now = self.loop.time()
        engine.is_granted = granted
        if not granted:
            self.pool.leave_out(engine, now)
        elif self._closed_by is None:
            self._bind(now)
        is_used = granted and not engine.is_granted
        engine.is_granted = False
        # If not, the next requests try it again: also where it may have begun to fill a batch.
        engine.is_taken = is_used and bool(self._waiting) and not self.limits.fills_batches
        self.match()
        return is_used

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
        self._wake_up = self.loop.call_at(min(returns), self.match) if returns else None
