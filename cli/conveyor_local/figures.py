"""Reads the gateway's pages for the decisions of `service`, and the engines' token counts for the table.

The pages are those that the operator and the metrics server read in a cluster.
"""

import re
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

import aiohttp
import msgspec

from conveyor_api.names import ACTIVITY_PATH, PROMETHEUS_PATH, START_PATH
from conveyor_kube.gateways import Gateway, GatewayUnreadable, read_page
from conveyor_kube.watch import WatchState
from conveyor_local.service import Service
from conveyor_metrics.errors import NotFound, NotKnown
from conveyor_metrics.source import GatewaySource
from conveyor_operator.activity.answer import Activity
from conveyor_operator.activity.follower import sum_activity
from conveyor_protocol.pages import Activity as Page
from conveyor_protocol.pages import Start

_TIMEOUT_SECONDS: Final = 1.0
_WINDOW_SECONDS: Final = 5.0  # over which tokens are counted
_TOKENS: Final = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


class Figures:
    """The figures of all services."""

    def __init__(self, http: aiohttp.ClientSession, host: str, admin_port: int) -> None:
        self._http = http
        self._gateway = Gateway(host, admin_port, serving=True)
        self._watch = WatchState("gateway", synced=True)
        self._source = GatewaySource(http, _TIMEOUT_SECONDS, self._watch)
        self._source.gateways = (self._gateway,)
        self._counts: dict[str, float] = {}  # of tokens, by engine
        self._totals: dict[str, deque[tuple[float, float]]] = {}  # (time, tokens of all engines so far), by service

    async def read_demand(self, service: Service) -> None:
        """Read what the metrics server would return. The demand stays None while it is not known."""
        self._watch.received_at = time.monotonic()
        try:
            service.demand = await self._source.read_demand(service.key)
        except (NotKnown, NotFound):
            service.demand = None

    async def read_activity(self, services: Iterable[Service]) -> None:
        """Read which services must start from zero or may scale to zero."""
        try:
            page = await read_page(self._http, self._gateway, ACTIVITY_PATH, _TIMEOUT_SECONDS)
        except GatewayUnreadable:
            return
        found = sum_activity([None if page is None else msgspec.json.decode(page, type=Page)])
        for service in services:
            service.see_activity(found.get(service.key, Activity.STEADY))

    async def read_warm_up(self, service: str, pod: str) -> float | None:
        """Return the seconds of an engine's warm-up; None if they are not known."""
        try:
            query = {"service": service, "pod": pod}
            page = await read_page(self._http, self._gateway, START_PATH, _TIMEOUT_SECONDS, query)
        except GatewayUnreadable:
            return None
        return None if page is None else msgspec.json.decode(page, type=Start).warm_up_seconds

    async def count_tokens(self, service: Service) -> None:
        """Read how many tokens each engine has generated."""
        total = self._totals.setdefault(service.key, deque([(time.monotonic(), 0.0)], maxlen=64))
        new = 0.0
        for pod in service.ready_pods:
            count = await self._read_tokens(pod.port)
            new += max(0.0, count - self._counts.get(pod.uid, 0.0))
            self._counts[pod.uid] = count
        total.append((time.monotonic(), total[-1][1] + new))

    async def _read_tokens(self, port: int) -> float:
        limit = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        try:
            async with self._http.get(f"http://127.0.0.1:{port}{PROMETHEUS_PATH}", timeout=limit) as answer:
                return sum(map(float, _TOKENS.findall(await answer.text())))
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0.0

    def find_tokens_per_second(self, service: Service) -> float:
        """Return the tokens per second of all engines in the last seconds."""
        total = self._totals.get(service.key)
        if not total:
            return 0.0
        now, newest = total[-1]
        began, oldest = next(each for each in total if each[0] >= now - _WINDOW_SECONDS)
        return (newest - oldest) / (now - began) if now > began else 0.0
