"""Tests the queue of one service: its order, its limit, waiting, and counts that are always consistent."""

import asyncio

import pytest
import uvloop
from tests.gateway.admission.queues import FAR, make_queue, start
from tests.gateway.builders import make_limits

from conveyor_gateway.admission.ticket import Ticket, TicketState
from conveyor_gateway.errors import GatewayError, QueueFull


async def test_a_request_that_finds_a_place_does_not_wait() -> None:
    queue = make_queue("a:1")
    ticket = queue.admit(FAR)
    assert (await queue.wait_for_engine(ticket)).address == "a:1"
    assert (queue.queued, queue.dispatched, ticket.waited_seconds) == (0, 1, 0.0)


async def test_requests_get_their_engine_in_the_order_in_which_they_came() -> None:
    queue = make_queue("a:1", place_limit=1)
    first = queue.admit(FAR)
    order: list[int] = []

    async def wait(number: int) -> None:
        ticket = queue.admit(FAR)
        await queue.wait_for_engine(ticket)
        order.append(number)
        queue.finish(ticket)

    tasks = [await start(wait(number)) for number in range(3)]
    queue.finish(first)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_binding_is_late_an_engine_that_comes_takes_those_who_wait() -> None:
    queue = make_queue(place_limit=1)
    tickets = [queue.admit(FAR) for _ in range(2)]
    tasks = [await start(queue.wait_for_engine(ticket)) for ticket in tickets]
    queue.set_engines(["new:1"])
    assert (await tasks[0]).address == "new:1"
    assert not tasks[1].done()
    queue.set_engines(["new:1", "newer:1"])
    assert (await tasks[1]).address == "newer:1"


async def test_one_more_than_the_queue_holds_is_refused_and_leaves_no_trace() -> None:
    queue = make_queue(max_queued_requests=2)
    tickets = [queue.admit(FAR) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait"):
        queue.admit(FAR)
    assert queue.queued == 2
    queue.finish(tickets[0])
    queue.admit(FAR)


async def test_requests_at_engines_do_not_count_against_the_queue() -> None:
    queue = make_queue("a:1", max_queued_requests=1, place_limit=2)
    for _ in range(3):
        queue.admit(FAR)
    assert (queue.dispatched, queue.queued) == (2, 1)


async def test_the_wait_ends_with_the_queue_timeout() -> None:
    queue = make_queue(queue_timeout_seconds=0.01)
    ticket = queue.admit(FAR)
    with pytest.raises(GatewayError, match=r"within 0.01 s; 0 engines are ready") as caught:
        await queue.wait_for_engine(ticket)
    assert caught.value.code == "queue_timeout"
    queue.finish(ticket)
    assert queue.queued == 0


async def test_the_wait_ends_with_the_requests_own_deadline() -> None:
    queue = make_queue(queue_timeout_seconds=60)
    ticket = queue.admit(queue.loop.time() + 0.01)
    with pytest.raises(GatewayError) as caught:
        await queue.wait_for_engine(ticket)
    assert caught.value.code == "deadline_exceeded"


def test_the_wait_names_the_requests_own_deadline_also_when_the_timer_is_early() -> None:
    async def codes() -> set[str]:
        queue = make_queue(queue_timeout_seconds=60, max_queued_requests=40)
        tickets = [queue.admit(queue.loop.time() + 0.01 + i * 0.0013) for i in range(40)]
        ends = await asyncio.gather(*(queue.wait_for_engine(ticket) for ticket in tickets), return_exceptions=True)
        return {end.code for end in ends if isinstance(end, GatewayError)}

    assert uvloop.run(codes()) == {"deadline_exceeded"}  # it rounds a timer to the nearest millisecond


async def test_a_client_that_leaves_the_queue_makes_room_at_once() -> None:
    queue = make_queue(max_queued_requests=1)

    async def wait() -> None:
        ticket = queue.admit(FAR)
        try:
            await queue.wait_for_engine(ticket)
        finally:
            queue.finish(ticket)

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
            return (await queue.wait_for_engine(ticket)).address
        finally:
            queue.finish(ticket)

    leaving, staying = [await start(wait(queue.admit(FAR))) for _ in range(2)]
    queue.finish(holder)  # the place is granted to `leaving`, which has not run since
    leaving.cancel()
    assert await staying == "a:1"
    assert (queue.queued, queue.dispatched) == (0, 0)


async def test_requests_at_engines_are_counted_by_engine_and_not_within_the_window() -> None:
    queue = make_queue("a:1", "b:1")
    tickets = [queue.admit(FAR) for _ in range(5)]
    assert queue.count_dispatched_beyond(0.0) == {"a:1": 2, "b:1": 2}
    assert queue.count_dispatched_beyond(1e6) == {}
    gone = tickets[0].engine
    assert gone is not None
    for ticket in tickets[4:] + [each for each in tickets if each.engine is gone]:
        queue.finish(ticket)
    assert gone.address not in queue.count_dispatched_beyond(0.0)


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
    task = await start(queue.wait_for_engine(waiting))
    queue.close(GatewayError("it was deleted", "service_deleted"))
    with pytest.raises(GatewayError, match="it was deleted"):
        await task
    queue.finish(waiting)
    with pytest.raises(GatewayError, match="it was deleted"):
        queue.admit(FAR)
    assert (queue.queued, queue.dispatched) == (0, 1)
    queue.finish(running)
    assert (queue.queued, queue.dispatched) == (0, 0)


async def test_a_start_that_fails_rejects_waiting_and_new_requests_until_it_is_fixed() -> None:
    queue = make_queue(max_queued_requests=100)

    async def send() -> str:
        ticket = queue.admit(FAR)
        try:
            return (await queue.wait_for_engine(ticket)).address
        finally:
            queue.finish(ticket)

    waiting = [await start(send()) for _ in range(20)]
    queue.set_start_failure("ModelNotFound")
    for each in waiting:
        with pytest.raises(GatewayError, match="no engine can start \\(ModelNotFound\\)"):
            await each
    with pytest.raises(GatewayError, match="ModelNotFound"):
        queue.admit(FAR)
    queue.set_start_failure("")
    assert queue.queued == 0
    request = await start(send())
    queue.set_engines(["a:1"])
    assert await request == "a:1"
    queue.set_start_failure("ModelNotFound")
    assert await send() == "a:1", "an engine is ready all the same"
    queue.set_engines([])
    with pytest.raises(GatewayError, match="ModelNotFound"):
        queue.admit(FAR)


async def test_only_requests_older_than_the_window_are_waiting_beyond_it() -> None:
    queue = make_queue()
    old, young = queue.admit(FAR), queue.admit(FAR)
    old.admitted_at -= 10
    assert queue.count_waiting_beyond(0) == 2
    assert queue.count_waiting_beyond(5) == 1
    queue.finish(young)
    assert queue.count_waiting_beyond(5) == 1


async def test_requests_of_a_start_are_counted_at_engines_and_later_ones_are_not() -> None:
    queue = make_queue(place_limit=2)
    early = [queue.admit(FAR) for _ in range(3)]
    assert queue.count_from_start() == 0, "they wait in the queue"
    await asyncio.sleep(0.01)
    queue.set_engines(["a:1"])
    assert queue.count_from_start() == 2
    queue.set_engines(["a:1", "b:1"])
    await asyncio.sleep(0.01)
    late = queue.admit(FAR)
    assert (queue.count_from_start(), queue.dispatched) == (3, 4)
    for ticket in early:
        queue.finish(ticket)
    assert (queue.count_from_start(), late.state) == (0, TicketState.DISPATCHED)
