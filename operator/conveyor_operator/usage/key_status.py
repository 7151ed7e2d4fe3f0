"""Writes the status of APIKeys: the day of the last use, and why requests were rejected.

Runs next to Kopf as one task, started by `process`. Gateways report each change of a day once, so each key costs at
most two writes a day for each gateway, and a gateway's page bounds the writes of a period.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from conveyor_api import names
from conveyor_kube.gateways import Gateway, GatewayUnreadable, read_page
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import API_KEY
from conveyor_protocol.key_uses import KeyUse, KeyUses

logger = logging.getLogger(__name__)

_PERIOD_SECONDS: Final = 15.0
_TIMEOUT_SECONDS: Final = 2.0


class KeyStatusKeeper:
    """Writes what the gateways report."""

    def __init__(self, cluster: Cluster, gateways: Callable[[], Sequence[Gateway]]) -> None:
        self._cluster = cluster
        self._gateways = gateways
        self._cursors: dict[str, str] = {}  # by the gateway's URL

    async def run(self) -> None:
        """Write until cancelled."""
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                await asyncio.sleep(_PERIOD_SECONDS)
                gateways = self._gateways()
                urls = {each.url(names.KEYS_PAGE) for each in gateways}
                self._cursors = {url: cursor for url, cursor in self._cursors.items() if url in urls}
                for gateway in gateways:
                    try:
                        await self._copy(session, gateway)
                    except ApiError as error:  # the next period reads the same page again
                        logger.warning("event=key_status_not_written error=%.500s", error)

    async def _copy(self, session: aiohttp.ClientSession, gateway: Gateway) -> None:
        """Write the next changes of a gateway. Raises ApiError."""
        url = gateway.url(names.KEYS_PAGE)
        query = {"after": self._cursors.get(url, "")}
        try:
            page = await read_page(session, gateway, names.KEYS_PAGE, _TIMEOUT_SECONDS, query)
            uses = None if page is None else msgspec.json.decode(page, type=KeyUses)
        except (GatewayUnreadable, msgspec.DecodeError, RecursionError):
            return
        if uses is not None:
            for use in uses.keys:
                await self._write(use)
            self._cursors[url] = uses.cursor

    async def _write(self, use: KeyUse) -> None:
        """Write a use, unless another gateway has reported a later one. Raises ApiError if other writes would fail."""
        try:
            found = await self._cluster.get(API_KEY, use.namespace, use.name)
            before = (found or {}).get("status") or {}
            status = build_status(before, use)
            if found is not None and status != before:
                await self._cluster.replace_status(API_KEY, found, status)
        except ApiError as error:  # perhaps it was deleted, and there is a new one
            if error.wants_silence:
                raise
            logger.warning("event=key_status_refused key=%s/%s error=%.500s", use.namespace, use.name, error)


def build_status(before: Mapping[str, Any], use: KeyUse) -> dict[str, Any]:
    """Return the status with what is later in `use`."""
    status = dict(before)
    if use.used > status.get("lastUsed", ""):
        status["lastUsed"] = use.used
    if use.rejected > status.get("lastRejection", {}).get("day", ""):
        status["lastRejection"] = {"day": use.rejected, "reason": use.reason}
    return status
