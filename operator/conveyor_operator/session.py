"""Kopf's session with the API server: the credentials of `cluster`, and an ear for its lists.

Made by `process`; `handlers` registers `login`. Kopf tells its handlers nothing of a list that is empty, but makes all
its requests through a session that a login may bring along.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import aiohttp
import kopf

from conveyor_operator.cluster import load_configuration
from conveyor_operator.kinds import WATCHED, Kind

logger = logging.getLogger(__name__)

_REFUSED_PAUSE_SECONDS = 2.0
_KINDS = {kind.plural: kind for kind in WATCHED}


class KopfSession:
    """`hear_list` is called with the kind when the answer to one of Kopf's lists begins."""

    def __init__(self, kubeconfig: str, hear_list: Callable[[Kind], None]) -> None:
        self._kubeconfig = kubeconfig
        self._hear_list = hear_list
        self._credentials: kopf.ConnectionInfo | None = None
        self._session: aiohttp.ClientSession | None = None

    async def login(self, **_: Any) -> kopf.AiohttpSession:
        """Called at the start, and whenever the API server refuses what the last call returned."""
        credentials = await self._read_credentials()
        if credentials == self._credentials:
            logger.warning("the API server refuses our credentials, and there are no newer ones; trying them again")
            await asyncio.sleep(_REFUSED_PAUSE_SECONDS)
        await self.aclose()
        self._credentials = credentials
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=credentials.as_ssl_context()),
            headers=credentials.as_http_headers(),
        )
        lent = cast(aiohttp.ClientSession, _Lent(self._session, self._hear_list))
        return kopf.AiohttpSession(server=credentials.server, aiohttp_session=lent)

    async def aclose(self) -> None:
        """May be called at any time, and twice."""
        if self._session is not None:
            await self._session.close()

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
    """What Kopf asks of a session. When it ends it closes its session before its watches, which then never end."""

    def __init__(self, session: aiohttp.ClientSession, hear_list: Callable[[Kind], None]) -> None:
        self._session = session
        self._hear_list = hear_list
        self.headers = session.headers

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def close(self) -> None:
        """`KopfSession` closes it, later."""

    async def request(self, **options: Any) -> aiohttp.ClientResponse:
        response = await self._session.request(**options)
        kind = _KINDS.get(response.url.name)  # the end of the path
        if kind is not None and response.method == "GET" and "watch" not in response.url.query:
            self._hear_list(kind)
        return response
