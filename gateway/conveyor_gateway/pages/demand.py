"""`GET /demand`: how many requests this gateway holds for each service, and where.

Asked by the metrics server whenever the HorizontalPodAutoscaler asks it, and summed there over all gateways. A known
service is listed, zeros included, so that "no demand" and "not known" are never confused.
`?service=<namespace>/<name>` asks for that one, as the metrics server does; only then its engines are asked how many
requests wait inside them, and how many they carry. What an engine says is about the requests of all gateways, so it is
told per engine.
"""

from typing import Final

from msgspec import structs

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.engines.fetching import fetch_loads
from conveyor_gateway.watching.catalog import Service
from conveyor_protocol.pages import ClassDemand, Demand, EngineDemand, ServiceDemand

# The metrics server waits one second for a gateway. An engine that is slower than this is counted without its word.
_ENGINE_SECONDS: Final = 0.4


async def read_demand(queues: Queues, only: str | None) -> Demand:
    """The counts of this moment, of all services or of `only` one, which may not be known."""
    services = {service.key: _build(service, queue) for service, queue in queues.items(only)}
    if only in services:
        engines = services[only].engines
        for address, load in (await fetch_loads(engines, _ENGINE_SECONDS)).items():
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
        batch_size=service.batch_size,
        engines={address: EngineDemand(dispatched=count, waiting=None) for address, count in at_engines.items()},
        classes={
            each.name: ClassDemand(queue.count_waiting_of(each.level), queue.find_wait_seconds(each.level))
            for each in service.classes.ordered
        },
    )
