"""Polls `/activity` of every gateway, and queues a reconcile of each service whose activity has changed.

Runs next to Kopf as one task, started by `process`. A service wakes within one polling period of its first request. If
no service may scale to zero, the period is longer. This module makes no decisions.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient

from conveyor_api.names import ACTIVITY_PATH
from conveyor_kube.gateways import Gateway, GatewayUnreadable, gateway_slices, parse_gateways, read_page
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import MAX_SILENCE_SECONDS, WatchState, watch_collection
from conveyor_kube.watched_list import WatchedList
from conveyor_operator.activity.answer import Activity
from conveyor_operator.metrics import Metrics
from conveyor_protocol.pages import Activity as Page

logger = logging.getLogger(__name__)

_PERIOD_SECONDS: Final = 0.5
_SELDOM_SECONDS: Final = 5.0  # the period if no service may scale to zero; equal to the shortest idle timeout
_TIMEOUT_SECONDS: Final = 1.0
_MAX_BYTES: Final = 8 << 20


class ActivityFollower:
    """`mark` is called with `namespace/name` of each service whose activity has changed."""

    def __init__(self, client: ApiClient, system_namespace: str, metrics: Metrics, mark: Callable[[str], None]) -> None:
        self._client = client
        self._slices = gateway_slices(system_namespace)
        self._watch = WatchState(self._slices.name)
        self._metrics = metrics
        self._mark = mark
        self.gateways: tuple[Gateway, ...] = ()
        self._unreadable_slices = Unreadable("slice", "it is ignored")
        self._unreadable: frozenset[Gateway] = frozenset()
        self._activity: Mapping[str, Activity] = {}

    def __getitem__(self, service: str) -> Activity:
        """Return the activity of `namespace/name`."""
        return self._activity.get(service, Activity.STEADY)

    async def run(self) -> None:
        """Poll until cancelled."""
        watch = watch_collection(self._client, self._slices, WatchedList(self._take_slices), self._watch)
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(watch, name="follow the gateways")
            while True:
                pages = await self._read(session)
                self._take(pages)
                none_sleeps = pages and all(page is not None and not page.services for page in pages)
                await asyncio.sleep(_SELDOM_SECONDS if none_sleeps else _PERIOD_SECONDS)

    def _take_slices(self, slices: list[Json]) -> None:
        self.gateways = parse_gateways(slices, self._unreadable_slices)

    async def _read(self, session: aiohttp.ClientSession) -> list[Page | None]:
        """Read the page of every gateway that can hold a request.

        None stands for an unreadable gateway, or for gateways that a stale watch may have missed.
        """
        gateways = self.gateways
        answers = await asyncio.gather(*(_read_one(session, each) for each in gateways), return_exceptions=True)
        is_stale = time.monotonic() - self._watch.received_at > MAX_SILENCE_SECONDS
        pages: list[Page | None] = [None] * is_stale
        unreadable = set()
        for gateway, answer in zip(gateways, answers, strict=True):
            if isinstance(answer, Exception):
                if gateway not in self._unreadable:  # logged once, not every half second
                    logger.warning("event=gateway_unreadable error=%.500s", answer)
                unreadable.add(gateway)
                pages.append(None)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                pages.append(answer)
        self._unreadable = frozenset(unreadable)
        self._metrics.unreadable_gateways.set(len(unreadable))
        return pages

    def _take(self, pages: Sequence[Page | None]) -> None:
        before, self._activity = self._activity, sum_activity(pages)
        for service in before.keys() | self._activity.keys():
            if before.get(service) is not self._activity.get(service):
                self._mark(service)


def sum_activity(pages: Sequence[Page | None]) -> dict[str, Activity]:
    """Return the activity of services by `namespace/name`, without steady ones.

    Requests at one gateway are enough to start a service. To scale it to zero, every gateway must report it idle.
    """
    known = [page for page in pages if page is not None]
    idle = frozenset.intersection(*(page.idle for page in known)) if known and len(known) == len(pages) else ()
    waiting = frozenset[str]().union(*(page.waiting for page in known))
    return dict.fromkeys(idle, Activity.IDLE) | dict.fromkeys(waiting, Activity.WAITING)


async def _read_one(session: aiohttp.ClientSession, gateway: Gateway) -> Page | None:
    """Return the gateway's page, or None if the gateway cannot hold a request. Raises GatewayUnreadable."""
    page = await read_page(session, gateway, ACTIVITY_PATH, _TIMEOUT_SECONDS, max_bytes=_MAX_BYTES)
    try:
        return None if page is None else msgspec.json.decode(page, type=Page)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GatewayUnreadable(f"{gateway}: {error}") from error
