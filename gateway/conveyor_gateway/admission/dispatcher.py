"""Gives the places of a service's engines to its waiting requests, in the order of `waiting`.

Used by `service_queue` only. The event loop serves the other services too. So the cost of an event depends on how many
requests it wakes, not on how many wait. An event that wakes many requests is handled over several turns of the loop,
and retries have a budget.
"""

import asyncio
from collections import Counter
from typing import Final

from conveyor_gateway.admission.engine_order import Engine
from conveyor_gateway.admission.engine_pool import EnginePool
from conveyor_gateway.admission.kept_places import KeptPlaces
from conveyor_gateway.admission.limits import QueueLimits
from conveyor_gateway.admission.open_queries import OpenQueries
from conveyor_gateway.admission.place_queries import PlaceQueries
from conveyor_gateway.admission.retries import Exclusions, RetryBudget
from conveyor_gateway.admission.ticket import FIRST_TRY, UNREFUSED, Ticket, TicketState, Work
from conveyor_gateway.admission.wait_estimate import WaitEstimate
from conveyor_gateway.admission.waiting import Waiting
from conveyor_gateway.watching.classes import UNCLASSED

# The most requests that one turn of the event loop wakes. Each woken request costs about half a millisecond.
MAX_WAKES_A_TURN: Final = 8
_ANY_ENGINE: Final = -1  # a mask with all bits


