"""Kopf's session with the API server, with the credentials of `cluster`. `watches` reads what Kopf watches.

Created by `process`; `handlers` registers `login`. It uses only documented features: a login may provide a session,
a session may have a middleware, and a middleware may replace the content of a response. Why: docs/adr/0016.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast
from urllib.parse import urlsplit
from weakref import WeakSet

import aiohttp
import kopf

from conveyor_kube.authorities import follow_authorities
from conveyor_kube.kubeconfig import load_configuration
from conveyor_operator.kinds import ObjectKind
from conveyor_operator.loop.resource import Resource, watched_kinds
from conveyor_operator.loop.watches import Watches

logger = logging.getLogger(__name__)

_REFUSED_PAUSE_SECONDS = 2.0
_MISSING_PAUSE_SECONDS = 2.0


class KopfSession:
    """Reads credentials again after the API server rejects them, and lets `watches` read all that Kopf watches."""

    def __init__(
        self,
        kubeconfig: str,
        resources: Sequence[Resource],
        namespaces: Sequence[str],
        watches: Watches,
        report_missing: Callable[[ObjectKind, bool], None],
    ) -> None:
        """`report_missing` is called whenever the API server does not serve a kind (True), and when it does (False)."""
        self._report_missing = report_missing
        self._kubeconfig = kubeconfig
        self._watches = watches
        self._credentials: kopf.ConnectionInfo | None = None
        self._session: aiohttp.ClientSession | None = None
        self._following: asyncio.Task[None] | None = None
        self._is_ending = False
        self._open: WeakSet[aiohttp.ClientResponse] = WeakSet()
        self._collections: dict[str, tuple[ObjectKind, str | None]] = {
            kind.path(namespace): (kind, namespace)
            for kind in watched_kinds(resources)
            for namespace in namespaces or (None,)
        }
        """Kind and namespace of every collection that Kopf watches, by path."""

    async def login(self, **_: Any) -> kopf.AiohttpSession:
        """Return a session. Kopf calls this at the start, and whenever the API server rejects the last credentials."""
        credentials = await self._read_credentials()
        if credentials == self._credentials:
            logger.warning("event=credentials_refused consequence=%s", "no newer ones found, retrying with the same")
            await asyncio.sleep(_REFUSED_PAUSE_SECONDS)
        await self.aclose()
        self._credentials = credentials
        tls = credentials.as_ssl_context()
        self._following = asyncio.create_task(follow_authorities(cast(str | None, credentials.ca_path), tls))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            headers=credentials.as_http_headers(),
            middlewares=(self._read_watches,),
        )
        session = cast(aiohttp.ClientSession, _Session(self._session))
        return kopf.AiohttpSession(server=credentials.server, aiohttp_session=session)

    def end(self) -> None:
        """Cancel each task of Kopf that sends another request. Called when Kopf begins to stop.

        Kopf cancels its watches then, but suppresses the cancellation of a watch that just ends (docs/adr/0185).
        """
        self._is_ending = True

    async def aclose(self) -> None:
        """Close the session and its watches, which would otherwise never end. May be called at any time, and twice."""
        for response in list(self._open):
            response.close()
        if self._following is not None:
            self._following.cancel()
        if self._session is not None:
            await self._session.close()

    async def _read_watches(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """The middleware of Kopf's session: let `watches` read the lines of each watch first.

        Kopf would end with a traceback if a CRD is deleted, so wait here until the API server serves the kind again.
        """
        if self._is_ending:
            raise asyncio.CancelledError
        response = await handler(request)
        query = request.url.query
        assert self._credentials is not None, "there was a login"
        prefix = urlsplit(self._credentials.server).path.rstrip("/")
        collection = self._collections.get(request.url.path.removeprefix(prefix))
        while collection is not None and response.status == 404:
            self._report_missing(collection[0], True)
            response.release()
            await asyncio.sleep(_MISSING_PAUSE_SECONDS)
            response = await handler(request)
        if collection is not None and response.ok:
            self._report_missing(collection[0], False)  # perhaps after Kopf gave up a request that waited above
        if collection is not None and "watch" in query and response.ok:
            lines = self._watches.read(*collection, response.content, "sendInitialEvents" in query)
            self._open.add(response)
            response.content = cast(aiohttp.StreamReader, _Lines(response.content, lines))
        else:
            # When Kopf stops, it closes the responses. A task that still reads one would fail, so read it all here.
            await response.read()
        return response

    async def _read_credentials(self) -> kopf.ConnectionInfo:
        found = await load_configuration(self._kubeconfig)
        # The client writes the scheme as "bearer TOKEN" in a pod and as "Bearer TOKEN" from a kubeconfig.
        header: str | None = await found.get_api_key_with_prefix("BearerToken")
        return kopf.ConnectionInfo(
            server=found.host,
            ca_path=found.ssl_ca_cert,
            insecure=not found.verify_ssl,
            certificate_path=found.cert_file,
            private_key_path=found.key_file,
            token=header.split()[-1] if header else None,
        )


class _Session:
    """The parts of a session that Kopf uses. Kopf closes it while its watches still read, so `close` does nothing."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.headers = session.headers
        self.request = session.request

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def close(self) -> None:
        """Do nothing; `KopfSession.aclose` closes the session."""


class _Lines:
    """The content of a watch's response for Kopf: lines that `watches` has already read."""

    def __init__(self, content: aiohttp.StreamReader, lines: AsyncIterator[bytes]) -> None:
        self._content = content
        self._lines = lines

    def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        return self._lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)
