"""The simulator's gateways queue, choose and count as the real ones do: the same requests go to the same engines."""

import asyncio
from random import Random

import pytest

from conveyor_api.batching import Batching
from conveyor_api.spec import Queue
from conveyor_gateway.admission.service_queue import QueueLimits, ServiceQueue, Ticket
from conveyor_gateway.errors import QueueFull
from conveyor_metrics.demand import Demand, ServiceDemand, sum_demand
from conveyor_operator.simulate.scenarios import PLAIN
from conveyor_operator.simulate.serving import Engine, Request, Serving

SPEC = PLAIN.model_copy(update={"batching": Batching(max_batch_size=4), "queue": Queue(max_requests=13)})
FAR = 1e9  # a deadline that no test reaches


class Both:
    """Two gateways, real and simulated, to which the same happens at one moment."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.running: list[Request] = []
        self.tickets: list[tuple[Request, Ticket]] = []
        self.simulated = Serving(SPEC, 2, self.running.append, on_expire=lambda request: pytest.fail("no time passes"))
        limits = QueueLimits(13 // 2, SPEC.queue.timeout_seconds, SPEC.batching.engine_place_limit)
        self.real = [ServiceQueue(limits, asyncio.get_running_loop()) for _ in self.simulated.gateways]
        self.addresses: dict[Engine, str] = {}
        self.refused = 0

    def admit(self) -> None:
        number = self.random.randrange(2)
        request = Request(0, self.simulated.gateways[number], 1)
        if self.simulated.admit(0, request):
            self.tickets.append((request, self.real[number].admit(FAR)))
        else:
            self.refused += 1
            with pytest.raises(QueueFull):
                self.real[number].admit(FAR)

    def end(self) -> None:
        if self.running:
            request = self.running.pop(self.random.randrange(len(self.running)))
            (ticket,) = [ticket for each, ticket in self.tickets if each is request]
            self.tickets.remove((request, ticket))
            self.simulated.end(0, request)
            ticket.close()

    def add_engine(self) -> None:
        engine = Engine(carries=3)
        self.addresses[engine] = f"{len(self.addresses)}:1"
        self.simulated.add_engine(0, engine)
        self.tell_engines()

    def remove_engine(self) -> None:
        if self.simulated.engines:
            self.simulated.remove_engine()
            self.tell_engines()

    def tell_engines(self) -> None:
        for queue in self.real:
            queue.set_engines([self.addresses[engine] for engine in self.simulated.engines])

    def places(self) -> list[tuple[str | None, str | None]]:
        """Of each request the engine, simulated and real."""
        return [
            (request.engine and self.addresses[request.engine], ticket.engine and ticket.engine.address)
            for request, ticket in self.tickets
        ]

    def demand(self) -> ServiceDemand:
        """What the metrics server would make of the real queues, where engines say what waits there and is carried."""
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
        return sum_demand("a/b", [Demand.model_validate({"services": {"a/b": demand}}) for demand in demands])


@pytest.mark.parametrize("seed", range(5))
async def test_the_same_requests_go_to_the_same_engines_and_are_counted_alike(seed: int) -> None:
    both = Both(seed)
    for _ in range(400):
        happen = both.random.choices(
            [both.admit, both.end, both.add_engine, both.remove_engine], weights=[60, 50, 2, 1]
        )[0]
        happen()
        assert [pair for pair in both.places() if pair[0] != pair[1]] == []
        in_flight, depth = both.simulated.count_in_flight(), both.simulated.count_waiting(0, 0)
        counted = ServiceDemand(in_flight=in_flight, queue_depth=depth)
        assert both.demand() == counted
    assert len(both.addresses) > 2
    assert both.refused
    assert any(engine.was_short for engine in both.addresses)
