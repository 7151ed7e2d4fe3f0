"""What `GET /demand` says: how many requests this gateway holds for each service, and where.

Asked by the metrics server whenever the HorizontalPodAutoscaler asks it, and summed there over all gateways. A known
service is listed, zeros included, so that "no demand" and "not known" are never confused.
`?service=<namespace>/<name>` asks for that one, as the metrics server does; only then its engines are asked how many
requests wait inside them, and how many they carry. What an engine says is about the requests of all gateways, so it is
told per engine.
"""

from typing import Final, TypedDict

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.engines.pages import fetch_loads
from conveyor_gateway.watching.catalog import Service

# The metrics server waits one second for a gateway. An engine that is slower than this is counted without its word.
_ENGINE_SECONDS: Final = 0.4


class EngineDemand(TypedDict):
    dispatched: int  # of this gateway's, those that came longer than the batching window ago
    waiting: int | None  # of all gateways', what the engine says that waits for a place in its batch
    carried: int | None  # requests at once, if the engine says that its KV cache was short lately


class ServiceDemand(TypedDict):
    in_flight: int  # queued + dispatched
    queue_depth: int  # queued beyond the batching window
    queued: int
    dispatched: int
    batch_size: int  # how many one engine runs at once
    engines: dict[str, EngineDemand]  # by address, those with requests of this gateway


class Demand(TypedDict):
    services: dict[str, ServiceDemand]


async def read_demand(queues: Queues, only: str | None) -> Demand:
    """The counts of this moment, of all services or of `only` one, which may not be known."""
    services = {service.key: _build(service, queue) for service, queue in queues.items(only)}
    if only in services:
        engines = services[only]["engines"]
        for address, load in (await fetch_loads(engines, _ENGINE_SECONDS)).items():
            engines[address]["waiting"], engines[address]["carried"] = load.waiting, load.carried
    return {"services": services}


def _build(service: Service, queue: ServiceQueue) -> ServiceDemand:
    at_engines = queue.count_dispatched_beyond(service.window_seconds)
    return {
        "in_flight": queue.queued + queue.dispatched,
        "queue_depth": queue.count_waiting_beyond(service.window_seconds),
        "queued": queue.queued,
        "dispatched": queue.dispatched,
        "batch_size": service.batch_size,
        "engines": {
            address: {"dispatched": count, "waiting": None, "carried": None} for address, count in at_engines.items()
        },
    }
