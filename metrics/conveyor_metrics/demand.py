"""Sums the demand that gateways report. Pure; used by `source`.

Each request counts once. Requests that wait at a gateway are reported only by that gateway. Requests that wait inside
an engine are counted once for each engine, even if several gateways report them. The HorizontalPodAutoscaler compares
the sums with the batch size. If engines run fewer requests at once than a batch has, for example because the KV cache
is small, the sums are raised in this proportion. Requests for which starting engines have places are left out as in
`starting`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from conveyor_metrics.errors import NotFound
from conveyor_metrics.starting import Engines, count_in_flight, count_queue_depth
from conveyor_protocol.pages import ClassDemand, Demand, EngineDemand, ServiceDemand


@dataclass(frozen=True, slots=True)
class ClassSum:
    """The number of requests of one class that wait at gateways, and the longest of their waits."""

    queued: int
    wait_seconds: int


@dataclass(frozen=True, slots=True)
class DemandSum:
    """The demand for one InferenceService: all requests, waiting requests, the engines' limits, and the classes.

    The four counts of requests are raised if engines run fewer requests at once than a batch has.
    """

    in_flight: int
    queue_depth: int
    requests: int = 0
    """All requests. `in_flight` is smaller while engines start."""
    waiting: int = 0
    """Requests that wait for a place in a batch. `queue_depth` is smaller while engines start."""
    running_limit: int = 0
    """Requests that an engine runs at once: the mean over engines with requests."""
    limited_engines: Mapping[str, int] = field(default_factory=dict)
    """Number of engines with objectives and requests, by the reason for their limit."""
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
    counts = (in_flight, waiting, sum(demand.from_start for demand in known))
    requests, waiting, from_start = (_count_places(count, carried, batch_size) for count in counts)
    replicas = _find_replicas(known, batch_size)
    return DemandSum(
        in_flight=count_in_flight(requests, waiting, replicas, from_start) if replicas else requests,
        queue_depth=count_queue_depth(waiting, replicas) if replicas else waiting,
        requests=requests,
        waiting=waiting,
        running_limit=sum(carried) // len(carried) if carried else batch_size,
        limited_engines=Counter(reason for reports in engines if (reason := _find_limit_reason(reports))),
        classes=_sum_classes(known),
    )


def _find_replicas(demands: list[ServiceDemand], batch_size: int) -> Engines | None:
    """Return the replicas that the gateways report; None if only gateways of an earlier release respond.

    When an engine becomes ready, gateways see it one after another. Until the last one sees it, it counts both as ready
    and as starting, because that gateway still queues requests for it.
    """
    seen = [demand.replicas for demand in demands if demand.replicas is not None]
    if not seen:
        return None
    targets = next((demand.targets for demand in demands if demand.targets is not None), None)
    return Engines(
        batch_size=batch_size,
        ready=max(each.ready for each in seen),
        starting=max(each.starting for each in seen),
        desired=max(each.desired for each in seen),
        in_flight_target=targets.in_flight if targets else None,
        queue_depth_target=targets.queue_depth if targets else None,
    )


def _sum_classes(demands: list[ServiceDemand]) -> dict[str, ClassSum]:
    by_name: dict[str, list[ClassDemand]] = {}
    for demand in demands:
        for name, found in demand.classes.items():
            by_name.setdefault(name, []).append(found)
    return {
        name: ClassSum(sum(each.queued for each in found), int(max(each.wait_seconds for each in found)))
        for name, found in by_name.items()
    }


def _count_places(requests: int, carried: list[int], batch_size: int) -> int:
    """Return requests x batch_size / mean of `carried`, rounded up; `requests` if `carried` is empty.

    `carried`: how many requests each engine runs at once, for the engines that report it. The others are assumed to
    have the mean, because all run the same model and a new engine has no number yet.
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
    """Return how many requests an engine runs at once, at most a batch; None if not reported."""
    said = [report.carried for report in reports if report.carried is not None]
    return min(max(said), batch_size) if said else None


def _find_limit_reason(reports: list[EngineDemand]) -> str | None:
    return next((report.limit_reason for report in reports if report.limit_reason is not None), None)


def _count_waiting_at(reports: list[EngineDemand], batch_size: int) -> int:
    """Return how many requests wait inside an engine.

    The result is at most the number of requests that gateways have sent to the engine. An engine may run any image, so
    a higher number is not trusted. An engine that does not report in time is assumed to run a full batch.
    """
    dispatched = sum(report.dispatched for report in reports)
    said = [report.waiting for report in reports if report.waiting is not None]
    return min(max(said), dispatched) if said else max(0, dispatched - batch_size)
