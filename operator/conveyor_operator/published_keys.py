"""Follows the keys with which the cluster signs tokens, for engines that answer only gateways. Started by `process`."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kubernetes.aio.client import ApiClient

from conveyor_kube.issuer import Issuer, Json, follow_issuer

logger = logging.getLogger(__name__)

_SHORTEST_SECONDS: Final = 5.0


class PublishedKeys:
    """The cluster's issuer, once it was read. `on_change` is called after each change."""

    def __init__(self, client: ApiClient, on_change: Callable[[], None]) -> None:
        self._client, self._on_change = client, on_change
        self._wanted = asyncio.Event()
        self.known = asyncio.Event()
        self.issuer: Issuer | None = None

    async def run(self) -> None:
        """Follow the keys until cancelled."""
        await follow_issuer(self._client, self._see, self._want_first, self._wanted, _SHORTEST_SECONDS)

    def _see(self, name: str, keys: list[Json]) -> None:
        issuer = Issuer(name, tuple(keys))
        if issuer == self.issuer:
            return
        self.issuer = issuer
        self.known.set()
        logger.info("event=issuer issuer=%s keys=%d", name, len(keys))
        self._on_change()

    def _want_first(self) -> None:
        """Let the next attempt follow soon if none has succeeded yet."""
        if self.issuer is None:
            self._wanted.set()
