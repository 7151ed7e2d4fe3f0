"""Tests that the simulator's gateways queue, choose and count like real ones.

The same requests go to the same engines.
"""

import asyncio
from random import Random

import msgspec
import pytest

from conveyor_api.batching import Batching
from conveyor_api.queue import Queue
from conveyor_engine.errors import NoPlace
from conveyor_engine.serving.places import Places
from conveyor_gateway.admission.limits import QueueLimits
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket
from conveyor_gateway.errors import QueueFull
from conveyor_insight.simulate.scenarios import PLAIN
from conveyor_insight.simulate.serving import Engine, Request, Serving
from conveyor_metrics.demand import DemandSum, sum_demand
from conveyor_protocol.pages import Demand
from conveyor_protocol.request_headers import PLACE_GRANTED, PLACE_IF_FREE

SPEC = PLAIN.model_copy(update={"batching": Batching(max_batch_size=4)})
MAX_QUEUED = 6
FAR = 1e9  # a deadline that no test reaches


class QuickLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances when nothing else can happen."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        self._now += 1e-6  # what is due first happens first
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


class Engines:
    """Engines without HTTP. They have the real code for places, by address."""

    def __init__(self) -> None:
        self.places: dict[str, Places] = {}

    async def request_place(self, address: str, level: int) -> bool:
        await self.places[address].request()
        return True

    async def give_place_back(self, address: str) -> None:
        self.places[address].give_back()

    async def send(self, queue: ServiceQueue, ticket: Ticket) -> None:
        """Send a request as `relaying` does."""
        while True:
            engine = await queue.wait_for_engine(ticket)
            places = self.places[engine.address]
            await asyncio.sleep(0)
            try:
                with places.reserve(PLACE_GRANTED if ticket.is_granted else PLACE_IF_FREE):
                    return places.hold([str(id(ticket))])
            except NoPlace:
                queue.note_no_place(ticket)
                queue.requeue(ticket)

    def end(self, queue: ServiceQueue, ticket: Ticket) -> None:
        assert ticket.engine is not None
        self.places[ticket.engine.address].release(str(id(ticket)))
        queue.finish(ticket)


class Both:
    """Real and simulated gateways that get the same events at the same time."""

    def __init__(self, seed: int, num_gateways: int) -> None:
        self.random = Random(seed)
        self.running: list[Request] = []
        self.tickets: list[tuple[Request, ServiceQueue, Ticket]] = []
        self.sending: set[asyncio.Task[None]] = set()
        self.engines = Engines()
        spec = SPEC.model_copy(update={"queue": Queue(max_requests=MAX_QUEUED * num_gateways + num_gateways - 1)})
        self.simulated = Serving(
            spec, num_gateways, self.running.append, on_expire=lambda request: pytest.fail("no time passes")
        )
        limits = QueueLimits(MAX_QUEUED, SPEC.queue.timeout_seconds, SPEC.batching.engine_place_limit)
        loop = asyncio.get_running_loop()
        self.real = [ServiceQueue(limits, loop, self.engines) for _ in self.simulated.gateways]
        self.addresses: dict[Engine, str] = {}
        self.refused = 0

    def admit(self) -> None:
        number = self.random.randrange(len(self.real))
        request = Request(0, self.simulated.gateways[number], 1)
        if self.simulated.admit(0, request):
            queue = self.real[number]
            ticket = queue.admit(FAR)
            self.tickets.append((request, queue, ticket))
            self.sending.add(asyncio.create_task(self.engines.send(queue, ticket)))
        else:
            self.refused += 1
            with pytest.raises(QueueFull):
                self.real[number].admit(FAR)

    def end(self) -> None:
        if self.running:
            request = self.running.pop(self.random.randrange(len(self.running)))
            (found,) = [each for each in self.tickets if each[0] is request]
            self.tickets.remove(found)
            self.simulated.end(0, request)
            self.engines.end(*found[1:])

    async def settle(self) -> None:
        """Wait until all consequences have happened, including delayed ones."""
        await asyncio.sleep(0.1)
        self.sending = {task for task in self.sending if not task.done() or task.result()}

    def add_engine(self) -> None:
        engine = Engine(carries=3)
        address = self.addresses[engine] = f"{len(self.addresses)}:1"
        self.engines.places[address] = Places(SPEC.batching.effective_batch_size)
        self.simulated.add_engine(0, engine)
        self.update_engines()

    def remove_engine(self) -> None:
        if self.simulated.engines:
            self.simulated.remove_engine()
            self.update_engines()

    def update_engines(self) -> None:
        for queue in self.real:
            queue.set_engines([self.addresses[engine] for engine in self.simulated.engines])

    def places(self) -> list[tuple[str | None, str | None]]:
        """Return the engine of each request, simulated and real."""
        return [
            (request.engine and self.addresses[request.engine], ticket.engine and ticket.engine.address)
            for request, _, ticket in self.tickets
        ]

    def demand(self) -> DemandSum:
        """Return the metrics server's result for the real queues.

        Engines report how many requests wait and are carried there.
        """
        waiting = {address: len(engine.waiting) for engine, address in self.addresses.items()}
        carried = {address: engine.carries if engine.was_short else None for engine, address in self.addresses.items()}
        demands = [
            {
                "in_flight": queue.queued + queue.dispatched,
                "queue_depth": queue.count_waiting_beyond(0),
                "batch_size": SPEC.batching.effective_batch_size,
                "engines": {
                    address: {"dispatched": count, "waiting": waiting[address], "carried": carried[address]}
                    for address, count in queue.count_dispatched_beyond(0).items()
                },
            }
            for queue in self.real
        ]
        return sum_demand("a/b", [msgspec.convert({"services": {"a/b": demand}}, Demand) for demand in demands])


@pytest.mark.parametrize("num_gateways", [1, 2, 8])
@pytest.mark.parametrize("seed", range(1, 6))
def test_the_same_requests_go_to_the_same_engines_and_are_counted_alike(seed: int, num_gateways: int) -> None:
    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        runner.run(compare(seed, num_gateways))


async def compare(seed: int, num_gateways: int) -> None:
    both = Both(seed, num_gateways)
    for _ in range(400):
        happen = both.random.choices(
            [both.admit, both.end, both.add_engine, both.remove_engine], weights=[60, 50, 2, 1]
        )[0]
        happen()
        await both.settle()
        assert [pair for pair in both.places() if pair[0] != pair[1]] == []
        counted = both.demand()
        assert counted.in_flight == both.simulated.count_in_flight()
        assert counted.queue_depth == both.simulated.count_waiting(0, 0)
    assert len(both.addresses) > 2
    assert both.refused
    assert any(engine.was_short for engine in both.addresses)
