"""Polls a gateway for what engines have made of the LoRA adapters of services, which may change while they run.

Runs next to Kopf as one task, started by `process`; `inferenceservice` uses it. Each poll reads a gateway chosen at
random. A tenant may control the engines, so only numbers and limited texts are accepted.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp
import msgspec

from conveyor_api.names import ADAPTERS_PAGE
from conveyor_kube.gateways import Gateway, GatewayUnreadable, read_page
from conveyor_protocol.pages import AdapterCounts, Adapters

_LOOK_SECONDS: Final = 1.0
_OFTEN_SECONDS: Final = 3.0  # between two polls of a service whose adapters are not all loaded
_SELDOM_SECONDS: Final = 30.0
_AT_ONCE: Final = 20
_TIMEOUT_SECONDS: Final = 1.0
_BYTES_MAX: Final = 1 << 20  # 1,000 adapters

Counts = dict[str, dict[str, AdapterCounts]]


class AdapterStates:
    """mark: called with the `namespace/name` of each service whose answer has changed."""

    def __init__(self, gateways: Callable[[], Sequence[Gateway]], mark: Callable[[str], None]) -> None:
        self._gateways = gateways
        self._mark = mark
        self._counts: dict[str, Counts | None] = {}  # by followed service; None: not known yet
        self._due: dict[str, float] = {}
        self._pending: set[str] = set()
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def follow(self, service: str, *, is_pending: bool | None) -> Counts | None:
        """Return the last counts, and poll this service from now on.

        is_pending: whether not all adapters are loaded; None: the service has none, and is polled no longer.
        """
        if is_pending is None:
            self.drop(service)
            return None
        if is_pending != (service in self._pending):
            self._pending ^= {service}
            self._due[service] = 0.0
        self._due.setdefault(service, 0.0)
        return self._counts.setdefault(service, None)

    def drop(self, service: str) -> None:
        """Poll this service no longer."""
        self._counts.pop(service, None)
        self._due.pop(service, None)
        self._pending.discard(service)

    async def run(self) -> None:
        """Poll until cancelled."""
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                now = time.monotonic()
                due = [service for service, at in self._due.items() if at <= now]
                await asyncio.gather(*(self._poll(session, service) for service in due))
                await asyncio.sleep(_LOOK_SECONDS)

    async def _poll(self, session: aiohttp.ClientSession, service: str) -> None:
        async with self._turns:
            page = await self._read(session, service)
        if service not in self._counts:  # dropped meanwhile
            return
        self._due[service] = time.monotonic() + (_OFTEN_SECONDS if service in self._pending else _SELDOM_SECONDS)
        if page is not None and page != self._counts[service]:
            self._counts[service] = page
            self._mark(service)

    async def _read(self, session: aiohttp.ClientSession, service: str) -> Counts | None:
        if not (gateways := self._gateways()):
            return None
        try:
            query = {"service": service}
            gateway = random.choice(gateways)
            page = await read_page(session, gateway, ADAPTERS_PAGE, _TIMEOUT_SECONDS, query, _BYTES_MAX)
            return None if page is None else msgspec.json.decode(page, type=Adapters).adapters
        except (GatewayUnreadable, msgspec.DecodeError, RecursionError):
            return None
