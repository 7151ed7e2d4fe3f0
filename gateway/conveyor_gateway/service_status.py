"""`/health`, `/ping` and `/version`, as vLLM means them: 200 when the service can answer.

Called by `app`, for the base of a service and for the root. One of the service's engines says it; without a ready one,
and on the root, the gateway itself. Costs no place on an engine and does not wait for one.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Final

from aiohttp.web import Response

from conveyor_gateway import __version__
from conveyor_gateway.answers import build_json
from conveyor_gateway.catalog import Service
from conveyor_gateway.engine_pages import Page, fetch
from conveyor_gateway.errors import Code, Unavailable
from conveyor_gateway.readiness import Readiness
from conveyor_process.request_headers import REQUEST_ID_HEADER

VERSION_PATH: Final = "/version"
_NUM_ASKED: Final = 3  # engines, one after the other, until one can answer
_ENGINE_SECONDS: Final = 2.0


def build_own_status(path: str, readiness: Readiness, request_id: str) -> Response:
    """The gateway's. Raises Unavailable."""
    if path == VERSION_PATH:
        return build_json({"version": __version__}, request_id)
    if problems := readiness.problems():
        raise Unavailable("; ".join(problems), Code.NOT_READY)
    return build_json({"status": "ready"}, request_id)


class ServiceStatus:
    """The services'. However many clients ask for a page at once, one engine at a time is asked for it."""

    def __init__(self) -> None:
        self._asking: dict[tuple[str, str], asyncio.Task[Page | None]] = {}

    async def answer(self, path: str, service: Service, engines: Sequence[str], request_id: str) -> Response:
        """The page of the first of the engines (`host:port`) that can answer. Raises Unavailable."""
        asked = service.key, path
        if asked not in self._asking:
            self._asking[asked] = asyncio.create_task(_find_page(path, engines))
            self._asking[asked].add_done_callback(lambda _: self._asking.pop(asked))
        page = await asyncio.shield(self._asking[asked])
        if page is not None:
            headers = {"Content-Type": page.content_type, REQUEST_ID_HEADER: request_id}
            return Response(body=page.body, headers=headers)
        if path == VERSION_PATH:
            return build_json({"version": __version__}, request_id)
        if engines:
            raise Unavailable(f"no engine of {service.key} says that it can answer", Code.ENGINES_NOT_READY)
        seconds = service.queue_timeout_seconds
        raise Unavailable(f"no engine of {service.key} is ready; a request waits {seconds:g} s for one", Code.NO_ENGINE)


async def _find_page(path: str, engines: Sequence[str]) -> Page | None:
    for address in random.sample(engines, min(_NUM_ASKED, len(engines))):
        page = (await fetch([address], path, _ENGINE_SECONDS))[address]
        if page is not None and page.status == 200:
            return page
    return None
