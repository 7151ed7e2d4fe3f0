"""The demand that gateways report, and its sum. Pure; used by `source`.

Each request counts once: what waits at a gateway is that gateway's own, and what waits inside an engine is counted per
engine, however many gateways send to it. Where KV caches carry less than a batch, it counts for more than one place.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from conveyor_metrics.errors import NotFound
from conveyor_protocol.pages import ClassDemand, Demand, EngineDemand, ServiceDemand


@dataclass(frozen=True, slots=True)
class ClassSum:
    """Requests of one class that wait at gateways, and how long the first one of any gateway has waited."""

    queued: int
    wait_seconds: int


@dataclass(frozen=True, slots=True)
class DemandSum:
    """Requests held for one InferenceService, and those of them that wait. Both count places of full batches."""

    in_flight: int
    queue_depth: int
    running_limit: int = 0
    """Requests that an engine runs together, as the mean of those that have requests."""
    limited_engines: Mapping[str, int] = field(default_factory=dict)
    """Engines with objectives that have requests, by the reason of their limit."""
    classes: Mapping[str, ClassSum] = field(default_factory=dict)


def sum_demand(service: str, demands: list[Demand]) -> DemandSum:
    """Sum the demand for `namespace/name` over all gateways. Raises NotFound if no gateway knows the service."""
    known = [demand.services[service] for demand in demands if service in demand.services]
    if not known:
        raise NotFound(f"no gateway knows an InferenceService {service}")
    engines, batch_size = _group_by_engine(known), max(demand.batch_size for demand in known)
    in_flight = sum(demand.in_flight for demand in known)
    waiting = sum(demand.queue_depth for demand in known)
    waiting += sum(_count_waiting_at(reports, batch_size) for reports in engines)
    carried = [number for reports in engines if (number := _find_carried(reports, batch_size)) is not None]
    return DemandSum(
        in_flight=_count_places(in_flight, carried, batch_size),
        queue_depth=_count_places(waiting, carried, batch_size),
        running_limit=sum(carried) // len(carried) if carried else batch_size,
        limited_engines=Counter(reason for reports in engines if (reason := _find_limit_reason(reports))),
        classes=_sum_classes(known),
    )


def _sum_classes(demands: list[ServiceDemand]) -> dict[str, ClassSum]:
    by_name: dict[str, list[ClassDemand]] = {}
    for demand in demands:
        for name, told in demand.classes.items():
            by_name.setdefault(name, []).append(told)
    return {
        name: ClassSum(sum(each.queued for each in told), int(max(each.wait_seconds for each in told)))
        for name, told in by_name.items()
    }


def _count_places(requests: int, carried: list[int], batch_size: int) -> int:
    """Places of full batches that so many requests take where engines carry these numbers at once, rounded up.

    Engines that do not say are taken for the mean of those that do: they run one model, and a new one knows nothing.
    """
    return -(-requests * batch_size * len(carried) // sum(carried)) if carried else requests


def _group_by_engine(demands: list[ServiceDemand]) -> list[list[EngineDemand]]:
    """Group by engine, because an engine reports the same numbers to every gateway."""
    by_engine: dict[str, list[EngineDemand]] = {}
    for demand in demands:
        for address, engine in demand.engines.items():
            by_engine.setdefault(address, []).append(engine)
    return list(by_engine.values())


def _find_carried(reports: list[EngineDemand], batch_size: int) -> int | None:
    """At most a batch."""
    said = [report.carried for report in reports if report.carried is not None]
    return min(max(said), batch_size) if said else None


def _find_limit_reason(reports: list[EngineDemand]) -> str | None:
    return next((report.limit_reason for report in reports if report.limit_reason is not None), None)


def _count_waiting_at(reports: list[EngineDemand], batch_size: int) -> int:
    """At most what the gateways have there: an engine may run an image that says anything.

    One that says nothing in time is taken to run as many as it can.
    """
    dispatched = sum(report.dispatched for report in reports)
    said = [report.waiting for report in reports if report.waiting is not None]
    return min(max(said), dispatched) if said else max(0, dispatched - batch_size)
