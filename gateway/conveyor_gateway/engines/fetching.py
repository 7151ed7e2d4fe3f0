"""Fetches small pages from engines. These requests need no place in a queue.

Used in `pages`: by `demand` (`/load`: the engine's backlog and how many requests it runs at once), by `start` (`/load`:
how the engine started), by `status` (`/health` and similar) and by `document` (`/openapi.json`). Engines run tenants'
images, so the time and the size of a page are limited, and its bytes are held as they arrive. A page that cannot be
fetched is None.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import aiohttp
import msgspec

from conveyor_gateway.capacity.ledger import Hold, Ledger, build_memory_full, build_too_many
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.capacity.queries import run_held
from conveyor_gateway.engines.headers import choose_content_type, find_host
from conveyor_gateway.engines.transport import PLAIN, Transport
from conveyor_gateway.errors import GatewayError
from conveyor_http.reading import AnswerTooLong, NoMemory, read_answer
from conveyor_protocol.engine_pages import LOAD_PATH, ReportedLoad
from conveyor_protocol.request_headers import CHALLENGE_HEADER, ENGINE_CHALLENGE, POD_HEADER

MAX_BYTES: Final = 64 << 10
_MAX_AT_ONCE: Final = 100
_NUM_ASKED: Final = 3  # engines that are tried one after the other until one responds
SHARED_SECONDS: Final = 2.0  # for all engines that are tried
MAX_WAITING: Final = 64  # clients that wait for pages of one service


@dataclass(frozen=True, slots=True)
class EnginePage:
    """A page as an engine returned it."""

    status: int
    content_type: str  # one of the types that clients may get
    body: bytes
    pod: str = ""  # the host name that the engine reports


async def fetch_loads(
    hold: Hold, addresses: Collection[str], timeout_seconds: float, transport: Transport = PLAIN
) -> dict[str, ReportedLoad]:
    """Return the load of each engine (`host:port`)."""
    pages = await fetch(hold, addresses, LOAD_PATH, timeout_seconds, transport=transport)
    return {address: parse_load(page) for address, page in pages.items()}


def parse_load(page: EnginePage | None) -> ReportedLoad:
    try:
        return ReportedLoad() if page is None else msgspec.json.decode(page.body, type=ReportedLoad)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ReportedLoad()


class SharedPages:
    """Fetches pages that any engine of a service can return. Concurrent requests for a page share one fetch.

    A fetch needs no place on an engine and does not wait for one. It has a hold of its own, besides those of the
    clients that wait for it.
    """

    def __init__(self, ledger: Ledger, transport: Transport = PLAIN) -> None:
        self._ledger = ledger
        self._transport = transport
        self._fetches: dict[tuple[str, str], asyncio.Task[EnginePage | GatewayError | None]] = {}
        self._num_waiting = Counter[str]()  # clients by service

    async def find(
        self,
        hold: Hold,
        path: str,
        engines: Sequence[str],
        max_bytes: int = MAX_BYTES,
        timeout_seconds: float = SHARED_SECONDS,
        *,
        takes_refusals: bool = False,
    ) -> EnginePage | None:
        """Return the page from the first of up to three engines (`host:port`) that returns it; None if none does.

        hold: the client's, which names the engines' service. timeout_seconds: for all engines together.
        takes_refusals: a response with status 4xx counts as a page too.

        Raises GatewayError if the ledger has no room for the fetch, or too many clients wait for the service's pages.
        """
        hold.check()
        service = hold.owner.service
        if self._num_waiting[service] >= MAX_WAITING:
            raise build_too_many()
        self._num_waiting[service] += 1
        try:
            fetch_first = partial(
                _fetch_first, path, engines, max_bytes, timeout_seconds, takes_refusals, self._transport
            )
            found = await asyncio.shield(self._share(hold.owner, path, fetch_first))
        finally:
            self._num_waiting[service] -= 1
            if not self._num_waiting[service]:
                del self._num_waiting[service]
        if isinstance(found, GatewayError):
            raise found
        return found

    def _share(
        self, owner: Owner, path: str, fetch_first: Callable[[Hold], Awaitable[EnginePage | None]]
    ) -> asyncio.Task[EnginePage | GatewayError | None]:
        """Return the fetch of this page that runs, or else a new one."""
        key = owner.service, path

        async def fetch_held() -> EnginePage | GatewayError | None:
            try:
                return await run_held(self._ledger, Owner(owner.namespace, owner.service, ""), fetch_first)
            except GatewayError as error:
                return error

        if key not in self._fetches:
            self._fetches[key] = asyncio.create_task(fetch_held())
            self._fetches[key].add_done_callback(lambda _: self._fetches.pop(key))
        return self._fetches[key]


async def _fetch_first(
    path: str,
    engines: Sequence[str],
    max_bytes: int,
    timeout_seconds: float,
    takes_refusals: bool,
    transport: Transport,
    hold: Hold,
) -> EnginePage | None:
    """Try engines one after the other. An engine gets an equal part of the time that is left.

    Raises GatewayError if there is no memory for the page.
    """
    loop, tried = asyncio.get_running_loop(), random.sample(engines, min(_NUM_ASKED, len(engines)))
    until = loop.time() + timeout_seconds
    async with transport.open_session() as session:
        for number, address in enumerate(tried):
            seconds = max(0.001, (until - loop.time()) / (len(tried) - number))
            try:
                page = await _fetch(session, transport, hold, address, path, seconds, max_bytes)
            except NoMemory:
                raise build_memory_full() from None
            if page is not None and (page.status == 200 or (takes_refusals and 400 <= page.status < 500)):
                return page
    return None


async def fetch(
    hold: Hold,
    addresses: Collection[str],
    path: str,
    timeout_seconds: float,
    max_bytes: int = MAX_BYTES,
    *,
    transport: Transport = PLAIN,
) -> dict[str, EnginePage | None]:
    """Fetch a page from each engine (`host:port`), from _MAX_AT_ONCE at a time. All together have `timeout_seconds`.

    The pages' bytes are reserved in `hold`.
    """
    if not addresses:
        return {}
    pages, remaining = dict[str, EnginePage | None](), iter(addresses)
    async with transport.open_session() as session:

        async def go_on() -> None:
            for address in remaining:
                with contextlib.suppress(NoMemory):
                    pages[address] = await _fetch(session, transport, hold, address, path, timeout_seconds, max_bytes)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await asyncio.gather(*(go_on() for _ in range(min(_MAX_AT_ONCE, len(addresses)))))
    return {address: pages.get(address) for address in addresses}


async def _fetch(
    session: aiohttp.ClientSession,
    transport: Transport,
    hold: Hold,
    address: str,
    path: str,
    timeout_seconds: float,
    max_bytes: int,
) -> EnginePage | None:
    """Fetch a page from one engine. Raises NoMemory."""
    service, timeout = hold.owner.service, aiohttp.ClientTimeout(total=timeout_seconds)
    options = {"headers": {"Host": find_host(service, address)}, **transport.build_options(service, address)}
    url = transport.build_url(address, path)
    try:
        async with session.get(url, allow_redirects=False, timeout=timeout, **options) as response:
            if response.headers.get(CHALLENGE_HEADER) == ENGINE_CHALLENGE:
                return None  # the engine rejects this gateway, which has no token for it
            body = await read_answer(response.content, max_bytes, hold.reserve)
    except (AnswerTooLong, aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    content_type = choose_content_type(response.headers.get("Content-Type", ""))
    return EnginePage(response.status, content_type, bytes(body), response.headers.get(POD_HEADER, ""))
