"""Tests that the queue's counts and order are right after any sequence of arrivals, answers, refusals and engines."""

import asyncio
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.gateway.admission.queues import FAR
from tests.gateway.builders import NeverAsked, make_limits

from conveyor_gateway.admission.engine_pool import NUM_RESERVED_BITS
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket, TicketState
from conveyor_gateway.errors import QueueFull


class AnySequenceOfEvents(RuleBasedStateMachine):
    """Runs arrivals, ends, disconnects, refusals and changes of engines, and compares the counts with the requests."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.queue = ServiceQueue(make_limits(max_queued_requests=3, place_limit=2), self.loop, NeverAsked())
        self.queue.set_engines(["a:1"])
        self.tickets: list[Ticket] = []

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for ticket in self.tickets:
                self.queue.finish(ticket)
            assert (self.queue.queued, self.queue.dispatched) == (0, 0)
            self.queue.set_engines([])
            assert self.queue.pool._engines == {}
            self.loop.close()

    def of_state(self, state: TicketState) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.state is state]

    @rule()
    def arrive(self) -> None:
        try:
            self.tickets.append(self.queue.admit(FAR))
        except QueueFull:
            assert self.queue.queued >= 3  # those who came back are above the limit

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a request: finish it at its engine, or disconnect it while it waits. Some requests are ended twice."""
        self.queue.finish(data.draw(st.sampled_from(self.tickets)))

    @precondition(lambda self: self.of_state(TicketState.DISPATCHED))
    @rule(data=st.data(), why=st.sampled_from([None, ServiceQueue.note_failure, ServiceQueue.note_full]))
    def come_back(self, data: st.DataObject, why: Callable[[ServiceQueue, Ticket], None] | None) -> None:
        ticket = data.draw(st.sampled_from(self.of_state(TicketState.DISPATCHED)))
        if why is not None:
            why(self.queue, ticket)
        self.queue.requeue(ticket)

    @rule(addresses=st.sets(st.sampled_from(["a:1", "b:1", "c:1"])))
    def engines_change(self, addresses: set[str]) -> None:
        self.queue.set_engines(addresses)

    @rule(place_limit=st.integers(1, 3))
    def limits_change(self, place_limit: int) -> None:
        self.queue.configure(make_limits(max_queued_requests=3, place_limit=place_limit))

    @rule(seconds=st.sampled_from([0.01, 0.15, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.queue._dispatcher.match()

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "queue"):
            return
        queued, dispatched = self.of_state(TicketState.QUEUED), self.of_state(TicketState.DISPATCHED)
        assert (self.queue.queued, self.queue.dispatched) == (len(queued), len(dispatched))
        assert list(self.queue._waiting) == sorted(queued, key=lambda ticket: ticket.number)
        loads = {engine.address: engine.load for engine in self.queue.pool._engines.values()}
        assert sum(loads.values()) == len(dispatched)
        for ticket in dispatched:
            assert ticket.engine is not None
            assert ticket.engine is self.queue.pool._engines[ticket.engine.address]
        assert all(ticket.engine is None for ticket in queued)

    @invariant()
    def nobody_waits_beside_a_free_place(self) -> None:
        """Requests that an engine refused may wait if there is no budget for retries."""
        if hasattr(self, "queue"):
            has_retries = self.queue._dispatcher._retries.has_one(self.now)
            for ticket in self.queue._waiting:
                if has_retries or not ticket.excluded:
                    assert self.queue.pool.choose(self.now, ticket.excluded) is None

    @invariant()
    def no_pause_of_a_request_outlasts_its_time(self) -> None:
        if hasattr(self, "queue"):
            for ticket in self.queue._waiting:
                assert ticket.full_until > self.now or not ticket.excluded >> NUM_RESERVED_BITS


def test_any_sequence_of_events_keeps_counts_and_order() -> None:
    limits = settings(max_examples=60, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(AnySequenceOfEvents, settings=limits)  # type: ignore[no-untyped-call]
