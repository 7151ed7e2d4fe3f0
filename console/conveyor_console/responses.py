"""What the handlers of all pages share."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from aiohttp import web

from conveyor_console.access import Caller

CALLER: Final = web.RequestKey("caller", Caller)
_LINE_END: Final = re.compile("\r\n|\r|\n")


def build_page(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html")


def build_event(text: str) -> bytes:
    """Return a message, or nothing without text. HTML drops rows of tables that follow other elements in a message."""
    return ("data: " + _LINE_END.sub("\ndata: ", text) + "\n\n").encode() if text else b""


async def stream_changes(
    request: web.Request, changes: AsyncGenerator[str, None], headers: Mapping[str, str], max_seconds: float
) -> web.StreamResponse:
    """Send each change as a message. `changes` is closed if the browser leaves, or has not read all in the time."""
    response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
    try:
        async with asyncio.timeout(max_seconds), contextlib.aclosing(changes):
            async for text in changes:
                if not response.prepared:  # browsers send a whole form before they read
                    await response.prepare(request)
                await response.write(build_event(text))
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # what is in its buffer would never be read
    except ConnectionError:
        pass
    return response
