"""The queue of one service: order, bound, waiting, and counts that always add up."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
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
from tests.gateway.builders import NeverAsked, make_limits

from conveyor_gateway.admission.engine_pool import NUM_RESERVED_BITS
from conveyor_gateway.admission.retries import MAX_RETRIES_AT_ONCE, RETRIES_PER_SECOND, RetryBudget
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket, TicketState
from conveyor_gateway.errors import NotFound, QueueFull, TimedOut, Unavailable

FAR = 1e9  # a deadline that no test reaches


def make_queue(*engines: str, **limits: Any) -> ServiceQueue:
    queue = ServiceQueue(make_limits(**limits), asyncio.get_running_loop(), NeverAsked())
    queue.set_engines(engines)
    return queue


async def start(waiting: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that has run up to its first wait."""
    task = asyncio.create_task(waiting)
    await asyncio.sleep(0)
    return task


async def test_a_request_that_finds_a_place_does_not_wait() -> None:
    queue = make_queue("a:1")
    ticket = queue.admit(FAR)
    assert (await ticket.place()).address == "a:1"
    assert (queue.queued, queue.dispatched, ticket.waited_seconds) == (0, 1, 0.0)


async def test_requests_get_their_engine_in_the_order_in_which_they_came() -> None:
    queue = make_queue("a:1", place_limit=1)
    first = queue.admit(FAR)
    order: list[int] = []

    async def wait(number: int) -> None:
        ticket = queue.admit(FAR)
        await ticket.place()
        order.append(number)
        ticket.close()

    tasks = [await start(wait(number)) for number in range(3)]
    first.close()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_binding_is_late_an_engine_that_comes_takes_those_who_wait() -> None:
    queue = make_queue(place_limit=1)
    tickets = [queue.admit(FAR) for _ in range(2)]
    tasks = [await start(ticket.place()) for ticket in tickets]
    queue.set_engines(["new:1"])
    assert (await tasks[0]).address == "new:1"
    assert not tasks[1].done()
    queue.set_engines(["new:1", "newer:1"])
    assert (await tasks[1]).address == "newer:1"


