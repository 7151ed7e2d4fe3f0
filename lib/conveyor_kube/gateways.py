"""Finds the gateways of an installation by their EndpointSlices, and reads their pages.

The metrics server (`/demand`) and the operator (`/activity`) read a page from all gateways at once. The operator also
reads a page that any single gateway can return (`/start`). When all gateways are read, a gateway that cannot hold a
request is left out. If any other gateway does not respond, the result is unknown.
"""

import asyncio
import errno
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Final

import aiohttp

from conveyor_api.names import GATEWAY_ADMIN_SERVICE
from conveyor_http.reading import AnswerTooLong, read_answer
from conveyor_kube.resources import slice_collection
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import Collection

ADMIN_PORT_NAME = "admin"
MAX_BYTES: Final = 1 << 20  # of a page; another pod may have got the address, and could send anything

# Errors that mean that no process listens at the address, or that the node is gone. Local errors, such as too many
# open files, are not among them.
_NOBODY_THERE: Final = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway process. `serving`: whether Kubernetes reports it as ready (terminating or not)."""

    host: str
    port: int
    serving: bool

    def url(self, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{path}"

    def __str__(self) -> str:
        return self.url("") if self.serving else f"{self.url('')} (not ready)"


class GatewayUnreadable(Exception):
    """A gateway that may hold requests returned no valid page. The message has the reason."""


def gateway_slices(system_namespace: str) -> Collection:
    """Return the collection of EndpointSlices of the gateways' headless Service, which also has gateways that are not
    ready."""
    return slice_collection(system_namespace, f"kubernetes.io/service-name={GATEWAY_ADMIN_SERVICE}")


def parse_gateways(slices: Iterable[Json], unreadable: Unreadable) -> tuple[Gateway, ...]:
    """Return all gateways in the slices. Terminating ones count, because a draining gateway still holds requests."""
    found: dict[tuple[str, int], Gateway] = {}
    for piece in slices:
        gateways = unreadable.parse(slice_name(piece), _parse_slice, piece)
        found |= {(gateway.host, gateway.port): gateway for gateway in gateways or ()}
    return tuple(found[key] for key in sorted(found))


def slice_name(piece: Json) -> str:
    name: str = piece["metadata"]["name"]
    return name


def _parse_slice(piece: Json) -> list[Gateway]:
    named = [port.get("port") for port in piece.get("ports") or [] if port.get("name") == ADMIN_PORT_NAME]
    gateways = []
    for endpoint in piece.get("endpoints") or []:
        serving = (endpoint.get("conditions") or {}).get("serving") is not False
        host = endpoint["addresses"][0]
        gateways += [Gateway(host, port, serving) for port in named if port]  # `port` may be null
    return gateways


async def read_page(
    session: aiohttp.ClientSession,
    gateway: Gateway,
    path: str,
    timeout_seconds: float,
    query: Mapping[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> bytes | None:
    """Return the gateway's page, or None if the gateway cannot hold a request. Raises GatewayUnreadable."""
    url = gateway.url(path)
    # Packets to a lost node are dropped. A live gateway accepts a connection quickly, even if it is busy. This process
    # may have been busy too, and then a timeout says nothing about the gateway, so there is a second attempt.
    limits = aiohttp.ClientTimeout(sock_connect=timeout_seconds / 3)
    get = partial(session.get, url, params=query, timeout=limits, allow_redirects=False)
    try:
        async with asyncio.timeout(timeout_seconds):
            try:
                status, body = await _read(get, max_bytes)
            except aiohttp.ConnectionTimeoutError:
                status, body = await _read(get, max_bytes)
        if status == 200:
            return body
        if _says_not_synced(status, body):
            return None
        raise GatewayUnreadable(f"{url} answers {status}: {body[:200]!r}")
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        # The connection failed, and Kubernetes reports this process as not ready: it has not started, has ended, or its
        # node is lost. One such process must not stop the scaling of all services.
        if not gateway.serving and _is_nobody_there(error):
            return None
        raise GatewayUnreadable(f"{url}: {error}") from error
    except TimeoutError as error:
        raise GatewayUnreadable(f"{url} does not answer within {timeout_seconds} s") from error
    except (AnswerTooLong, aiohttp.ClientError) as error:
        raise GatewayUnreadable(f"{url}: {error}") from error


async def _read(
    get: Callable[[], AbstractAsyncContextManager[aiohttp.ClientResponse]], max_bytes: int
) -> tuple[int, bytes]:
    async with get() as response:
        return response.status, bytes(await read_answer(response.content, max_bytes))


def _is_nobody_there(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> bool:
    return isinstance(error, aiohttp.ConnectionTimeoutError) or error.os_error.errno in _NOBODY_THERE


def _says_not_synced(status: int, body: bytes) -> bool:
    """Return whether the gateway reports that it has not read the InferenceServices yet, so it holds no request."""
    try:
        return status == 503 and bool(json.loads(body)["error"]["code"] == "not_synced")
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
