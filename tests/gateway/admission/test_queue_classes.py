"""Tests the classes of a queue: the order, the bound on overtaking, limits, delays and shares."""

import asyncio
from collections import defaultdict
from statistics import quantiles
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.admission.queues import FAR, make_queue, start
from tests.gateway.builders import NeverAsked, make_limits

from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket, TicketState
from conveyor_gateway.errors import Code, GatewayError, QueueFull
from conveyor_gateway.watching.classes import WITHOUT_CLASSES, QueueClass, QueueClasses
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS, MAX_OFFSET_SECONDS

CHAT, TOOLS, BATCH = QueueClass("chat", 0), QueueClass("tools", 2), QueueClass("batch", 100)


def of(*classes: QueueClass) -> QueueClasses:
    return QueueClasses(classes, classes[-1], classes[0]) if classes else WITHOUT_CLASSES


class VirtualTime:
    """A queue whose time the test advances. All that it does happens immediately."""

    def __init__(self, *classes: QueueClass, **limits: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        values = {"max_queued_requests": 10_000, "place_limit": 1, **limits}
        self.queue = ServiceQueue(make_limits(**values, classes=of(*classes)), self.loop, NeverAsked())
        self.queue.set_engines(["a:1"])

    def __enter__(self) -> "VirtualTime":
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()

    @property
    def running(self) -> set[Ticket]:
        return self.queue._dispatcher.dispatched


def test_a_better_class_goes_first_and_arrival_decides_within_a_class() -> None:
    with VirtualTime(CHAT, TOOLS, BATCH) as run:
        first = run.queue.admit(FAR, BATCH)
        tickets = [run.queue.admit(FAR, each) for each in (BATCH, TOOLS, CHAT, BATCH, CHAT)]
        order = []
        for _ in tickets:
            run.now += 1
            run.queue.finish(first)
            (first,) = run.running
            order.append(tickets.index(first))
        assert order == [2, 4, 1, 0, 3]


def test_a_request_that_counts_as_earlier_goes_first_in_its_class_but_never_before_a_better_one() -> None:
    adjacent = QueueClass("next", 1)
    with VirtualTime(CHAT, adjacent) as run:
        held = run.queue.admit(FAR)
        run.queue.admit(FAR, adjacent)
        urgent = run.queue.admit(FAR, adjacent, -MAX_OFFSET_SECONDS)
        chat = run.queue.admit(FAR, CHAT, MAX_OFFSET_SECONDS / 2)
        run.queue.finish(held)
        assert run.running == {chat}
        run.queue.finish(chat)
        assert run.running == {urgent}


ARRIVALS = st.tuples(
    st.floats(0, 40), st.sampled_from((CHAT, QueueClass("next", 1), TOOLS)), st.floats(-MAX_OFFSET_SECONDS, 0)
)


@given(st.lists(st.one_of(ARRIVALS, st.none()), min_size=5, max_size=60))
def test_nobody_is_overtaken_for_longer_than_the_bound(events: list[tuple[float, QueueClass, float] | None]) -> None:
    """None: a request ends and the next one gets its place."""
    with VirtualTime(CHAT, QueueClass("next", 1), TOOLS) as run:
        for event in events:
            if event is not None:
                run.now += event[0]
                run.queue.admit(FAR, event[1], event[2])
                continue
            for ticket in list(run.running):
                run.queue.finish(ticket)
            for ticket in run.running:
                for waiting in run.queue._waiting:
                    levels = waiting.level - ticket.level
                    bound = levels * LEVEL_AGEING_SECONDS + MAX_OFFSET_SECONDS
                    assert ticket.admitted_at - waiting.admitted_at <= max(0.0, bound) + 1e-6


def test_in_ten_times_overload_the_best_class_waits_two_steps_at_most_and_the_worst_one_as_long_as_the_bound() -> None:
    """There are eight places, and requests take a second. Eighty arrive per second, four of the most urgent class."""
    places, levels, seconds = 8, 3, 400
    worse = QueueClass("worse", levels)
    waits: dict[str, list[float]] = defaultdict(list)
    with VirtualTime(CHAT, worse, place_limit=places, max_queued_requests=100_000) as run:
        ends: dict[Ticket, float] = {}
        for step in range(seconds * 80):
            run.now = 1000 + step / 80
            for ticket in [each for each, end in ends.items() if end <= run.now]:
                del ends[ticket]
                run.queue.finish(ticket)
            run.queue.admit(FAR, CHAT if step % 20 == 0 else worse)
            for ticket in run.running - ends.keys():
                ends[ticket] = run.now + 1
                waits[ticket.request_class.name].append(run.now - ticket.admitted_at)
    early = waits["chat"][: 4 * levels * 60]  # until the oldest of the less urgent class count as much
    assert quantiles(early, n=100)[98] <= 2.0
    assert len(waits["worse"]) >= seconds * places / 4, "what the most urgent class leaves goes to the other"


def test_a_worse_class_gets_its_turn_after_the_bound_though_the_best_one_has_no_end() -> None:
    worse, bound = QueueClass("worse", 1), LEVEL_AGEING_SECONDS
    with VirtualTime(CHAT, worse) as run:
        run.queue.admit(FAR, CHAT)
        low, began = run.queue.admit(FAR, worse), run.now
        while low.state is TicketState.QUEUED:
            run.queue.admit(FAR, CHAT)
            run.queue.admit(FAR, CHAT)  # twice what one place can do
            run.now += 1
            for ticket in list(run.running):
                run.queue.finish(ticket)
            assert run.now - began <= 2 * bound + 2, "those of its first minute need two"
        assert run.now - began >= bound


async def test_one_more_than_a_class_may_have_is_refused_and_others_are_not() -> None:
    small = QueueClass("small", 5, max_queued_requests=4)
    queue = make_queue(max_queued_requests=10, classes=of(CHAT, small), num_gateways=2)
    for _ in range(2):
        queue.admit(FAR, small)
    with pytest.raises(QueueFull, match=r"2 requests wait, .* the maxRequests of class small"):
        queue.admit(FAR, small)
    queue.admit(FAR, CHAT)
    assert (queue.count_waiting_of(5), queue.queued) == (2, 3)


async def test_in_a_full_queue_a_better_class_takes_the_place_of_the_last_of_the_worst_one() -> None:
    queue = make_queue(max_queued_requests=3, classes=of(CHAT, TOOLS, BATCH))
    tickets = [queue.admit(FAR, each) for each in (BATCH, BATCH, TOOLS)]
    waiting = [await start(queue.wait_for_engine(ticket)) for ticket in tickets]
    queue.admit(FAR, CHAT)
    with pytest.raises(QueueFull, match=r"queue\.maxRequests"):
        await waiting[1]
    assert [task.done() for task in waiting] == [False, True, False]
    with pytest.raises(QueueFull):
        queue.admit(FAR, BATCH)
    for task in waiting:
        task.cancel()


async def test_each_class_has_its_own_timeout() -> None:
    hasty = QueueClass("hasty", 0, timeout_seconds=0.01)
    queue = make_queue(classes=of(hasty, BATCH))
    assert await end_of(queue, hasty) is Code.QUEUE_TIMEOUT
    patient = await start(queue.wait_for_engine(queue.admit(FAR, BATCH)))
    await asyncio.sleep(0.03)
    assert not patient.done()
    patient.cancel()


async def end_of(queue: ServiceQueue, of_class: QueueClass) -> Code:
    with pytest.raises(GatewayError) as caught:
        await queue.wait_for_engine(queue.admit(FAR, of_class))
    return caught.value.code


async def test_a_request_whose_own_time_is_over_leaves_the_queue_whatever_its_class() -> None:
    queue = make_queue(classes=of(CHAT, BATCH))
    for each in (CHAT, BATCH):
        ticket = queue.admit(queue.loop.time() + 0.01, each)
        with pytest.raises(GatewayError, match="the request's deadline passed"):
            await queue.wait_for_engine(ticket)
        queue.finish(ticket)
    queue.set_engines(["a:1"])
    assert queue.dispatched == 0, "it costs no place"


async def test_a_delayed_request_falls_to_the_worst_level_and_waits_on_until_the_queues_timeout() -> None:
    delayed = QueueClass("delayed", 0, timeout_seconds=0.01, is_delayed=True)
    queue = make_queue(place_limit=1, queue_timeout_seconds=0.2, classes=of(delayed, TOOLS, BATCH))
    first = queue.admit(FAR, delayed)
    waiting = [await start(queue.wait_for_engine(first))]
    batch = queue.admit(FAR, TOOLS)
    waiting.append(await start(queue.wait_for_engine(batch)))
    await asyncio.sleep(0.05)
    assert (first.level, queue.count_waiting_of(BATCH.level)) == (BATCH.level, 1)
    queue.set_engines(["a:1"])
    assert (first.state, batch.state) == (TicketState.QUEUED, TicketState.DISPATCHED)
    with pytest.raises(GatewayError, match=r"within 0.2 s"):
        await waiting[0]
    await waiting[1]


def test_a_class_and_all_worse_ones_have_their_share_of_the_places_and_one_at_least() -> None:
    half, least = QueueClass("half", 10, max_share_percent=50), QueueClass("least", 20, max_share_percent=1)
    with VirtualTime(CHAT, half, least, place_limit=8) as run:
        worse = [run.queue.admit(FAR, least) for _ in range(3)]
        better = [run.queue.admit(FAR, half) for _ in range(6)]
        assert states(worse) == "Dqq", "one at least"
        assert states(better) == "DDDqqq", "half of the places, with those of the less urgent class"
        best = [run.queue.admit(FAR, CHAT) for _ in range(6)]
        assert states(best) == "DDDDqq"
        run.queue.finish(best[0])
        assert states(best[4:]) == "Dq", "a place of the others does not go to a class that has its share"
        run.queue.finish(better[0])
        assert states(best[5:]) == "D"
        run.queue.finish(better[1])
        assert states([*better[3:], *worse[1:]]) == "Dqqqq"


def states(tickets: list[Ticket]) -> str:
    return "".join("D" if ticket.state is TicketState.DISPATCHED else "q" for ticket in tickets)


def test_the_gateways_share_what_a_class_may_hold() -> None:
    half = QueueClass("half", 10, max_share_percent=50)
    with VirtualTime(CHAT, half, place_limit=8, num_gateways=2) as run:
        assert states([run.queue.admit(FAR, half) for _ in range(4)]) == "DDqq"
