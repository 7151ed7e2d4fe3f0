"""Reads the gateways' pages: the requests of all services, and the metrics of the engines of busy ones.

All requests are on one page of each gateway, which is read all the time. The engines' metrics are on one page for each
service. They are read only while somebody looks, and from one gateway. A round reads at most _MAX_SERVICES services,
half of them services that somebody sees: those that were not read for the longest time. So 1,000 busy services cost a
gateway no more than 25.
"""

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Final, TypeVar

import aiohttp
import msgspec

from conveyor_api.names import DEMAND_PATH, ENGINES_PAGE, RECEIPT_PATH, RECEIPTS_PAGE, STEPS_PAGE, WAITING_PAGE
from conveyor_console.figures import EngineFigures, Figures
from conveyor_console.requests import Requests, Waiting, sum_requests
from conveyor_console.sharing import Shared
from conveyor_kube.gateways import Gateway, GatewayUnreadable, parse_gateways, read_page, slice_name
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json
from conveyor_protocol.engine_pages import EngineSteps, StepRecord
from conveyor_protocol.pages import Demand, Engines, WaitingClients
from conveyor_protocol.usage import RequestReceipt, SlowestReceipts

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS: Final = 2.0
_MAX_DEMAND_BYTES: Final = 8 << 20  # 1,000 services with 10 engines each are 1 MB
_MAX_SERVICES: Final = 25
_MAX_RECEIPTS: Final = 10
_AT_ONCE: Final = 4
_VIEWED_SECONDS: Final = 30.0
_MAX_SHARED: Final = 64  # services whose steps and receipts are kept
_INVALID: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)  # what msgspec raises

_Page = TypeVar("_Page")


def find_newest(receipts: Iterable[RequestReceipt]) -> RequestReceipt | None:
    """Return the receipt of the request that ended last; None without receipts."""
    return max(receipts, key=lambda receipt: receipt.ended_unix, default=None)


