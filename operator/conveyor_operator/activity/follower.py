"""Asks every gateway for `/activity`, and tells when something is to be done about a service.

Runs beside Kopf as one task, started by `process`. A service is woken within one period of its first request; where no
service may go to zero, the gateways are asked seldom. Decides nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import aiohttp
from kubernetes.aio.client import ApiClient
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from conveyor_api.names import ACTIVITY_PATH
from conveyor_kube.gateways import Gateway, GatewayUnreadable, gateway_slices, parse_gateways, read_page
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import WatchState, watch_collection
from conveyor_kube.watched_list import WatchedList
from conveyor_operator.activity.answer import Activity

logger = logging.getLogger(__name__)

_PERIOD_SECONDS: Final = 0.5
_SELDOM_SECONDS: Final = 5.0  # the shortest idle timeout
_TIMEOUT_SECONDS: Final = 1.0


class Page(BaseModel):
    """A gateway's answer. Fields that it has beyond these are of no interest here."""

    model_config = ConfigDict(frozen=True)

    services: NonNegativeInt
    waiting: frozenset[str]
    idle: frozenset[str]


class ActivityFollower:
    """`mark` is called with `namespace/name` of each service whose activity has changed."""

    def __init__(self, client: ApiClient, system_namespace: str, mark: Callable[[str], None]) -> None:
        self._client = client
        self._slices = gateway_slices(system_namespace)
        self._mark = mark
        self._gateways: tuple[Gateway, ...] = ()
        self._unreadable_slices = Unreadable("slice", "it is left out")
        self._unreadable: frozenset[Gateway] = frozenset()
        self._activity: Mapping[str, Activity] = {}

    def __getitem__(self, service: str) -> Activity:
        """Of `namespace/name`."""
        return self._activity.get(service, Activity.STEADY)

    async def run(self) -> None:
        """Until cancelled."""
        sink, state = WatchedList(self._take_slices), WatchState(self._slices.name)
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(watch_collection(self._client, self._slices, sink, state), name="follow the gateways")
            while True:
                pages = await self._read(session)
                self._take(pages)
                may_sleep = any(page.services for page in pages if page is not None)
                await asyncio.sleep(_PERIOD_SECONDS if may_sleep else _SELDOM_SECONDS)

    def _take_slices(self, slices: list[Json]) -> None:
        self._gateways = parse_gateways(slices, self._unreadable_slices)

    async def _read(self, session: aiohttp.ClientSession) -> list[Page | None]:
        """Of every gateway that can hold a request; None: it does not say."""
        gateways = self._gateways
        answers = await asyncio.gather(*(_read_one(session, each) for each in gateways), return_exceptions=True)
        pages: list[Page | None] = []
        unreadable = set()
        for gateway, answer in zip(gateways, answers, strict=True):
            if isinstance(answer, GatewayUnreadable):
                if gateway not in self._unreadable:  # logged once, not every half second
                    logger.warning("event=gateway_unreadable error=%s", answer)
                unreadable.add(gateway)
                pages.append(None)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                pages.append(answer)
        self._unreadable = frozenset(unreadable)
        return pages

    def _take(self, pages: Sequence[Page | None]) -> None:
        before, self._activity = self._activity, sum_activity(pages)
        for service in before.keys() | self._activity.keys():
            if before.get(service) is not self._activity.get(service):
                self._mark(service)


def sum_activity(pages: Sequence[Page | None]) -> dict[str, Activity]:
    """By `namespace/name`, of services that are not steady. One gateway's word wakes; all must have it to sleep."""
    known = [page for page in pages if page is not None]
    idle = frozenset.intersection(*(page.idle for page in known)) if known and len(known) == len(pages) else ()
    waiting = frozenset[str]().union(*(page.waiting for page in known))
    return dict.fromkeys(idle, Activity.IDLE) | dict.fromkeys(waiting, Activity.WAITING)


async def _read_one(session: aiohttp.ClientSession, gateway: Gateway) -> Page | None:
    """None: it cannot hold a request. Raises GatewayUnreadable."""
    page = await read_page(session, gateway, ACTIVITY_PATH, _TIMEOUT_SECONDS)
    try:
        return None if page is None else Page.model_validate_json(page)
    except ValidationError as error:
        raise GatewayUnreadable(f"{gateway}: {error}") from error
