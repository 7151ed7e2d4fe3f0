"""Tests requests that an engine had no room for: their place in the queue, and how often engines are asked again."""

import asyncio

import pytest
from tests.gateway.admission.queues import FAR, make_queue

from conveyor_gateway.admission.retries import MAX_RETRIES_AT_ONCE, RETRIES_PER_SECOND, RetryBudget
from conveyor_gateway.admission.ticket import TicketState
from conveyor_gateway.errors import GatewayError


async def test_a_request_that_comes_back_goes_to_the_head_and_its_engine_is_left_out() -> None:
    queue = make_queue("a:1", "b:1", place_limit=1)
    first, second = queue.admit(FAR), queue.admit(FAR)
    waiting = queue.admit(FAR)
    refused = await queue.wait_for_engine(first)
    queue.note_failure(first)
    queue.requeue(first)
    assert (queue.queued, queue.dispatched) == (2, 1)
    assert list(queue._waiting) == [first, waiting]
    other = await queue.wait_for_engine(second)
    queue.finish(second)
    assert (await queue.wait_for_engine(first)) is other
    assert other is not refused


async def test_an_engine_that_is_full_for_one_request_takes_others_and_is_not_tried_again_at_once() -> None:
    queue = make_queue("a:1")
    large = queue.admit(FAR)
    engine = await queue.wait_for_engine(large)
    queue.note_full(large)
    queue.requeue(large)
    small = queue.admit(FAR)
    assert small.engine is engine
    assert large.state is TicketState.QUEUED
    assert await asyncio.wait_for(queue.wait_for_engine(large), 5) is engine  # without any event


async def test_requests_that_want_too_much_keep_nobody_else_from_the_engine() -> None:
    queue = make_queue("a:1", max_queued_requests=100, place_limit=100)
    for _ in range(30):
        large = queue.admit(FAR)
        assert large.engine is not None
        queue.note_full(large)
        queue.requeue(large)
    assert queue.queued == 30
    assert queue.admit(FAR).engine is not None


async def test_a_request_that_wants_too_much_is_tried_less_and_less_often() -> None:
    queue = make_queue("a:1")
    large = queue.admit(FAR)
    for pause_seconds in (0.1, 0.2, 0.4):
        await queue.wait_for_engine(large)
        refused_at = queue.loop.time()
        queue.note_full(large)
        assert large.full_until >= refused_at + pause_seconds
        queue.requeue(large)


async def test_a_request_for_which_an_engine_was_full_goes_to_another_at_once() -> None:
    queue = make_queue("a:1", "b:1", place_limit=5)
    others = [queue.admit(FAR) for _ in range(3)]
    engines = [others[1].engine, others[0].engine]  # where it would go: the less loaded one first
    large = others.pop()
    for engine in (engines[1], engines[0]):
        assert large.engine is engine
        queue.note_full(large)
        queue.requeue(large)
    assert large.state is TicketState.QUEUED


async def test_engines_that_refuse_everything_get_retries_within_the_budget_and_newcomers_at_once() -> None:
    queue = make_queue("a:1", "b:1", max_queued_requests=1000)
    now = queue.loop.time()
    queue.loop.time = lambda: now  # type: ignore[method-assign]
    queue._dispatcher._retries = RetryBudget(now)
    tickets, sent = [queue.admit(FAR) for _ in range(500)], 0
    for _ in range(20 * 100):  # 20 seconds
        now += 0.01
        queue._dispatcher.match()
        for ticket in [each for each in tickets if each.engine is not None]:
            sent += 1
            queue.note_full(ticket)
            queue.requeue(ticket)
        await asyncio.sleep(0)
    assert 500 < sent <= 500 + MAX_RETRIES_AT_ONCE + 20 * RETRIES_PER_SECOND + 1
    assert queue.admit(FAR).engine is not None


async def test_requests_that_come_back_wait_in_the_order_in_which_they_came() -> None:
    queue = make_queue("a:1", place_limit=3)
    tickets = [queue.admit(FAR) for _ in range(4)]
    for ticket in (tickets[1], tickets[0], tickets[2]):
        queue.note_failure(ticket)
        queue.requeue(ticket)
    assert list(queue._waiting) == tickets


async def test_an_engine_that_was_left_out_is_tried_again_without_any_event() -> None:
    queue = make_queue("a:1")
    ticket = queue.admit(FAR)
    engine = await queue.wait_for_engine(ticket)
    queue.note_failure(ticket)
    queue.requeue(ticket)
    assert await asyncio.wait_for(queue.wait_for_engine(ticket), 5) is engine
    assert ticket.waited_seconds > 0


async def test_those_who_wait_follow_a_probe_when_it_is_answered() -> None:
    queue = make_queue("a:1")
    probe = queue.admit(FAR)
    engine = await queue.wait_for_engine(probe)
    queue.note_failure(probe, unreachable=True)
    queue.requeue(probe)
    waiting = queue.admit(FAR)
    assert await asyncio.wait_for(queue.wait_for_engine(probe), 5) is engine
    assert waiting.state is TicketState.QUEUED
    queue.note_answer(probe)
    assert waiting.engine is engine


async def test_waits_after_coming_back_count_together_towards_the_queue_timeout() -> None:
    queue = make_queue("a:1", queue_timeout_seconds=0.15)
    ticket = queue.admit(FAR)

    async def come_back_for_ever() -> None:
        while True:
            await queue.wait_for_engine(ticket)
            queue.note_failure(ticket)
            queue.requeue(ticket)

    with pytest.raises(GatewayError, match=r"within 0\.15 s"):
        await asyncio.wait_for(come_back_for_ever(), 5)