class Gateways:
    """What the gateways report. `requests`: by service, None until a gateway has answered.

    kept_seconds: how long the steps and receipts of a service are kept for further viewers.
    """

    def __init__(self, session: aiohttp.ClientSession, kept_seconds: float) -> None:
        self._session = session
        self._gateways: tuple[Gateway, ...] = ()
        self._unreadable_slices = Unreadable("slice", "it is ignored")
        self._engines: dict[str, EngineFigures] = {}
        self._seen_at: dict[str, float] = {}  # when somebody has last seen the service
        self._steps = Shared[str, dict[str, list[StepRecord]]](kept_seconds, _MAX_SHARED)
        self._slowest = Shared[str, list[RequestReceipt]](kept_seconds, _MAX_SHARED)
        self._waiting = Shared[str, list[Waiting]](kept_seconds, _MAX_SHARED)
        self.requests: dict[str, Requests] | None = None
        self.problem = "the gateways have not been read yet."
        """Why some requests are missing; empty if all gateways answered the last time."""

    def set_slices(self, slices: Iterable[Json]) -> None:
        slices = list(slices)
        self._unreadable_slices.forget_others({slice_name(piece) for piece in slices}, "")
        self._gateways = parse_gateways(slices, self._unreadable_slices)

    def note_seen(self, services: Iterable[str]) -> None:
        """Read engines for the next _VIEWED_SECONDS, those of these services in every round that has room for them."""
        self._seen_at.update(dict.fromkeys(services, time.monotonic()))

    def find_figures(self, service: str) -> Figures | None:
        """Return the figures of the service's engines; None if they are not read."""
        found = self._engines.get(service)
        return None if found is None else found.figures

    async def read(self) -> None:
        """Read the requests at all gateways once."""
        answers = await asyncio.gather(*map(self._read_demand, self._gateways))
        read = [each for each in answers if isinstance(each, Demand)]
        self._note_problems([each for each in answers if isinstance(each, str)])
        self.requests = sum_requests(read) if read else None

    async def read_steps(self, service: str) -> dict[str, list[StepRecord]]:
        """Return the last steps of the service's engines, by engine; nothing if no gateway answers."""
        return await self._steps.get(service, lambda: self._read_steps(service))

    async def read_slowest(self, service: str) -> list[RequestReceipt]:
        """Return the service's slowest requests of those that the gateways keep, the slowest first."""
        return await self._slowest.get(service, lambda: self._read_slowest(service))

    async def read_waiting(self, service: str) -> list[Waiting]:
        """Return whose requests for the service wait, for each gateway."""
        return await self._waiting.get(service, lambda: self._read_waiting(service))

    async def read_receipt(self, request_id: str) -> RequestReceipt | None:
        """Return the newest receipt of a request that has ended; None if no gateway keeps it."""
        return find_newest(await self.read_receipts(request_id))

    async def read_receipts(self, request_id: str) -> list[RequestReceipt]:
        """Return the receipts of requests with an id, one for each service and gateway. Clients choose ids."""
        pages = await self._read_all(RECEIPT_PATH, {"id": request_id}, list[RequestReceipt])
        return [receipt for page in pages for receipt in page]

    async def _read_steps(self, service: str) -> dict[str, list[StepRecord]]:
        for gateway in random.sample(self._gateways, len(self._gateways)):
            page = await self._read_page(gateway, STEPS_PAGE, {"service": service}, EngineSteps)
            if page is not None:
                return page.engines
        return {}

    async def _read_slowest(self, service: str) -> list[RequestReceipt]:
        pages = await self._read_all(RECEIPTS_PAGE, {"service": service}, SlowestReceipts)
        receipts = [receipt for page in pages for receipt in page.receipts]
        return sorted(receipts, key=lambda receipt: -receipt.seconds)[:_MAX_RECEIPTS]

    async def _read_waiting(self, service: str) -> list[Waiting]:
        pages = await self._read_all(WAITING_PAGE, {"service": service}, WaitingClients)
        return [Waiting(*msgspec.structs.astuple(each)) for page in pages for each in page.clients]

    async def _read_all(self, path: str, query: Mapping[str, str], kind: type[_Page]) -> list[_Page]:
        """Return the pages of the gateways that answer."""
        pages = await asyncio.gather(*(self._read_page(each, path, query, kind) for each in self._gateways))
        return [page for page in pages if page is not None]

    async def _read_page(
        self, gateway: Gateway, path: str, query: Mapping[str, str], kind: type[_Page]
    ) -> _Page | None:
        try:
            page = await read_page(self._session, gateway, path, _TIMEOUT_SECONDS, query)
            return None if page is None else msgspec.json.decode(page, type=kind)
        except (GatewayUnreadable, *_INVALID) as error:
            logger.debug("event=page_unreadable path=%s query=%s error=%s", path, query, error)
            return None

    def _note_problems(self, reasons: Sequence[str]) -> None:
        """Set the problem. The reasons have addresses, so they are logged and not shown."""
        problem = f"{len(reasons)} of {len(self._gateways)} gateways did not answer." if reasons else ""
        if not self._gateways:
            problem = "no gateway runs."
        if problem and problem != self.problem:
            logger.warning("event=gateways_unreadable error=%s", reasons[0] if reasons else problem)
        self.problem = problem

    async def _read_demand(self, gateway: Gateway) -> Demand | str | None:
        """Return the page; None if the gateway cannot hold a request, or the reason why it cannot be read."""
        try:
            page = await read_page(self._session, gateway, DEMAND_PATH, _TIMEOUT_SECONDS, max_bytes=_MAX_DEMAND_BYTES)
            return None if page is None else msgspec.json.decode(page, type=Demand)
        except (GatewayUnreadable, *_INVALID) as error:
            return f"{gateway}: {error}"

    async def read_engines(self) -> None:
        """Read the engines of one round of services, if somebody looks; otherwise forget their figures.

        So figures never are those of a time in which engines were not read.
        """
        now = time.monotonic()
        self._seen_at = {key: at for key, at in self._seen_at.items() if now - at < _VIEWED_SECONDS}
        busy = {key for key, each in (self.requests or {}).items() if each.ready and self._seen_at}
        self._engines = {key: each for key, each in self._engines.items() if key in busy}
        serving = [each for each in self._gateways if each.serving]
        remaining = iter(zip(self._choose(busy), cycle(serving), strict=False))

        async def go_on() -> None:
            for key, gateway in remaining:
                await self._read_service(gateway, key)

        await asyncio.gather(*(go_on() for _ in range(_AT_ONCE)))

    def _choose(self, busy: set[str]) -> list[str]:
        """Return the services of a round. Seen ones get at least half of it, and what the others leave."""
        ordered = sorted(busy, key=lambda key: self._engines[key].read_at if key in self._engines else 0.0)
        seen = [key for key in ordered if key in self._seen_at]
        others = [key for key in ordered if key not in self._seen_at]
        first = seen[: max(_MAX_SERVICES // 2, _MAX_SERVICES - len(others))]
        return [*first, *others[: _MAX_SERVICES - len(first)]]

    async def _read_service(self, gateway: Gateway, service: str) -> None:
        found = self._engines.setdefault(service, EngineFigures())
        page = await self._read_page(gateway, ENGINES_PAGE, {"service": service}, Engines)
        found.add({} if page is None else page.engines, time.monotonic())
