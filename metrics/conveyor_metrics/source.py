"""Reads every gateway when a metric is requested, and returns the sum.

Called by `app` (queries) and `server` (the list of gateways). If a gateway that may hold requests cannot be read, or if
the list of gateways may be stale, the sum is unknown. A query with the label for readable gateways gets the sum over
the gateways that can be read, which is a lower bound.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

import aiohttp
import msgspec
from prometheus_client import Counter, Gauge

from conveyor_api.names import DEMAND_PATH
from conveyor_kube.gateways import Gateway, GatewayUnreadable, parse_gateways, read_page, slice_name
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import MAX_SILENCE_SECONDS, WatchState
from conveyor_metrics.demand import DemandSum, sum_demand
from conveyor_metrics.errors import NotKnown
from conveyor_protocol.pages import Demand

logger = logging.getLogger(__name__)

GATEWAY_READS = Counter("conveyor_metrics_gateway_reads", "Reads of a gateway's demand, by outcome.", ["outcome"])


UNREADABLE_SLICES = Gauge("conveyor_metrics_unreadable_slices", "EndpointSlices of the gateways that cannot be read.")


class GatewaySource:
    """Reads the demand of InferenceServices. A watch sets `gateways`, which is None until the first list.

    `watch` is the state of this watch, with the time when the API server last sent data.
    """

    def __init__(self, session: aiohttp.ClientSession, timeout_seconds: float, watch: WatchState) -> None:
        self._session = session
        self._watch = watch
        self._timeout_seconds = timeout_seconds
        self.gateways: tuple[Gateway, ...] | None = None
        self._unreadable: set[Gateway] = set()
        self._unreadable_slices = Unreadable("slice", "it is ignored")
        self._stale = False

    def set_slices(self, slices: Iterable[Json]) -> None:
        slices = list(slices)
        self._unreadable_slices.forget_others({slice_name(piece) for piece in slices}, "")
        gateways = parse_gateways(slices, self._unreadable_slices)
        UNREADABLE_SLICES.set(len(self._unreadable_slices))
        if gateways != self.gateways:
            logger.info("event=gateways_found addresses=%s", ", ".join(map(str, gateways)) or "none")
        self.gateways = gateways
        self._unreadable &= set(gateways)

    async def read_demand(self, service: str, of_readable: bool = False) -> DemandSum:
        """Return the sum for `namespace/name` over all gateways; with `of_readable`, over those that can be read.

        Raises NotKnown, or NotFound if no gateway knows the service.
        """
        if not self.gateways:
            raise NotKnown("no gateway is known: is the Deployment conveyor-gateway running?")
        self._check_watch()
        answers = await asyncio.gather(*(self._read(each, service) for each in self.gateways), return_exceptions=True)
        demands, unreadable = _sort(answers)
        if unreadable and not (of_readable and any(service in demand.services for demand in demands)):
            raise NotKnown(f"the sum over the gateways is not known, because one does not answer: {unreadable[0]}")
        if not demands:
            raise NotKnown("no reachable gateway has read the InferenceServices yet")
        demand = sum_demand(service, demands)
        logger.debug(
            "event=demand service=%s gateways=%d unreadable=%d demand=%s",
            service,
            len(demands),
            len(unreadable),
            demand,
        )
        return demand

    def _check_watch(self) -> None:
        """Raise NotKnown if there may be gateways that are not in the list."""
        silence_seconds = time.monotonic() - self._watch.received_at
        was_stale, self._stale = self._stale, silence_seconds > MAX_SILENCE_SECONDS
        if self._stale:
            problem = f"{self._watch.name}: no data from the API server for {silence_seconds:.0f} s"
            if not was_stale:  # logged once, not for every query
                logger.warning("event=stale message=%s", f"{problem}; no metric is served until data arrives")
            raise NotKnown(f"the sum over the gateways is not known, because the list of gateways is stale: {problem}")

    async def _read(self, gateway: Gateway, service: str) -> Demand | None:
        """Return the gateway's demand, or None if the gateway cannot hold a request. Raises GatewayUnreadable."""
        try:
            demand = await self._fetch(gateway, service)
        except GatewayUnreadable as error:
            GATEWAY_READS.labels("failed").inc()
            if gateway not in self._unreadable:  # logged once, not for every query
                logger.warning("event=gateway_unreadable error=%s", error)
            self._unreadable.add(gateway)
            raise
        GATEWAY_READS.labels("absent" if demand is None else "read").inc()
        self._unreadable.discard(gateway)
        return demand

    async def _fetch(self, gateway: Gateway, service: str) -> Demand | None:
        page = await read_page(self._session, gateway, DEMAND_PATH, self._timeout_seconds, {"service": service})
        try:
            return None if page is None else msgspec.json.decode(page, type=Demand)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GatewayUnreadable(f"{gateway}: {error}") from error


def _sort(answers: Iterable[Demand | BaseException | None]) -> tuple[list[Demand], list[GatewayUnreadable]]:
    """Split results into demands and errors. Gateways that cannot hold a request are in neither list."""
    demands, unreadable = [], []
    for answer in answers:
        if isinstance(answer, GatewayUnreadable):
            unreadable.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        elif answer is not None:
            demands.append(answer)
    return demands, unreadable
