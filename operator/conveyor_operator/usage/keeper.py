"""Reads `/usage` of every gateway, and keeps the sums of 31 days in a ConfigMap of the release's namespace.

Runs next to Kopf as one task, started by `process`. Gateways write no object. Counts since the last period are lost if
a gateway ends: at most `_PERIOD_SECONDS` of them.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import aiohttp
import msgspec

from conveyor_api import names
from conveyor_kube.gateways import Gateway, GatewayUnreadable, read_page
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import CONFIG_MAP
from conveyor_operator.usage.sums import Sums
from conveyor_protocol.usage_rows import Usage, decode_usage

logger = logging.getLogger(__name__)

_PERIOD_SECONDS: Final = 15.0
_TIMEOUT_SECONDS: Final = 2.0


class UsageKeeper:
    """Keeps the ConfigMap `names.USAGE_NAME`. Each day is a key of its data."""

    def __init__(self, cluster: Cluster, system_namespace: str, gateways: Callable[[], Sequence[Gateway]]) -> None:
        self._cluster = cluster
        self._namespace = system_namespace
        self._gateways = gateways
        self._sums: Sums | None = None  # None: not loaded yet

    async def run(self) -> None:
        """Collect until cancelled."""
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                await asyncio.sleep(_PERIOD_SECONDS)
                try:
                    await self._collect(session)
                except ApiError as error:
                    logger.warning("event=usage_not_kept error=%.500s", error)
                    self._sums = None  # what was written is not known

    async def _collect(self, session: aiohttp.ClientSession) -> None:
        pages = await asyncio.gather(*(_read(session, each) for each in self._gateways()))
        if self._sums is None:
            self._sums = await self._load()
        changed = self._sums.add([page for page in pages if page is not None], datetime.now(UTC).date())
        if changed:
            patch = {"data": changed}
            await self._cluster.merge(CONFIG_MAP, self._namespace, names.USAGE_NAME, patch, names.FIELD_MANAGER)

    async def _load(self) -> Sums:
        """Return the stored sums. Creates the ConfigMap if it does not exist."""
        found = await self._cluster.get(CONFIG_MAP, self._namespace, names.USAGE_NAME)
        if found is None:
            labels = {names.NAME_LABEL: names.USAGE_NAME, names.PART_OF_LABEL: "conveyor"}
            metadata = {"namespace": self._namespace, "name": names.USAGE_NAME, "labels": labels}
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
            found = await self._cluster.apply(CONFIG_MAP, body, names.FIELD_MANAGER)
        sums = Sums()
        sums.load(found.get("data") or {})
        return sums


async def _read(session: aiohttp.ClientSession, gateway: Gateway) -> Usage | None:
    try:
        page = await read_page(session, gateway, names.USAGE_PAGE, _TIMEOUT_SECONDS)
        usage, errors = (None, None) if page is None else decode_usage(page)
    except (GatewayUnreadable, msgspec.DecodeError, RecursionError) as error:
        logger.warning("event=usage_not_read gateway=%s error=%.500s", gateway, error)
        return None
    if errors:
        logger.warning("event=usage_rows_invalid gateway=%s rows=%d error=%.500s", gateway, len(errors), errors[0])
    return usage
