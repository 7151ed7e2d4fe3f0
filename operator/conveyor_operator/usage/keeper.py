"""Reads `/usage` of every gateway, and keeps the sums of 31 days in a ConfigMap of the release's namespace.

Runs next to Kopf as one task, started by `process`. Gateways write no object. Counts since the last period are lost if
a gateway ends: at most `_PERIOD_SECONDS` of them.

The keeper itself counts how long engine pods are on nodes. An annotation has the time until which it has counted, so
another operator goes on from there: pods that run then miss nothing, and those that have ended meanwhile miss that
time.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
import msgspec

from conveyor_api import names
from conveyor_kube.gateways import Gateway, GatewayUnreadable, read_page
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import CONFIG_MAP
from conveyor_operator.metrics import Metrics
from conveyor_operator.usage.held_pods import HeldPod, count_seconds
from conveyor_operator.usage.sums import Sums
from conveyor_protocol.usage_rows import Usage, decode_usage

logger = logging.getLogger(__name__)

_PERIOD_SECONDS: Final = 15.0
_TIMEOUT_SECONDS: Final = 2.0
_PODS_SECONDS: Final = 60.0  # between two counts of the pods, because each one is a write
_COUNTED: Final = f"{names.GROUP}/pods-counted-until"


class UsageKeeper:
    """Keeps the ConfigMap `names.USAGE_NAME`. Each day is a key of its data.

    pods: returns the engine pods on nodes; None while they are not known.
    """

    def __init__(
        self,
        cluster: Cluster,
        metrics: Metrics,
        system_namespace: str,
        gateways: Callable[[], Sequence[Gateway]],
        pods: Callable[[], Iterable[HeldPod] | None],
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._namespace = system_namespace
        self._gateways = gateways
        self._pods = pods
        self._counted_unix = 0.0  # until when the time of pods is counted
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
        now_unix = time.time()
        held = self._count_pods(now_unix)
        changed = self._sums.add([page for page in pages if page is not None], datetime.now(UTC).date(), held)
        if changed:
            patch: dict[str, Any] = {"data": changed}
            if held:
                patch["metadata"] = {"annotations": {_COUNTED: f"{now_unix:.0f}"}}
            await self._cluster.merge(CONFIG_MAP, self._namespace, names.USAGE_NAME, patch, names.FIELD_MANAGER)
        if held:
            self._counted_unix = now_unix
            self._metrics.count_pods(held)

    def _count_pods(self, now_unix: float) -> dict[str, float]:
        """Return the time of pods that is not counted yet; nothing if the last count was a moment ago."""
        pods = self._pods() if now_unix - self._counted_unix >= _PODS_SECONDS else None
        return {} if pods is None else count_seconds(pods, self._counted_unix, now_unix)

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
        counted = (found["metadata"].get("annotations") or {}).get(_COUNTED, "")
        self._counted_unix = min(float(counted), time.time()) if counted.isdecimal() else time.time()
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
