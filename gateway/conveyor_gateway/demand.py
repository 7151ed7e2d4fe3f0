"""What `GET /demand` says: how many requests this gateway holds for each service.

Asked by the metrics server whenever the HorizontalPodAutoscaler asks it, and summed there over all gateways. Every
known service is listed, zeros included, so that "no demand" and "not known" are never confused.
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
    synced: bool


def build_demand(queues: Queues) -> Demand:
    """The counts of this moment, for a gateway that has synced."""
    services: dict[str, ServiceDemand] = {
        service.key: {
            "in_flight": queue.queued + queue.dispatched,
            "queue_depth": queue.count_waiting_beyond(service.window_seconds),
            "queued": queue.queued,
            "dispatched": queue.dispatched,
        }
        for service, queue in queues.items()
    }
    return {"services": services, "synced": True}
