"""What `GET /demand` says: how many requests this gateway holds for each service.

Asked by the metrics server whenever the HorizontalPodAutoscaler asks it, and summed there over all gateways. A known
service is listed, zeros included, so that "no demand" and "not known" are never confused. `?service=<namespace>/<name>`
asks for that one, as the metrics server does: there are as many questions as services.
"""

from typing import TypedDict

from conveyor_gateway.queues import Queues


class ServiceDemand(TypedDict):
    in_flight: int  # queued + dispatched
    queue_depth: int  # queued beyond the batching window
    queued: int
    dispatched: int


class Demand(TypedDict):
    services: dict[str, ServiceDemand]


def build_demand(queues: Queues, only: str | None) -> Demand:
    """The counts of this moment, of all services or of `only` one, which may not be known."""
    services: dict[str, ServiceDemand] = {
        service.key: {
            "in_flight": queue.queued + queue.dispatched,
            "queue_depth": queue.count_waiting_beyond(service.window_seconds),
            "queued": queue.queued,
            "dispatched": queue.dispatched,
        }
        for service, queue in queues.items(only)
    }
    return {"services": services}
