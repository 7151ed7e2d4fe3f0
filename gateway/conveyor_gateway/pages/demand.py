"""Serves `GET /demand`: how many requests this gateway holds for each service, in the queue and at each engine.

The metrics server requests it when the HorizontalPodAutoscaler reads a metric, and sums the answers of all gateways.
Services without requests are listed with zeros, so that "no demand" and "unknown service" differ.

The metrics server uses `?service=<namespace>/<name>` for a single service. Only then does this gateway also query the
engines for their backlog and for how many requests they run at once. These numbers include the requests of all
gateways, so they are listed for each engine.
"""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec
from msgspec import structs

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.engines.fetching import fetch_loads
from conveyor_gateway.engines.transport import PLAIN, Transport
from conveyor_gateway.watching.catalog import Service
from conveyor_protocol.pages import ClassDemand, Demand, EngineDemand, Replicas, ServiceDemand

# The metrics server waits one second for a gateway. The numbers of an engine that takes longer than this are left out.
_ENGINE_SECONDS: Final = 0.4
_SERVICES_PER_PIECE: Final = 100


def encode_demand(queues: Queues) -> Iterator[bytes]:
    """Yield the JSON of a Demand with the counts of all services. The counts of a piece are those of its time."""
    comma, remaining = b"", iter(queues.items())
    yield b'{"services":{'
    while some := {service.key: _build(service, queue) for service, queue in islice(remaining, _SERVICES_PER_PIECE)}:
        yield comma + msgspec.json.encode(some)[1:-1]
        comma = b","
    yield b"}}"


async def read_demand(queues: Queues, ledger: Ledger, only: str, transport: Transport = PLAIN) -> Demand:
    """Return the current counts of the service `only`; of none if it is unknown."""
    services = {service.key: _build(service, queue) for service, queue in queues.items(only)}
    if only in services:
        engines = services[only].engines
        with ledger.hold_bytes(Owner(only.partition("/")[0], only, "")) as hold:
            loads = await fetch_loads(hold, engines, _ENGINE_SECONDS, transport)
        for address, load in loads.items():
            engines[address] = structs.replace(
                engines[address], waiting=load.waiting, carried=load.carried, limit_reason=load.limit_reason
            )
    return Demand(services)


def _build(service: Service, queue: ServiceQueue) -> ServiceDemand:
    at_engines = queue.count_dispatched_beyond(service.window_seconds)
    return ServiceDemand(
        in_flight=queue.queued + queue.dispatched,
        queue_depth=queue.count_waiting_beyond(service.window_seconds),
        queued=queue.queued,
        dispatched=queue.dispatched,
        from_start=queue.count_from_start(),
        batch_size=service.batch_size,
        replicas=_count_replicas(service, queue.num_engines),
        targets=service.targets,
        engines={address: EngineDemand(dispatched=count, waiting=None) for address, count in at_engines.items()},
        classes={
            each.name: ClassDemand(queue.count_waiting_of(each.level), queue.find_wait_seconds(each.level))
            for each in service.classes.ordered
        },
    )


def _count_replicas(service: Service, ready: int) -> Replicas:
    """Return the replicas. The operator's status may be older than the list of ready engines, which bounds it."""
    desired = service.desired_replicas or 0
    starting = service.starting_replicas if time.time() < service.starting_until_unix else 0
    return Replicas(ready, min(starting, max(0, desired - ready)), desired)
