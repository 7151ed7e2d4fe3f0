"""Builds values of the gateway's types, for tests without a cluster."""

from typing import Any

from conveyor_api.served_name import object_name
from conveyor_gateway.admission.limits import QueueLimits
from conveyor_gateway.capacity.ledger import Hold, Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.watching.catalog import Directory, Service
from conveyor_kube.served_names import Claim


def make_known_service(key: str, model: str = "", **changes: Any) -> Service:
    namespace, _, name = key.partition("/")
    values: dict[str, Any] = {
        "namespace": namespace,
        "name": name,
        "model_name": model or name,
        "listed": True,
        "created_unix": 0,
        "batch_size": 1,
        "place_limit": 2,
        "window_seconds": 0.0,
        "max_queued_requests": 4,
        "queue_timeout_seconds": 60.0,
        "request_timeout_seconds": 600.0,
    }
    return Service(**{**values, **changes})


def make_directory(*services: Service, **claims: str) -> Directory:
    """Build a directory. claims: served names with the namespaces that hold them."""
    directory = Directory()
    for number, (name, namespace) in enumerate(claims.items()):
        claim(directory, namespace, name, number)
    for service in services:
        directory.put(service)
    return directory


def claim(directory: Directory, namespace: str, name: str, created_unix: int = 0) -> None:
    key = f"{namespace}/{object_name(name)}"
    directory.names.put_claim(key, Claim(namespace, object_name(name), f"uid-of-{key}", name, created_unix))


def make_hold(max_bytes: int = 1 << 20) -> Hold:
    """Return the only hold of a ledger."""
    return Ledger(max_bytes).hold(Owner("default", "default/qwen", "10.0.0.1"), lambda error: None)


class NeverAsked:
    """Engines that grant no places, so they are not asked for any."""

    async def request_place(self, address: str, level: int) -> bool:
        raise AssertionError(address)

    async def give_place_back(self, address: str) -> None:
        raise AssertionError(address)


def make_limits(
    max_queued_requests: int = 4, queue_timeout_seconds: float = 60.0, place_limit: int = 2, **more: Any
) -> QueueLimits:
    return QueueLimits(max_queued_requests, queue_timeout_seconds, place_limit, **more)
