"""Values of the gateway's own types, for tests that need no cluster."""

from typing import Any

from conveyor_gateway.admission.ticket import QueueLimits
from conveyor_gateway.watching.catalog import Directory, Service


def make_known_service(key: str, model: str = "", **changes: Any) -> Service:
    namespace, _, name = key.partition("/")
    values: dict[str, Any] = {
        "namespace": namespace,
        "name": name,
        "model_name": model or name,
        "created_unix": 0,
        "batch_size": 1,
        "place_limit": 2,
        "window_seconds": 0.0,
        "max_queued_requests": 4,
        "queue_timeout_seconds": 60.0,
        "request_timeout_seconds": 600.0,
    }
    return Service(**{**values, **changes})


def make_directory(*services: Service) -> Directory:
    directory = Directory()
    for service in services:
        directory.put(service)
    return directory


class NeverAsked:
    """Engines that grant no places, and so are not asked for any."""

    async def ask_for_place(self, address: str) -> bool:
        raise AssertionError(address)

    async def give_place_back(self, address: str) -> None:
        raise AssertionError(address)


def make_limits(max_queued_requests: int = 4, queue_timeout_seconds: float = 60.0, place_limit: int = 2) -> QueueLimits:
    return QueueLimits(max_queued_requests, queue_timeout_seconds, place_limit)
