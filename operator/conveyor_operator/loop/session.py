"""Kopf's session with the API server: the credentials of `cluster`, and our `watches` between it and Kopf.

Made by `process`; `handlers` registers `login`. Kopf makes all its requests through a session that a login may bring
along.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, cast
from weakref import WeakSet

import aiohttp
import kopf

from conveyor_operator.cluster import load_configuration
from conveyor_operator.inferenceservice.kinds import WATCHED
from conveyor_operator.loop.watches import Watches

logger = logging.getLogger(__name__)

_REFUSED_PAUSE_SECONDS = 2.0
_KINDS = {kind.plural: kind for kind in WATCHED}


class KopfSession:
    """Credentials that are refused are read again; what Kopf watches passes through `watches`."""

    def __init__(self, kubeconfig: str, watches: Watches) -> None:
        self._kubeconfig = kubeconfig
        self._watches = watches
        self._credentials: kopf.ConnectionInfo | None = None
        self._lent: _Lent | None = None

    async def login(self, **_: Any) -> kopf.AiohttpSession:
        """Called at the start, and whenever the API server refuses what the last call returned."""
        credentials = await self._read_credentials()
        if credentials == self._credentials:
            logger.warning("the API server refuses our credentials, and there are no newer ones; trying them again")
            await asyncio.sleep(_REFUSED_PAUSE_SECONDS)
        await self.aclose()
        self._credentials = credentials
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=credentials.as_ssl_context()),
            headers=credentials.as_http_headers(),
        )
        self._lent = _Lent(session, self._watches)
        lent = cast(aiohttp.ClientSession, self._lent)
        return kopf.AiohttpSession(server=credentials.server, aiohttp_session=lent)

    async def aclose(self) -> None:
        """May be called at any time, and twice."""
        if self._lent is not None:
            await self._lent.aclose()

    async def _read_credentials(self) -> kopf.ConnectionInfo:
        found = await load_configuration(self._kubeconfig)
        # "bearer TOKEN" in a pod, "Bearer TOKEN" from a kubeconfig: the client writes the scheme either way.
        header: str | None = await found.get_api_key_with_prefix("BearerToken")
        return kopf.ConnectionInfo(
            server=found.host,
            ca_path=found.ssl_ca_cert,
            insecure=not found.verify_ssl,
            certificate_path=found.cert_file,
            private_key_path=found.key_file,
            token=header.split()[-1] if header else None,
        )


class _Lent:
    """What Kopf asks of a session. When Kopf closes it, only its watches end: Kopf goes on asking for a while."""

    def __init__(self, session: aiohttp.ClientSession, watches: Watches) -> None:
        self._session = session
        self._watches = watches
        self._open: WeakSet[_Watch] = WeakSet()
        self.headers = session.headers

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def close(self) -> None:
        for watch in list(self._open):
            watch.close()

    async def aclose(self) -> None:
        """For good. A watch whose session is gone would never end."""
        await self.close()
        await self._session.close()

    async def request(self, **options: Any) -> "aiohttp.ClientResponse | _Watch":
        response = await self._session.request(**options)
        *path, plural = response.url.path.split("/")
        if "watch" not in response.url.query or plural not in _KINDS or not response.ok:
            return response
        namespace = path[-1] if path[-2] == "namespaces" else None
        from_the_start = "sendInitialEvents" in response.url.query
        lines = self._watches.read(_KINDS[plural], namespace, response.content, from_the_start)
        watch = _Watch(response, lines)
        self._open.add(watch)
        return watch


class _Watch:
    """What Kopf asks of the answer to a watch."""

    def __init__(self, response: aiohttp.ClientResponse, lines: AsyncIterator[bytes]) -> None:
        self._response = response
        self._lines = lines
        self.status = response.status
        self.content = self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()

    def close(self) -> None:
        self._response.close()

    def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        return self._lines
