"""What the handlers of all pages share."""

from typing import Final

from aiohttp import web

from conveyor_console.access import Caller

CALLER: Final = web.RequestKey("caller", Caller)


def build_page(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html")