async def test_one_more_than_the_queue_holds_is_refused_and_leaves_no_trace() -> None:
    queue = make_queue(max_queued_requests=2)
    tickets = [queue.admit(FAR) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait here already"):
        queue.admit(FAR)
    assert queue.queued == 2
    tickets[0].close()
    queue.admit(FAR)


async def test_requests_at_engines_do_not_count_against_the_queue() -> None:
    queue = make_queue("a:1", max_queued_requests=1, place_limit=2)
    for _ in range(3):
        queue.admit(FAR)
    assert (queue.dispatched, queue.queued) == (2, 1)


async def test_the_wait_ends_with_the_queue_timeout() -> None:
    queue = make_queue(queue_timeout_seconds=0.01)
    ticket = queue.admit(FAR)
    with pytest.raises(TimedOut, match=r"within 0.01 s; 0 engines are ready") as caught:
        await ticket.place()
    assert caught.value.code == "queue_timeout"
    ticket.close()
    assert queue.queued == 0


async def test_the_wait_ends_with_the_requests_own_deadline() -> None:
    queue = make_queue(queue_timeout_seconds=60)
    ticket = queue.admit(queue.loop.time() + 0.01)
    with pytest.raises(TimedOut) as caught:
        await ticket.place()
    assert caught.value.code == "deadline_exceeded"


def test_the_wait_names_the_requests_own_deadline_also_when_the_timer_is_early() -> None:
    async def codes() -> set[str]:
        queue = make_queue(queue_timeout_seconds=60, max_queued_requests=40)
        tickets = [queue.admit(queue.loop.time() + 0.01 + i * 0.0013) for i in range(40)]
        ends = await asyncio.gather(*(ticket.place() for ticket in tickets), return_exceptions=True)
        return {end.code for end in ends if isinstance(end, TimedOut)}

    assert uvloop.run(codes()) == {"deadline_exceeded"}  # it rounds a timer to the nearest millisecond


async def test_a_client_that_leaves_the_queue_makes_room_at_once() -> None:
    queue = make_queue(max_queued_requests=1)

    async def wait() -> None:
        ticket = queue.admit(FAR)
        try:
            await ticket.place()
        finally:
            ticket.close()

    task = await start(wait())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert queue.queued == 0
    queue.admit(FAR)


async def test_a_place_that_is_granted_to_a_client_in_the_act_of_leaving_goes_to_the_next() -> None:
    queue = make_queue("a:1", place_limit=1)
    holder = queue.admit(FAR)

    async def wait(ticket: Ticket) -> str:
        try:
            return (await ticket.place()).address
        finally:
            ticket.close()

    leaving, staying = [await start(wait(queue.admit(FAR))) for _ in range(2)]
    holder.close()  # the place is granted to `leaving`, which has not run since
    leaving.cancel()
    assert await staying == "a:1"
    assert (queue.queued, queue.dispatched) == (0, 0)


async def test_a_request_that_comes_back_goes_to_the_head_and_its_engine_is_left_out() -> None:
    queue = make_queue("a:1", "b:1", place_limit=1)
    first, second = queue.admit(FAR), queue.admit(FAR)
    waiting = queue.admit(FAR)
    refused = await first.place()
    first.note_failure()
    first.give_back()
    assert (queue.queued, queue.dispatched) == (2, 1)
    assert list(queue._waiting) == [first, waiting]
    other = await second.place()
    second.close()
    assert (await first.place()) is other
    assert other is not refused


async def test_an_engine_that_is_full_for_one_request_takes_others_and_is_not_asked_again_at_once() -> None:
    queue = make_queue("a:1")
    large = queue.admit(FAR)
    engine = await large.place()
    large.note_full()
    large.give_back()
    small = queue.admit(FAR)
    assert small.engine is engine
    assert large.state is TicketState.QUEUED
    assert await asyncio.wait_for(large.place(), 5) is engine  # without any event


async def test_requests_that_want_too_much_keep_nobody_else_from_the_engine() -> None:
    queue = make_queue("a:1", max_queued_requests=100, place_limit=100)
    for _ in range(30):
        large = queue.admit(FAR)
        assert large.engine is not None
        large.note_full()
        large.give_back()
    assert queue.queued == 30
    assert queue.admit(FAR).engine is not None


async def test_a_request_that_wants_too_much_is_tried_less_and_less_often() -> None:
    queue = make_queue("a:1")
    large = queue.admit(FAR)
    for pause_seconds in (0.1, 0.2, 0.4):
        await large.place()
        refused_at = queue.loop.time()
        large.note_full()
        assert large.full_until >= refused_at + pause_seconds
        large.give_back()


async def test_a_request_for_which_an_engine_was_full_goes_to_another_at_once() -> None:
    queue = make_queue("a:1", "b:1", place_limit=5)
    others = [queue.admit(FAR) for _ in range(3)]
    asked = [others[1].engine, others[0].engine]  # where it would go: the less loaded one first
    large = others.pop()
    for engine in (asked[1], asked[0]):
        assert large.engine is engine
        large.note_full()
        large.give_back()
    assert large.state is TicketState.QUEUED


async def test_engines_that_refuse_everything_get_retries_within_the_budget_and_newcomers_at_once() -> None:
    queue = make_queue("a:1", "b:1", max_queued_requests=1000)
    now = 1000.0
    queue.loop.time = lambda: now  # type: ignore[method-assign]
    queue._retries = RetryBudget(now)
    tickets, sent = [queue.admit(FAR) for _ in range(500)], 0
    for _ in range(20 * 100):  # 20 seconds
        now += 0.01
        queue.match()
        for ticket in [each for each in tickets if each.engine is not None]:
            sent += 1
            ticket.note_full()
            ticket.give_back()
        await asyncio.sleep(0)
    assert 500 < sent <= 500 + MAX_RETRIES_AT_ONCE + 20 * RETRIES_PER_SECOND + 1
    assert queue.admit(FAR).engine is not None


async def test_requests_at_engines_are_counted_by_engine_and_not_within_the_window() -> None:
    queue = make_queue("a:1", "b:1")
    tickets = [queue.admit(FAR) for _ in range(5)]
    assert queue.count_dispatched_beyond(0.0) == {"a:1": 2, "b:1": 2}
    assert queue.count_dispatched_beyond(1e6) == {}
    gone = tickets[0].engine
    assert gone is not None
    for ticket in tickets[4:] + [each for each in tickets if each.engine is gone]:
        ticket.close()
    assert gone.address not in queue.count_dispatched_beyond(0.0)


async def test_requests_that_come_back_wait_in_the_order_in_which_they_came() -> None:
    queue = make_queue("a:1", place_limit=3)
    tickets = [queue.admit(FAR) for _ in range(4)]
    for ticket in (tickets[1], tickets[0], tickets[2]):
        ticket.note_failure()
        ticket.give_back()
    assert list(queue._waiting) == tickets


async def test_an_engine_that_was_left_out_is_asked_again_without_any_event() -> None:
    queue = make_queue("a:1")
    ticket = queue.admit(FAR)
    engine = await ticket.place()
    ticket.note_failure()
    ticket.give_back()
    assert await asyncio.wait_for(ticket.place(), 5) is engine
    assert ticket.waited_seconds > 0


async def test_those_who_wait_follow_a_probe_when_it_is_answered() -> None:
    queue = make_queue("a:1")
    probe = queue.admit(FAR)
    engine = await probe.place()
    probe.note_failure(unreachable=True)
    probe.give_back()
    waiting = queue.admit(FAR)
    assert await asyncio.wait_for(probe.place(), 5) is engine
    assert waiting.state is TicketState.QUEUED
    probe.note_answer()
    assert waiting.engine is engine


async def test_waits_after_coming_back_count_together_towards_the_queue_timeout() -> None:
    queue = make_queue("a:1", queue_timeout_seconds=0.15)
    ticket = queue.admit(FAR)

    async def come_back_for_ever() -> None:
        while True:
            await ticket.place()
            ticket.note_failure()
            ticket.give_back()

    with pytest.raises(TimedOut):
        await asyncio.wait_for(come_back_for_ever(), 5)


async def test_a_raised_place_limit_takes_those_who_wait() -> None:
    queue = make_queue("a:1", place_limit=1)
    queue.admit(FAR)
    waiting = queue.admit(FAR)
    queue.configure(make_limits(place_limit=2))
    assert waiting.state is TicketState.DISPATCHED


async def test_a_closed_queue_answers_those_who_wait_and_lets_the_running_end() -> None:
    queue = make_queue("a:1", place_limit=1)
    running = queue.admit(FAR)
    waiting = queue.admit(FAR)
    task = await start(waiting.place())
    queue.close(NotFound("it was deleted", "service_deleted"))
    with pytest.raises(NotFound, match="it was deleted"):
        await task
    waiting.close()
    with pytest.raises(NotFound):
        queue.admit(FAR)
    assert (queue.queued, queue.dispatched) == (0, 1)
    running.close()
    assert (queue.queued, queue.dispatched) == (0, 0)


async def test_a_start_that_fails_answers_those_who_wait_and_those_who_come_until_it_is_mended() -> None:
    queue = make_queue(max_queued_requests=100)

    async def ask() -> str:
        ticket = queue.admit(FAR)
        try:
            return (await ticket.place()).address
        finally:
            ticket.close()

    waiting = [await start(ask()) for _ in range(20)]
    queue.set_start_failure("ModelNotFound")
    for each in waiting:
        with pytest.raises(Unavailable, match="no engine can start \\(ModelNotFound\\)"):
            await each
    with pytest.raises(Unavailable):
        queue.admit(FAR)
    queue.set_start_failure("")
    assert queue.queued == 0
    asking = await start(ask())
    queue.set_engines(["a:1"])
    assert await asking == "a:1"
    queue.set_start_failure("ModelNotFound")
    assert await ask() == "a:1", "an engine is ready all the same"
    queue.set_engines([])
    with pytest.raises(Unavailable):
        queue.admit(FAR)


async def test_only_requests_older_than_the_window_are_waiting_beyond_it() -> None:
    queue = make_queue()
    old, young = queue.admit(FAR), queue.admit(FAR)
    old.admitted_at -= 10
    assert queue.count_waiting_beyond(0) == 2
    assert queue.count_waiting_beyond(5) == 1
    young.close()
    assert queue.count_waiting_beyond(5) == 1


class AnySequenceOfEvents(RuleBasedStateMachine):
    """Arrivals, ends, disconnects, refusals, engines that come and go: the counts are those of the requests."""

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
                ticket.close()
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
        """A finish when it is at an engine, a disconnect when it waits; sometimes for the second time."""
        data.draw(st.sampled_from(self.tickets)).close()

    @precondition(lambda self: self.of_state(TicketState.DISPATCHED))
    @rule(data=st.data(), why=st.sampled_from([None, Ticket.note_failure, Ticket.note_full]))
    def come_back(self, data: st.DataObject, why: Callable[[Ticket], None] | None) -> None:
        ticket = data.draw(st.sampled_from(self.of_state(TicketState.DISPATCHED)))
        if why is not None:
            why(ticket)
        ticket.give_back()

    @rule(addresses=st.sets(st.sampled_from(["a:1", "b:1", "c:1"])))
    def engines_change(self, addresses: set[str]) -> None:
        self.queue.set_engines(addresses)

    @rule(place_limit=st.integers(1, 3))
    def limits_change(self, place_limit: int) -> None:
        self.queue.configure(make_limits(max_queued_requests=3, place_limit=place_limit))

    @rule(seconds=st.sampled_from([0.01, 0.15, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.queue.match()

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
        """But those that an engine refused do without a budget of retries."""
        if hasattr(self, "queue"):
            has_retries = self.queue._retries.has_one(self.now)
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