class Dispatcher:
    """Moves tickets between `waiting` and `dispatched`. Both are consistent whenever a method returns.

    `pool`, `waiting` and `limits` belong to the service queue, which calls `match` after each change of them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engines: PlaceQueries,
        pool: EnginePool,
        waiting: Waiting,
        limits: QueueLimits,
    ) -> None:
        self.dispatched: set[Ticket] = set()
        self._num_of_level: Counter[int] = Counter()  # number of dispatched tickets by level
        self._pool = pool
        self._waiting = waiting
        self._limits = limits
        self._wait_estimate = WaitEstimate(loop.time())
        self._retries = RetryBudget(loop.time())
        self._loop = loop
        self._queries = OpenQueries(engines, self._use_answer, self.match)
        self._exclusions = Exclusions()
        self._kept = KeptPlaces()
        self._kept_until: float | None = None  # while the first request waits beside places that are kept for others
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._continues = False  # whether the next turn of the loop continues a match
        self._stopped = False

    def configure(self, limits: QueueLimits) -> None:
        """Use changed limits from now on."""
        self._limits = limits
        levels = {UNCLASSED.level, *(each.level for each in limits.classes.ordered)}
        self._wait_estimate.keep(levels)
        self._waiting.keep(levels)
        self.match()

    def estimate_wait_seconds(self, level: int) -> int:
        """Return the `Retry-After` of a request of this level that found the queue full."""
        return self._wait_estimate.find_wait_seconds(level, self._waiting)

    def note_answer(self) -> None:
        """Record that an engine answered. This allows further retries."""
        self._retries.add_answer()
        self.match()

    def enqueue(self, ticket: Ticket) -> None:
        """Add a new or requeued ticket at its position in the order."""
        if ticket.full_until > self._loop.time():
            self._exclusions.add(ticket)
        else:
            ticket.end_exclusions()
        ticket.state = TicketState.QUEUED
        if not self._dispatch_at_once(ticket):
            ticket.home = self._pool.find_home(ticket.prefix)
            self._waiting.add(ticket)
        self.match()

    def _dispatch_at_once(self, ticket: Ticket) -> bool:
        """Dispatch a new ticket without queueing it if no other waits and a place is free; otherwise return False."""
        now = self._loop.time()
        if self._waiting or self._stopped or ticket.excluded or not self._pool.find_places(now):
            return False
        full_level = self._find_full_level()
        if (full_level is not None and ticket.level >= full_level) or self._keeps_places(ticket, now):
            return False
        engine = self._pool.choose(now, prefix=ticket.prefix)
        assert engine is not None, "a place is free"
        self._dispatch(ticket, engine, is_granted=False, waits=False)
        return True

    def requeue(self, ticket: Ticket) -> None:
        """Put a dispatched ticket back at its position in the order."""
        self._release(ticket)
        self._waiting.undo(ticket)
        self.enqueue(ticket)

    def release(self, ticket: Ticket, used: Work | None) -> None:
        """Free the place of a dispatched ticket that has ended. The next match gives it to another request."""
        self._release(ticket)
        if used is None or not used.prompt_tokens + used.answer_tokens:
            self._kept.forget(ticket.client)
        self._waiting.end(ticket, used)

    def _release(self, ticket: Ticket) -> None:
        self._pool.release(ticket.bound_engine)
        ticket.engine = None
        self._num_of_level[ticket.level] -= 1
        self._kept.leave(ticket.client)
        self.dispatched.remove(ticket)

    def stop(self) -> None:
        """Stop giving places to waiting tickets."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        self._queries.stop()

    def match(self) -> None:
        """Give free places to the first tickets of the queue, then ask engines for more places."""
        now = self._loop.time()
        self._wait_estimate.tick(now)
        if not self._stopped:
            self._match(now)
        self._wait_estimate.has_backlog = bool(self._waiting)

    def _match(self, now: float) -> None:
        if self._waiting and not (self._end_exclusions(now) and self._give_places(now)):
            self._continue_soon()
            return
        self._request_places(now)
        self._set_timer(now)

    def _request_places(self, now: float) -> None:
        """Query occupied engines for a place for the first request that may be dispatched.

        If no request waits, the query only detects when a place is free again.
        """
        if not (unqueried := self._pool.find_unqueried(now)):
            return
        first = self._waiting.first(_ANY_ENGINE, self._find_full_level())
        if first is not None or not self._waiting:
            for engine in unqueried:
                if self._queries.query(engine, first.level if first else self._limits.classes.worst_level):
                    self._pool.note_queried(engine)

    def _continue_soon(self) -> None:
        if not self._continues:
            self._continues = True
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._continues = False
        self.match()

    def _end_exclusions(self, now: float) -> bool:
        """End exclusions whose time has passed. Return False if some are left for the next turn of the event loop."""
        for _ in range(MAX_WAKES_A_TURN):
            if (ticket := self._exclusions.pop_ended(now)) is None:
                return True
            if ticket.state is TicketState.QUEUED and ticket.full_until <= now:
                self._waiting.remove(ticket)
                ticket.end_exclusions()
                self._waiting.add(ticket)
        return False

    def _give_places(self, now: float) -> bool:
        """Give free places to waiting tickets. Return False if the next turn of the event loop has to continue."""
        for _ in range(MAX_WAKES_A_TURN):
            if not self._waiting or (ticket := self._find_match(now)) is None:
                return True
            engine = self._pool.choose(now, ticket.excluded, ticket.prefix)
            assert engine is not None, "`_find_match` found the ticket for a free place"
            if ticket.excluded & FIRST_TRY:
                self._retries.spend(now)
            self._dispatch(ticket, engine, is_granted=False)
        return False

    def _find_match(self, now: float) -> Ticket | None:
        """Return the first request for which an engine has a place.

        This request overtakes only requests that engines rejected before, whose class uses its whole share, or whose
        home is another engine.
        """
        self._kept_until = None
        places = self._pool.find_places(now)
        if places and not self._retries.has_one(now):
            places = FIRST_TRY
        return self._find_first(places, now)

    def _find_first(self, wanted: int, now: float) -> Ticket | None:
        """Return the first request for a place on the engines of the mask `wanted`, if the place is not kept."""
        full_level, skipped = self._find_full_level(), set[str]()
        while (ticket := self._waiting.first(wanted, full_level, skipped)) is not None:
            if not self._keeps_places(ticket, now):
                return ticket
            skipped.add(ticket.client)  # at most MOST_WITH_MANY clients, because each has many places
        return None

    def _keeps_places(self, ticket: Ticket, now: float) -> bool:
        """Return whether the free places are kept for other clients than the ticket's."""
        num_ready, limits = self._pool.num_ready, self._limits
        num_free = self._num_places - len(self.dispatched)
        if num_free > num_ready * (limits.num_beyond + limits.most_kept):
            return False
        if not self._kept.has_many(ticket.client, self._num_places):
            return False
        num_kept = self._kept.count(ticket.client, now)
        if not num_kept or num_free > num_ready * limits.num_beyond + min(num_kept, num_ready * limits.most_kept):
            return False
        until = self._kept.find_end(ticket.client)
        self._kept_until = min(until, self._kept_until or until)
        return True

    @property
    def _num_places(self) -> int:
        """The places of all ready engines, or those in use if engines that left still run requests."""
        return max(self._pool.num_ready * self._limits.place_limit, len(self.dispatched))

    def _find_full_level(self) -> int | None:
        """Return the lowest level whose class uses its whole share of the places.

        Requests of this level and of all higher levels count toward the share. They wait while the share is used up.
        """
        for each in self._limits.classes.ordered:
            if each.max_share_percent is not None and self._is_full(each.level, each.max_share_percent):
                return each.level
        return None

    def _is_full(self, level: int, percent: int) -> bool:
        num_places = self._pool.num_ready * self._pool.place_limit
        share = max(1, num_places * percent // (100 * self._limits.num_gateways))
        return sum(count for each, count in self._num_of_level.items() if each >= level) >= share

    def _dispatch(self, ticket: Ticket, engine: Engine, is_granted: bool, waits: bool = True) -> None:
        self._waiting.begin(ticket, waits)
        if not ticket.excluded & FIRST_TRY:
            self._wait_estimate.count(ticket.level)
        self.dispatched.add(ticket)
        self._num_of_level[ticket.level] += 1
        self._kept.enter(ticket.client, self._num_places, self._loop.time())
        ticket.bind(engine, is_granted)

    def _use_answer(self, engine: Engine, granted: bool) -> bool:
        """Return whether a request uses the place that `engine` has granted.

        An engine that did not grant a place is left out for a while.
        """
        now = self._loop.time()
        if not granted:
            self._pool.leave_out(engine, now)
        is_used = granted and self._use_granted(engine, now)
        self._pool.note_place_answer(engine, queries_again=is_used and bool(self._waiting))
        return is_used

    def _use_granted(self, engine: Engine, now: float) -> bool:
        """Dispatch a request to the granted place; return False if none fits.

        This spends a retry only if the request was rejected before for a reason other than a missing place.
        """
        if self._stopped:
            return False
        wanted = engine.bit if self._retries.has_one(now) else UNREFUSED
        ticket = self._find_first(wanted, now)
        if ticket is None or not self._pool.occupy_granted(engine, now):
            return False
        if ticket.excluded & UNREFUSED:
            self._retries.spend(now)
        self._dispatch(ticket, engine, is_granted=True)
        return True

    def _set_timer(self, now: float) -> None:
        """Set one timer for the next change that no event announces: a retry, or the end of a pause."""
        at = self._find_next_change(now) if self._waiting else None
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = None if at is None else self._loop.call_at(at, self._end_pause)

    def _find_next_change(self, now: float) -> float | None:
        times = [self._exclusions.next_at(), self._pool.next_return_seconds(now), self._kept_until]
        if not self._retries.has_one(now):
            times.append(self._retries.next_at(now))
        return min((time for time in times if time is not None), default=None)

    def _end_pause(self) -> None:
        self._timer = self._timer_at = None
        self.match()
