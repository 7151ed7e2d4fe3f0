"""The gateway's tokens for engines that answer only gateways (docs/adr/0195). Used by `transport`.

An engine runs its owner's image, which could use a token that it gets. So each namespace has an audience of its own,
and a token of it is sent only to the addresses of this namespace's engines. Only TLS ensures that an engine is there.
The API server issues the tokens for the gateway's own ServiceAccount. The gateway requests the first one when an engine
rejects a request for lack of it, so it needs no setting, and clusters without such engines cost no call. Engines may
not have the keys that verify a new token yet, so the former one is kept.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse
from aiohttp.payload import Payload

from conveyor_api.names import engine_audience
from conveyor_kube.tokens import IssuedToken, TokenNotIssued
from conveyor_protocol.request_headers import CHALLENGE_HEADER, ENGINE_CHALLENGE

logger = logging.getLogger(__name__)

_SHORTEST_SECONDS: Final = 60.0  # between two tokens of a namespace, whatever its engines answer
_RETRY_SECONDS: Final = 5.0  # after a token that could not be had
_WAIT_SECONDS: Final = 2.0  # of a request, for a token
_MAX_AT_ONCE: Final = 8
_LEEWAY_SECONDS: Final = 30.0
_REFUSED: Final = (401, 503)

RequestToken = Callable[[str], Awaitable[IssuedToken]]
"""Returns a new token for an audience. Raises TokenNotIssued."""


class EngineTokens:
    """A middleware of aiohttp's client: adds the namespace's token to requests to engines that have asked for one."""

    def __init__(self, now_unix: Callable[[], float] = time.time) -> None:
        self._now_unix = now_unix
        self._request: RequestToken | None = None
        self._issued: dict[str, IssuedToken] = {}  # by namespace
        self._others: dict[str, IssuedToken] = {}  # used if an engine rejects the ones in `_issued`
        self._renewing: dict[str, asyncio.Task[None]] = {}
        self._due_unix: dict[str, float] = {}  # when the namespace may have its next token
        self._places = asyncio.Semaphore(_MAX_AT_ONCE)

    def begin(self, request: RequestToken) -> None:
        """Get tokens by this call from now on. Without one, challenges are not answered."""
        self._request = request

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        namespace = find_namespace(request.headers.get("Host", ""))
        sent = self._find(namespace)
        if sent:
            request.headers["Authorization"] = f"Bearer {sent}"
        response = await handler(request)
        if response.status not in _REFUSED or response.headers.get(CHALLENGE_HEADER) != ENGINE_CHALLENGE:
            return response
        token = await self._answer(namespace, sent)
        if not token or (isinstance(request.body, Payload) and request.body.consumed):
            return response  # a long body is sent again by `relaying`, which has it
        response.release()
        request.headers["Authorization"] = f"Bearer {token}"
        return await handler(request)

    def _find(self, namespace: str) -> str:
        """Return the namespace's token; "" if none is valid. Begins to renew one whose life is half over."""
        issued = self._issued.get(namespace)
        if issued is None:
            return ""
        if self._now_unix() >= issued.renew_unix:
            self._renew(namespace)
        return issued.text if self._is_valid(issued) else ""

    def _is_valid(self, issued: IssuedToken) -> bool:
        return self._now_unix() < issued.expires_unix - _LEEWAY_SECONDS

    async def _answer(self, namespace: str, rejected: str) -> str:
        """Return another token than the one that an engine has rejected; "" if there is none soon."""
        if namespace and self._find(namespace) in ("", rejected):
            self._renew(namespace)
            self._change(namespace)
        renewing = self._renewing.get(namespace)
        if renewing is not None and self._find(namespace) in ("", rejected):
            await asyncio.wait([renewing], timeout=_WAIT_SECONDS)
        token = self._find(namespace)
        return "" if token == rejected else token

    def _change(self, namespace: str) -> None:
        """Use the namespace's other token if it is valid."""
        other = self._others.get(namespace)
        if other is not None and self._is_valid(other):
            self._issued[namespace], self._others[namespace] = other, self._issued[namespace]

    def _renew(self, namespace: str) -> None:
        """Begin to get a token, unless this has begun or has just ended."""
        request, now_unix = self._request, self._now_unix()
        if request is None or namespace in self._renewing or now_unix < self._due_unix.get(namespace, 0.0):
            return
        task = asyncio.create_task(self._get(request, namespace))
        self._renewing[namespace] = task
        task.add_done_callback(lambda _: self._renewing.pop(namespace))

    async def _get(self, request: RequestToken, namespace: str) -> None:
        seconds = _RETRY_SECONDS
        try:
            async with self._places:
                issued = await request(engine_audience(namespace))
        except (TokenNotIssued, aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.warning("event=engine_token_not_issued namespace=%s error=%s", namespace, str(error)[:300])
        else:
            self._drop_expired()
            if namespace in self._issued:
                self._others[namespace] = self._issued[namespace]
            self._issued[namespace], seconds = issued, _SHORTEST_SECONDS
        self._due_unix[namespace] = self._now_unix() + seconds

    def _drop_expired(self) -> None:
        now_unix = self._now_unix()
        self._issued = {name: each for name, each in self._issued.items() if now_unix < each.expires_unix}
        self._others = {name: self._others[name] for name in self._others.keys() & self._issued.keys()}
        self._due_unix = {name: due for name, due in self._due_unix.items() if now_unix < due}


def find_namespace(host: str) -> str:
    """Return the namespace in the header `Host` of a request to an engine, `NAME-engine.NAMESPACE.svc:PORT`; or ""."""
    parts = host.rpartition(":")[0].split(".")
    return parts[1] if len(parts) == 3 and parts[2] == "svc" else ""
