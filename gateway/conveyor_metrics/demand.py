"""What gateways say that they hold, and the sum of it. Pure; used by `source`.

Each request counts once: what waits at a gateway is that gateway's own, and what waits inside an engine is counted per
engine, however many gateways send to it.
"""

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from conveyor_metrics.errors import NotFound


class ServiceDemand(BaseModel):
    """Requests held for one InferenceService, and those of them that wait for a place in a batch."""

    model_config = ConfigDict(frozen=True)

    in_flight: NonNegativeInt
    queue_depth: NonNegativeInt


class EngineDemand(BaseModel):
    """One engine as one gateway knows it: its own requests there, and what the engine says of all gateways' ones."""

    model_config = ConfigDict(frozen=True)

    dispatched: NonNegativeInt
    waiting: NonNegativeInt | None


class GatewayDemand(ServiceDemand):
    """One InferenceService at one gateway: `queue_depth` counts what waits there, `engines` what it has sent on."""

    batch_size: PositiveInt = 1  # a gateway of an earlier release tells neither
    engines: dict[str, EngineDemand] = {}


class Demand(BaseModel):
    """A gateway's answer to `GET /demand?service=<namespace>/<name>`: a service that it does not know is not listed.

    Fields that it has beyond these are of no interest here.
    """

    model_config = ConfigDict(frozen=True)

    services: dict[str, GatewayDemand]


def sum_demand(service: str, demands: list[Demand]) -> ServiceDemand:
    """Of `namespace/name` over all gateways. Raises NotFound if none of them knows it."""
    known = [demand.services[service] for demand in demands if service in demand.services]
    if not known:
        raise NotFound(f"no gateway knows an InferenceService {service}")
    return ServiceDemand(
        in_flight=sum(demand.in_flight for demand in known),
        queue_depth=sum(demand.queue_depth for demand in known) + _count_waiting_inside(known),
    )


def _count_waiting_inside(demands: list[GatewayDemand]) -> int:
    """Requests that engines have taken and not begun. What an engine says is the same to every gateway."""
    by_engine: dict[str, list[EngineDemand]] = {}
    for demand in demands:
        for address, engine in demand.engines.items():
            by_engine.setdefault(address, []).append(engine)
    batch_size = max(demand.batch_size for demand in demands)
    return sum(_count_waiting_at(engine, batch_size) for engine in by_engine.values())


def _count_waiting_at(reports: list[EngineDemand], batch_size: int) -> int:
    """At most what the gateways have there: an engine may run an image that says anything.

    One that says nothing in time is taken to run as many as it can.
    """
    dispatched = sum(report.dispatched for report in reports)
    said = [report.waiting for report in reports if report.waiting is not None]
    return min(max(said), dispatched) if said else max(0, dispatched - batch_size)
