"""Tests that an event's cost depends on the requests that it wakes, not on those that wait. Counts executed lines."""

import asyncio
import random
from collections.abc import Callable
from functools import partial

import pytest
from tests.gateway.builders import NeverAsked, make_limits
from tests.lines_run import count_lines

from conveyor_gateway.admission.dispatcher import MAX_WAKES_A_TURN
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket, TicketState, Work
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.watching.classes import QueueClass

FAR = 1e9  # a deadline that no test reaches
FOLDER = "/conveyor_gateway/admission/"
FEW, MANY = 100, 3_200
CLASSES = [QueueClass(name, level) for name, level in (("a", 0), ("b", 1), ("c", 500))]


def make_queue(num_waiting: int, num_engines: int, num_clients: int) -> tuple[ServiceQueue, list[Ticket]]:
    """Make a queue in which all waiting requests were refused by engines without room.

    The engines have places for others.
    """
    queue = ServiceQueue(make_limits(num_waiting + 100, place_limit=10_000), asyncio.get_running_loop(), NeverAsked())
    queue.set_engines(f"10.0.0.{number}:8000" for number in range(num_engines))
    tickets = []
    while queue.queued < num_waiting:
        number = len(tickets)
        client, work = f"client-{number % num_clients}", Work(number % 11)
        tickets.append(queue.admit(FAR, CLASSES[number % len(CLASSES)], (number * 7) % 30, client=client, work=work))
        while tickets[-1].engine is not None:
            refuse(queue, tickets[-1])
    return queue, tickets


def refuse(queue: ServiceQueue, ticket: Ticket) -> None:
    queue.note_full(ticket)
    ticket.full_until = FAR  # no pause ends in the test, however slow the machine
    queue.requeue(ticket)


def at_an_engine(queue: ServiceQueue) -> Ticket:
    ticket = queue.admit(FAR)
    assert ticket.state is TicketState.DISPATCHED
    return ticket


EVENTS: dict[str, Callable[[ServiceQueue, list[Ticket]], Callable[[], object]]] = {
    "an arrival": lambda queue, tickets: lambda: queue.admit(FAR),
    "a refusal": lambda queue, tickets: (lambda ticket: lambda: refuse(queue, ticket))(at_an_engine(queue)),
    "a failure": lambda queue, tickets: (lambda ticket: lambda: (queue.note_failure(ticket), queue.requeue(ticket)))(
        at_an_engine(queue)
    ),
    "an end": lambda queue, tickets: partial(queue.finish, at_an_engine(queue)),
    "a departure from the middle": lambda queue, tickets: partial(queue.finish, tickets[len(tickets) // 2]),
    "an arrival of the least urgent class": lambda queue, tickets: lambda: queue.admit(FAR, CLASSES[-1]),
    "a delay": lambda queue, tickets: partial(queue._delay, tickets[len(tickets) // 2]),
    "an eviction by a more urgent class": lambda queue, tickets: lambda: queue._find_full(queue.admit(FAR)),
    "a look at the queue": lambda queue, tickets: queue._dispatcher.match,
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("num_engines", "num_clients"), [(1, 1), (8, 1), (8, 10_000)])
async def test_an_event_costs_no_more_with_many_waiting_than_with_few(
    event: str, num_engines: int, num_clients: int
) -> None:
    costs = []
    random.seed(1)  # the depth of the index is a matter of chance: seldom, a tree of the few is very flat
    for num_waiting in (FEW, MANY):
        queue, tickets = make_queue(num_waiting, num_engines, num_clients)
        costs.append(count_lines(EVENTS[event](queue, tickets), FOLDER))
        queue.close(GatewayError("the end", Code.SERVICE_DELETED))
    assert costs[1] < 6 * costs[0], costs  # the indexes are twice as deep, by chance up to three times


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_wakes_many_wakes_them_over_several_turns_of_the_loop() -> None:
    queue = ServiceQueue(make_limits(1000, place_limit=1000), asyncio.get_running_loop(), NeverAsked())
    tickets = [queue.admit(FAR) for _ in range(5 * MAX_WAKES_A_TURN)]
    queue.set_engines(["a:1"])
    assert queue.dispatched == MAX_WAKES_A_TURN
    await turns(10)
    assert queue.dispatched == len(tickets)


async def test_a_deleted_service_refuses_those_who_wait_over_several_turns() -> None:
    queue = ServiceQueue(make_limits(1000), asyncio.get_running_loop(), NeverAsked())
    waiting = [asyncio.create_task(queue.wait_for_engine(queue.admit(FAR))) for _ in range(3 * MAX_WAKES_A_TURN)]
    await turns(1)
    queue.close(GatewayError("it was deleted", Code.SERVICE_DELETED))
    await turns(1)
    assert sum(task.done() for task in waiting) <= 2 * MAX_WAKES_A_TURN
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, GatewayError) for end in ends)
