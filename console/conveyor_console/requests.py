"""Sums the requests that gateways report. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from conveyor_protocol.pages import Demand, ServiceDemand


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one service at all gateways that answered."""

    queued: int = 0
    at_engines: int = 0
    ready: int = 0
    """Engines that accept requests."""
    places: int = 0
    """Requests that the ready engines run at once."""
    classes: tuple[tuple[str, int, float], ...] = ()
    """(name, queued requests, seconds that the first one has waited) of each class, the most urgent first."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The queued requests of one client and one class, and how long the first one has waited."""

    caller: str
    request_class: str
    queued: int
    seconds: float


NO_REQUESTS: Final = Requests()


def sum_requests(pages: Iterable[Demand]) -> dict[str, Requests]:
    """Return the sum over the gateways, by service. Every gateway reports the same engines."""
    by_service: dict[str, list[ServiceDemand]] = {}
    for page in pages:
        for key, demand in page.services.items():
            by_service.setdefault(key, []).append(demand)
    return {key: _sum(demands) for key, demands in by_service.items()}


def _sum(demands: list[ServiceDemand]) -> Requests:
    ready = max(each.replicas.ready if each.replicas else 0 for each in demands)
    return Requests(
        queued=sum(each.queued for each in demands),
        at_engines=sum(each.dispatched for each in demands),
        ready=ready,
        places=ready * max(each.batch_size for each in demands),
        classes=tuple(
            (
                name,
                sum(each.classes[name].queued for each in demands if name in each.classes),
                max(each.classes[name].wait_seconds for each in demands if name in each.classes),
            )
            for name in demands[0].classes
        ),
    )
