"""The bounded queue of one service, and what becomes of each ticket in it.

    admit -> QUEUED --place()--> DISPATCHED --close()--> CLOSED
                ^                    |
                +----- give_back ----+          (the engine did not take it: to its old place in the queue)

Called by `queues` (one queue per service, configured from the catalog) and by `relaying` (one ticket per request).
Binding is late: a request gets its engine when an engine has a place, not when it arrives. Everything runs on one
event loop, so nothing here locks; each method leaves queue and engines consistent before it returns.

The event loop serves the other services too. So an event costs by the requests that it wakes, not by those that wait;
one that wakes many is handled over several turns of the loop; and retries have a budget.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from conveyor_gateway.admission.asking import Asking, Granting
from conveyor_gateway.admission.engine_pool import Engine, EnginePool
from conveyor_gateway.admission.retries import Exclusions, RetryBudget
from conveyor_gateway.admission.ticket import FIRST_TRY, UNREFUSED, QueueLimits, Ticket, TicketState
from conveyor_gateway.admission.waiting import Waiting
from conveyor_gateway.errors import Code, GatewayError, QueueFull, Unavailable

# Requests that one turn of the event loop wakes, at most. Each then costs about half a millisecond.
MAX_WAKES_A_TURN: Final = 8


class ServiceQueue:
    """Requests of one service that wait for an engine, in order, and the engines that they wait for."""

    def __init__(self, limits: QueueLimits, loop: asyncio.AbstractEventLoop, granting: Granting) -> None:
        self.loop = loop
        self.pool = EnginePool()
        self._asking = Asking(granting, self._take_answer)
        self._waiting = Waiting()
        self._exclusions = Exclusions()
        self._retries = RetryBudget(loop.time())
        self._closed_by: GatewayError | None = None
        self._start_failure = ""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._goes_on = False  # in the next turn of the loop
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
        self.pool.configure(limits.place_limit, limits.fills_batches)
        self.match()

    def set_engines(self, addresses: Iterable[str]) -> None:
        """`addresses` (`host:port`) take new requests from now on; requests already at others go on there."""
        had_engines = bool(self.num_engines)
        self.pool.set_ready(addresses)
        if not had_engines:
            self._idle_since = self.loop.time()
        self._refuse_if_failed()
        self.match()

    def set_start_failure(self, reason: str) -> None:
        """While no engine is ready, those who wait and those who come are refused with it; empty: they wait."""
        if reason != self._start_failure:
            self._start_failure = reason
            self._refuse_if_failed()

    def _refuse_if_failed(self) -> None:
        if self._start_failure and not self.num_engines:
            self._refuse(iter(list(self._waiting)), self._build_start_failure())

    def _build_start_failure(self) -> GatewayError:
        message = f"no engine can start ({self._start_failure}); its owner has to mend that"
        return Unavailable(message, Code.START_FAILED)

    def admit(self, deadline: float) -> Ticket:
        """A ticket at the tail of the queue; with a free place, already dispatched. Raises QueueFull.

        `deadline` is on the loop's clock. Also raises the error that the queue was closed with.
        """
        self.check_open()
        self._admitted += 1
        ticket = Ticket(self, self._admitted, deadline)
        self._waiting.add(ticket)
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
        if ticket.full_until > self.loop.time():
            self._exclusions.add(ticket)
        else:
            ticket.end_exclusions()
        self._waiting.add(ticket)
        self.match()

    def note_answer(self, engine: Engine) -> None:
        """See `Ticket.note_answer`."""
        self._retries.add_answer()
        self.pool.note_answer(engine)
        self.match()

    def finish(self, ticket: Ticket) -> None:
        """See `Ticket.close`."""
        if ticket.state is TicketState.CLOSED:
            return
        if ticket.state is TicketState.QUEUED:
            self._waiting.remove(ticket)
        else:
            self._release(ticket)
        ticket.state = TicketState.CLOSED
        self._idle_since = self.loop.time()
        self.match()

    def check_open(self) -> None:
        """Raises the error that the queue was closed with, or that of a start that fails."""
        if self._closed_by is not None:
            raise self._closed_by
        if self._start_failure and not self.num_engines:
            raise self._build_start_failure()

    def close(self, error: GatewayError) -> None:
        """Ends the queue: those who wait, and those who come, get `error`; those at engines go on."""
        self._closed_by = error
        if self._timer is not None:
            self._timer.cancel()
        self._asking.stop()
        self._refuse(iter(list(self._waiting)), error)

    def _refuse(self, tickets: Iterator[Ticket], error: GatewayError) -> None:
        for number, ticket in enumerate(tickets, start=1):
            ticket.refuse(error)
            if number == MAX_WAKES_A_TURN:
                self.loop.call_soon(self._refuse, tickets, error)
                return

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
        if self._waiting and not (self._end_exclusions(now) and self._give_places(now)):
            self._go_on_soon()
            return
        self._asking.ask(self.pool.find_occupied(now))
        self._set_timer(now)

    def _go_on_soon(self) -> None:
        if not self._goes_on:
            self._goes_on = True
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self.match()

    def _end_exclusions(self, now: float) -> bool:
        """False: there are more, for the next turn of the loop."""
        for _ in range(MAX_WAKES_A_TURN):
            if (ticket := self._exclusions.take_ended(now)) is None:
                return True
            if ticket.state is TicketState.QUEUED and ticket.full_until <= now:
                self._waiting.remove(ticket)
                ticket.end_exclusions()
                self._waiting.add(ticket)
        return False

    def _give_places(self, now: float) -> bool:
        """False: there may be more, for the next turn of the loop."""
        for _ in range(MAX_WAKES_A_TURN):
            if (ticket := self._find_match(now)) is None:
                return True
            engine = self.pool.choose(now, ticket.excluded)
            assert engine is not None, "the ticket was found for its place"
            if ticket.excluded & FIRST_TRY:
                self._retries.take(now)
            self._dispatch(ticket, engine, is_granted=False)
        return False

    def _find_match(self, now: float) -> Ticket | None:
        """The first request for which an engine has a place. Only requests that engines refused are overtaken."""
        places = self.pool.find_places(now)
        if places and not self._retries.has_one(now):
            places = FIRST_TRY
        return self._waiting.first(places)

    def _dispatch(self, ticket: Ticket, engine: Engine, is_granted: bool) -> None:
        self._waiting.remove(ticket)
        self._dispatched.add(ticket)
        ticket.grant(engine, is_granted)

    def _take_answer(self, engine: Engine, granted: bool) -> bool:
        """Whether a request uses the place that `engine` has kept. One that keeps none is left out for a while."""
        now = self.loop.time()
        if not granted:
            self.pool.leave_out(engine, now)
        is_used = granted and self._use_grant(engine, now)
        self.pool.note_place_answer(engine, asks_again=is_used and bool(self._waiting))
        self.match()
        return is_used

    def _use_grant(self, engine: Engine, now: float) -> bool:
        """A request that was never refused, but for want of a place, needs no retry for a place that is kept."""
        if self._closed_by is not None:
            return False
        ticket = self._waiting.first(engine.bit if self._retries.has_one(now) else UNREFUSED)
        if ticket is None or not self.pool.take_granted(engine, now):
            return False
        if ticket.excluded & UNREFUSED:
            self._retries.take(now)
        self._dispatch(ticket, engine, is_granted=True)
        return True

    def _set_timer(self, now: float) -> None:
        """One timer for all that no event announces: engines and requests whose pause ends, and the retry budget."""
        times = [self._exclusions.next_at(), self.pool.next_return_seconds(now)]
        if not self._retries.has_one(now):
            times.append(self._retries.next_at(now))
        at = min((time for time in times if time is not None), default=None) if self._waiting else None
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = None if at is None else self.loop.call_at(at, self._end_pause)

    def _end_pause(self) -> None:
        self._timer = self._timer_at = None
        self.match()
