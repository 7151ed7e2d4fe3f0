"""Fetches small pages from engines. These requests need no place in a queue.

Used in `pages`: by `demand` (`/load`: the engine's backlog and how many requests it runs at once), by `start` (`/load`:
how the engine started), by `status` (`/health` and similar) and by `document` (`/openapi.json`). Engines run tenants'
images, so the time and the size of a page are limited. A page that cannot be fetched is None.
"""

import asyncio
import contextlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import aiohttp
import msgspec
from yarl import URL

from conveyor_gateway.engines.connection import Connector
from conveyor_gateway.engines.headers import choose_content_type
from conveyor_http.reading import AnswerTooLong, read_answer

LOAD_PATH: Final = "/load"
MAX_BYTES: Final = 64 << 10
_MAX_AT_ONCE: Final = 100
_NUM_ASKED: Final = 3  # engines that are tried one after the other until one responds
_SHARED_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class EnginePage:
    """A page as an engine returned it."""

    status: int
    content_type: str  # one of the types that clients may get
    body: bytes


class Load(msgspec.Struct, frozen=True):
    """The load that an engine reports. A field is None if the engine does not report it."""

    waiting: Annotated[int, msgspec.Meta(ge=0)] | None = None  # requests without a place in its batch
    carried: Annotated[int, msgspec.Meta(ge=1)] | None = None  # requests that it can run at once, if limited
    limit_reason: Annotated[str, msgspec.Meta(pattern="^[a-z_]{1,32}$")] | None = None  # only with objectives
    warm_up_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None  # how long its warm-up took


async def fetch_loads(addresses: Collection[str], timeout_seconds: float) -> dict[str, Load]:
    """Return the load of each engine (`host:port`)."""
    pages = await fetch(addresses, LOAD_PATH, timeout_seconds)
    return {address: parse_load(page) for address, page in pages.items()}


def parse_load(page: EnginePage | None) -> Load:
    try:
        return Load() if page is None else msgspec.json.decode(page.body, type=Load)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Load()


class SharedPages:
    """Fetches pages that any engine of a service can return. Concurrent requests for a page share one fetch.

    A fetch needs no place on an engine and does not wait for one.
    """

    def __init__(self) -> None:
        self._asking: dict[tuple[str, str], asyncio.Task[EnginePage | None]] = {}

    async def find(
        self,
        path: str,
        service: str,
        engines: Sequence[str],
        max_bytes: int = MAX_BYTES,
        timeout_seconds: float = _SHARED_SECONDS,
        *,
        takes_refusals: bool = False,
    ) -> EnginePage | None:
        """Return the page from the first of up to three engines (`host:port`) that returns it; None if none does.

        service: the engines' `namespace/name`. takes_refusals: a response with status 4xx counts as a page too.
        """
        asked = service, path
        if asked not in self._asking:
            finding = _find(path, engines, max_bytes, timeout_seconds, takes_refusals)
            self._asking[asked] = asyncio.create_task(finding)
            self._asking[asked].add_done_callback(lambda _: self._asking.pop(asked))
        return await asyncio.shield(self._asking[asked])


async def _find(
    path: str, engines: Sequence[str], max_bytes: int, timeout_seconds: float, takes_refusals: bool
) -> EnginePage | None:
    for address in random.sample(engines, min(_NUM_ASKED, len(engines))):
        page = (await fetch([address], path, timeout_seconds, max_bytes))[address]
        if page is not None and (page.status == 200 or (takes_refusals and 400 <= page.status < 500)):
            return page
    return None


async def fetch(
    addresses: Collection[str], path: str, timeout_seconds: float, max_bytes: int = MAX_BYTES
) -> dict[str, EnginePage | None]:
    """Fetch a page from each engine (`host:port`), from _MAX_AT_ONCE at a time. All together have `timeout_seconds`."""
    if not addresses:
        return {}
    async with aiohttp.ClientSession(
        connector=Connector(),
        timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        pages, remaining = dict[str, EnginePage | None](), iter(addresses)

        async def go_on() -> None:
            for address in remaining:
                pages[address] = await _fetch(session, address, path, max_bytes)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await asyncio.gather(*(go_on() for _ in range(min(_MAX_AT_ONCE, len(addresses)))))
    return {address: pages.get(address) for address in addresses}


async def _fetch(session: aiohttp.ClientSession, address: str, path: str, max_bytes: int) -> EnginePage | None:
    try:
        async with session.get(URL(f"http://{address}{path}", encoded=True), allow_redirects=False) as response:
            body = await read_answer(response.content, max_bytes)
    except (AnswerTooLong, aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    return EnginePage(response.status, choose_content_type(response.headers.get("Content-Type", "")), bytes(body))
