"""Where the values come from: every gateway, asked at the moment of the question.

Called by `app` (questions) and `server` (who the gateways are). A value is the sum over all gateways, or nothing:
one gateway that cannot be read makes every sum unknown. Knows no Kubernetes API but the shape of an EndpointSlice.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from prometheus_client import Counter
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from conveyor_metrics.errors import NotFound, NotKnown

Json = dict[str, Any]

logger = logging.getLogger(__name__)

ADMIN_PORT_NAME = "admin"

GATEWAY_READS = Counter("conveyor_metrics_gateway_reads", "Reads of a gateway's demand, by outcome.", ["outcome"])


class ServiceDemand(BaseModel):
    """One InferenceService at one gateway, or summed: requests held, and those that wait beyond the window."""

    model_config = ConfigDict(frozen=True)

    in_flight: NonNegativeInt
    queue_depth: NonNegativeInt


class Demand(BaseModel):
    """A gateway's answer to `GET /demand`; fields that it has beyond these are of no interest here."""

    model_config = ConfigDict(frozen=True)

    services: dict[str, ServiceDemand]
    synced: Literal[True]


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway process; `serving` tells whether Kubernetes sees it ready (terminating or not)."""

    host: str
    port: int
    serving: bool

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/demand"

    def __str__(self) -> str:
        return self.url if self.serving else f"{self.url} (not ready)"


class _Unreadable(Exception):
    """One gateway did not say what it holds."""


def parse_gateways(slices: Iterable[Json]) -> tuple[Gateway, ...]:
    """The gateways behind the EndpointSlices of one headless Service that publishes addresses that are not ready.

    Terminating ones are among them: a gateway that drains still holds requests.
    """
    found: dict[tuple[str, int], Gateway] = {}
    for piece in slices:
        ports = [port["port"] for port in piece.get("ports") or [] if port.get("name") == ADMIN_PORT_NAME]
        for endpoint in piece.get("endpoints") or []:
            serving = (endpoint.get("conditions") or {}).get("serving") is not False
            for host in endpoint["addresses"][:1]:
                found |= {(host, port): Gateway(host, port, serving) for port in ports}
    return tuple(found[key] for key in sorted(found))


class GatewaySource:
    """Reads the demand of InferenceServices; `gateways` is replaced by the watch, None until it was listed once."""

    def __init__(self, session: aiohttp.ClientSession, timeout_seconds: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self.gateways: tuple[Gateway, ...] | None = None
        self._unreadable: set[Gateway] = set()

    def set_slices(self, slices: Iterable[Json]) -> None:
        gateways = parse_gateways(slices)
        if gateways != self.gateways:
            logger.info("gateways: %s", ", ".join(map(str, gateways)) or "none")
        self.gateways = gateways
        self._unreadable &= set(gateways)

    async def read_demand(self, service: str) -> ServiceDemand:
        """The sum over all gateways for `namespace/name`. Raises NotKnown, or NotFound if no gateway knows it."""
        if not self.gateways:
            raise NotKnown("no gateway is known: is the Deployment conveyor-gateway running?")
        answers = await asyncio.gather(*map(self._read, self.gateways), return_exceptions=True)
        demands = []
        for answer in answers:
            if isinstance(answer, _Unreadable):
                raise NotKnown(f"a gateway cannot be read, so the sum is not known: {answer}")
            if isinstance(answer, BaseException):
                raise answer
            demands.append(answer)
        return _sum_demand(service, demands)

    async def _read(self, gateway: Gateway) -> Demand:
        try:
            demand = await self._fetch(gateway)
        except _Unreadable as error:
            GATEWAY_READS.labels("failed").inc()
            if gateway not in self._unreadable:  # once, not for every question until it is readable again
                logger.warning("unreadable gateway: %s", error)
            self._unreadable.add(gateway)
            raise
        GATEWAY_READS.labels("read").inc()
        self._unreadable.discard(gateway)
        return demand

    async def _fetch(self, gateway: Gateway) -> Demand:
        try:
            async with self._session.get(gateway.url, timeout=self._timeout, allow_redirects=False) as response:
                body = await response.read()
                if response.status != 200:
                    raise _Unreadable(f"{gateway.url} answers {response.status}: {body[:200]!r}")
            return Demand.model_validate_json(body)
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError) and not gateway.serving:
                # No process listens and Kubernetes agrees: it has not begun, or it has ended. Nothing is held there,
                # and one gateway that cannot start must not stop the autoscaling of all services.
                return Demand(services={}, synced=True)
            raise _Unreadable(f"{gateway.url}: {error}") from error
        except TimeoutError as error:
            raise _Unreadable(f"{gateway.url} does not answer within {self._timeout.total} s") from error
        except (aiohttp.ClientError, ValidationError) as error:
            raise _Unreadable(f"{gateway.url}: {error}") from error


def _sum_demand(service: str, demands: list[Demand]) -> ServiceDemand:
    known = [demand.services[service] for demand in demands if service in demand.services]
    if not known:
        raise NotFound(f"no gateway knows an InferenceService {service}")
    return ServiceDemand(
        in_flight=sum(demand.in_flight for demand in known),
        queue_depth=sum(demand.queue_depth for demand in known),
    )
