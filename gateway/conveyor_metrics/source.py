"""Where the values come from: every gateway, asked at the moment of the question.

Called by `app` (questions) and `server` (who the gateways are). A value is the sum over all gateways, or nothing:
one gateway that cannot be read makes every sum unknown, unless it cannot hold a request, and so does a list of them
that may be old. Knows no Kubernetes API but the shape of an EndpointSlice.
"""

import asyncio
import errno
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import aiohttp
from prometheus_client import Counter, Gauge
from pydantic import ValidationError

from conveyor_api.names import DEMAND_PATH
from conveyor_kube.answers import AnswerTooLong, read_answer
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import MAX_SILENCE_SECONDS, WatchState
from conveyor_metrics.demand import Demand, ServiceDemand, sum_demand
from conveyor_metrics.errors import NotKnown

logger = logging.getLogger(__name__)

ADMIN_PORT_NAME = "admin"
_MAX_BYTES: Final = 1 << 20  # of one service's demand; an address may have gone to another pod, which may send anything

# No process is there, or its node is gone. What fails on our own side (no file descriptor left, say) is not among them.
_NOBODY_THERE: Final = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}

GATEWAY_READS = Counter("conveyor_metrics_gateway_reads", "Reads of a gateway's demand, by outcome.", ["outcome"])


UNREADABLE_SLICES = Gauge("conveyor_metrics_unreadable_slices", "EndpointSlices of the gateways that cannot be read.")


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway process; `serving` tells whether Kubernetes sees it ready (terminating or not)."""

    host: str
    port: int
    serving: bool

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{DEMAND_PATH}"

    def __str__(self) -> str:
        return self.url if self.serving else f"{self.url} (not ready)"


class _Unreadable(Exception):
    """One gateway did not say what it holds."""


def parse_gateways(slices: Iterable[Json], unreadable: Unreadable) -> tuple[Gateway, ...]:
    """The gateways behind the EndpointSlices of one headless Service that publishes addresses that are not ready.

    Terminating ones are among them: a gateway that drains still holds requests.
    """
    found: dict[tuple[str, int], Gateway] = {}
    for piece in slices:
        gateways = unreadable.parse(_name(piece), _parse_slice, piece)
        found |= {(gateway.host, gateway.port): gateway for gateway in gateways or ()}
    return tuple(found[key] for key in sorted(found))


def _name(piece: Json) -> str:
    name: str = piece["metadata"]["name"]
    return name


def _parse_slice(piece: Json) -> list[Gateway]:
    named = [port.get("port") for port in piece.get("ports") or [] if port.get("name") == ADMIN_PORT_NAME]
    gateways = []
    for endpoint in piece.get("endpoints") or []:
        serving = (endpoint.get("conditions") or {}).get("serving") is not False
        host = endpoint["addresses"][0]
        gateways += [Gateway(host, port, serving) for port in named if port]  # a port may come without a number
    return gateways


class GatewaySource:
    """Reads the demand of InferenceServices; `gateways` is replaced by a watch, None until it was listed once.

    `watch` says when that watch last heard the API server.
    """

    def __init__(self, session: aiohttp.ClientSession, timeout_seconds: float, watch: WatchState) -> None:
        self._session = session
        self._watch = watch
        # A lost node drops what is sent to it; a live gateway takes a connection at once, even a busy one.
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=timeout_seconds / 2)
        self.gateways: tuple[Gateway, ...] | None = None
        self._unreadable: set[Gateway] = set()
        self._unreadable_slices = Unreadable("slice", "it is left out")
        self._stale = False

    def set_slices(self, slices: Iterable[Json]) -> None:
        slices = list(slices)
        self._unreadable_slices.forget_others({_name(piece) for piece in slices}, "")
        gateways = parse_gateways(slices, self._unreadable_slices)
        UNREADABLE_SLICES.set(len(self._unreadable_slices))
        if gateways != self.gateways:
            logger.info("event=gateways_found gateways=%s", ", ".join(map(str, gateways)) or "none")
        self.gateways = gateways
        self._unreadable &= set(gateways)

    async def read_demand(self, service: str) -> ServiceDemand:
        """The sum over all gateways for `namespace/name`. Raises NotKnown, or NotFound if no gateway knows it."""
        if not self.gateways:
            raise NotKnown("no gateway is known: is the Deployment conveyor-gateway running?")
        self._check_heard()
        answers = await asyncio.gather(*(self._read(each, service) for each in self.gateways), return_exceptions=True)
        demands = []
        for answer in answers:
            if isinstance(answer, _Unreadable):
                raise NotKnown(f"a gateway cannot be read, so the sum is not known: {answer}")
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                demands.append(answer)
        if not demands:
            raise NotKnown("no gateway can be reached that has read the InferenceServices")
        return sum_demand(service, demands)

    def _check_heard(self) -> None:
        """Raises NotKnown when there may be gateways that are not in the list."""
        silence_seconds = time.monotonic() - self._watch.heard_at
        was_stale, self._stale = self._stale, silence_seconds > MAX_SILENCE_SECONDS
        if self._stale:
            problem = f"{self._watch.name}: the API server is silent for {silence_seconds:.0f} s"
            if not was_stale:  # logged once, not for every question
                logger.warning("event=stale message=%s", f"{problem}; no value is known until it is heard again")
            raise NotKnown(f"the list of gateways is stale, so the sum is not known: {problem}")

    async def _read(self, gateway: Gateway, service: str) -> Demand | None:
        """None: the gateway cannot hold a request. Raises _Unreadable."""
        try:
            demand = await self._fetch(gateway, service)
        except _Unreadable as error:
            GATEWAY_READS.labels("failed").inc()
            if gateway not in self._unreadable:  # logged once, not for every question
                logger.warning("event=gateway_unreadable error=%s", error)
            self._unreadable.add(gateway)
            raise
        GATEWAY_READS.labels("absent" if demand is None else "read").inc()
        self._unreadable.discard(gateway)
        return demand

    async def _fetch(self, gateway: Gateway, service: str) -> Demand | None:
        options: Json = {"params": {"service": service}, "timeout": self._timeout, "allow_redirects": False}
        try:
            async with self._session.get(gateway.url, **options) as response:
                body = bytes(await read_answer(response.content, _MAX_BYTES))
            if response.status == 200:
                return Demand.model_validate_json(body)
            if _says_not_synced(response.status, body):
                return None
            raise _Unreadable(f"{gateway.url} answers {response.status}: {body[:200]!r}")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # Kubernetes agrees that this process is not there: it has not started, has ended, or its node is lost. Such
            # a gateway must not stop the autoscaling of all services.
            if not gateway.serving and _is_nobody_there(error):
                return None
            raise _Unreadable(f"{gateway.url}: {error}") from error
        except TimeoutError as error:
            raise _Unreadable(f"{gateway.url} does not answer within {self._timeout.total} s") from error
        except (AnswerTooLong, aiohttp.ClientError, ValidationError) as error:
            raise _Unreadable(f"{gateway.url}: {error}") from error


def _is_nobody_there(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> bool:
    return isinstance(error, aiohttp.ConnectionTimeoutError) or error.os_error.errno in _NOBODY_THERE


def _says_not_synced(status: int, body: bytes) -> bool:
    """A gateway that has not read the InferenceServices yet takes no request."""
    try:
        return status == 503 and bool(json.loads(body)["error"]["code"] == "not_synced")
    except (ValueError, LookupError, TypeError):
        return False
