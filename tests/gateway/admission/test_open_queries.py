"""Tests the places that engines grant: which engines are queried, which requests get the places, which are returned."""

import asyncio

from tests.gateway.builders import make_limits

from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket
from conveyor_gateway.errors import Code, GatewayError

FAR = 1e9  # a deadline that no test reaches


class Engines:
    """Engines that answer when the test lets them. `queried` and `given_back` are addresses, in order."""

    def __init__(self) -> None:
        self.queried: list[str] = []
        self.given_back: list[str] = []
        self.takes_back = asyncio.Event()
        self.takes_back.set()
        self._answers: dict[str, asyncio.Future[bool]] = {}

    async def request_place(self, address: str, level: int) -> bool:
        self.queried.append(address)
        self._answers[address] = asyncio.get_running_loop().create_future()
        return await self._answers[address]

    async def give_place_back(self, address: str) -> None:
        self.given_back.append(address)
        await self.takes_back.wait()

    async def answer(self, address: str, granted: bool = True) -> None:
        self._answers.pop(address).set_result(granted)
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def refuse(queue: ServiceQueue, ticket: Ticket) -> None:
    """Let the engine answer that all its places are taken."""
    queue.note_no_place(ticket)
    queue.requeue(ticket)
    await settle()


def make_queue(engines: Engines, *addresses: str) -> ServiceQueue:
    queue = ServiceQueue(make_limits(), asyncio.get_running_loop(), engines)
    for number in range(len(addresses)):
        queue.set_engines(addresses[: number + 1])
    return queue


def where(*tickets: Ticket) -> list[str | None]:
    return [ticket.engine and ticket.engine.address for ticket in tickets]


async def test_an_engine_that_refuses_is_queried_and_its_place_goes_to_the_head_of_the_queue() -> None:
    queue = make_queue(engines := Engines(), "a:1")
    await refuse(queue, first := queue.admit(FAR))
    second = queue.admit(FAR)
    assert (where(first, second), engines.queried) == ([None, None], ["a:1"])
    await engines.answer("a:1")
    assert where(first, second) == ["a:1", None]
    assert first.is_granted
    assert engines.queried == ["a:1", "a:1"]  # for the second
    await engines.answer("a:1")
    assert where(second) == ["a:1"]
    assert (engines.queried[2:], engines.given_back) == ([], [])


async def test_what_another_engine_has_taken_meanwhile_needs_no_place() -> None:
    queue = make_queue(engines := Engines(), "a:1", "b:1")
    await refuse(queue, ticket := queue.admit(FAR))
    assert where(ticket) == ["b:1"]
    await engines.answer("a:1")
    assert engines.given_back == ["a:1"]
    assert where(queue.admit(FAR)) == ["a:1"]  # it has places again


async def test_while_a_query_is_open_no_request_goes_to_that_engine() -> None:
    queue = make_queue(engines := Engines(), "a:1", "b:1")
    await refuse(queue, queue.admit(FAR))
    assert where(*(queue.admit(FAR) for _ in range(2))) == ["b:1", None]
    assert engines.queried == ["a:1"]


async def test_an_engine_that_refuses_what_it_has_granted_is_not_queried_again_for_that_request() -> None:
    queue = make_queue(engines := Engines(), "a:1")
    await refuse(queue, ticket := queue.admit(FAR))
    await engines.answer("a:1")
    await refuse(queue, ticket)
    await engines.answer("a:1")
    assert where(ticket) == [None]
    assert (engines.queried, engines.given_back) == (["a:1", "a:1"], ["a:1"])
    assert ticket.full_until > queue.loop.time()


async def test_an_engine_that_cannot_be_queried_is_left_out_for_a_while() -> None:
    queue = make_queue(engines := Engines(), "a:1")
    await refuse(queue, ticket := queue.admit(FAR))
    await engines.answer("a:1", granted=False)
    assert where(ticket) == [None]
    assert queue.pool.next_return_seconds(queue.loop.time()) is not None
    assert engines.queried == ["a:1"]


async def test_a_queue_that_ends_takes_nothing_more() -> None:
    queue = make_queue(engines := Engines(), "a:1")
    await refuse(queue, queue.admit(FAR))
    queue.close(GatewayError("gone", Code.SERVICE_DELETED))
    await settle()
    assert engines.queried == ["a:1"]
    assert all(task.done() for task in queue._dispatcher._queries._tasks)


async def test_an_engine_that_takes_no_place_back_is_queried_again_only_afterwards() -> None:
    queue = make_queue(engines := Engines(), "a:1")
    engines.takes_back.clear()
    await refuse(queue, first := queue.admit(FAR))
    queue.finish(first)
    await engines.answer("a:1")
    assert (engines.queried, engines.given_back) == (["a:1"], ["a:1"])
    await refuse(queue, queue.admit(FAR))
    assert (engines.queried, engines.given_back) == (["a:1"], ["a:1"])
    engines.takes_back.set()
    await settle()
    assert engines.queried == ["a:1", "a:1"]


async def test_a_pod_that_is_ready_again_gets_no_second_query_beside_the_open_one() -> None:
    queue = make_queue(engines := Engines(), "a:1")
    for _ in range(3):
        ticket = queue.admit(FAR)
        await refuse(queue, ticket)
        queue.finish(ticket)
        queue.set_engines([])
        queue.set_engines(["a:1"])
    assert engines.queried == ["a:1"]
    await refuse(queue, waiting := queue.admit(FAR))
    await engines.answer("a:1")
    assert engines.given_back == ["a:1"], "the place was granted to the pod before"
    assert engines.queried == ["a:1", "a:1"]
    await engines.answer("a:1")
    assert where(waiting) == ["a:1"]
