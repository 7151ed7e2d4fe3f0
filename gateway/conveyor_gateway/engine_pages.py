"""Small pages of engines, fetched beside their requests and without a place in their queues.

Used by `demand` (`/load`: what waits inside an engine) and by `service_status` (`/health` and its like). Engines are
tenants' images: a page has a time and a size, and one that cannot be had is None.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Final

import aiohttp
import msgspec
from yarl import URL

_MAX_BYTES: Final = 64 << 10
_MAX_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class Page:
    """An engine's answer."""

    status: int
    content_type: str
    body: bytes


class _Load(msgspec.Struct):
    waiting: Annotated[int, msgspec.Meta(ge=0)]


async def fetch_waiting(addresses: Collection[str], timeout_seconds: float) -> dict[str, int | None]:
    """How many requests wait inside each engine (`host:port`) for a place in its batch; None: it does not say."""
    pages = await fetch(addresses, "/load", timeout_seconds)
    return {address: _parse_waiting(page) for address, page in pages.items()}


def _parse_waiting(page: Page | None) -> int | None:
    try:
        return None if page is None else msgspec.json.decode(page.body, type=_Load).waiting
    except (msgspec.DecodeError, RecursionError):
        return None


async def fetch(addresses: Collection[str], path: str, timeout_seconds: float) -> dict[str, Page | None]:
    """The page of each engine (`host:port`), all asked at once."""
    if not addresses:
        return {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=_MAX_AT_ONCE),
        timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        pages = await asyncio.gather(*(_fetch(session, address, path) for address in addresses))
    return dict(zip(addresses, pages, strict=True))


async def _fetch(session: aiohttp.ClientSession, address: str, path: str) -> Page | None:
    body = bytearray()
    try:
        async with session.get(URL(f"http://{address}{path}", encoded=True), allow_redirects=False) as response:
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > _MAX_BYTES:
                    return None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    return Page(response.status, response.headers.get("Content-Type", "text/plain"), bytes(body))
