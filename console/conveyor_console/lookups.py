"""Serves the pages that answer one question each: who used what, and where the time of a request went."""

import asyncio
from collections.abc import Sequence, Set
from typing import Final

from aiohttp import web

from conveyor_api.names import API_KEY_PLURAL
from conveyor_console.access import Access, Caller
from conveyor_console.callers import find_namespaces, select_usage, select_waiting
from conveyor_console.gateways import Gateways, find_newest
from conveyor_console.pages import render_receipt, render_usage
from conveyor_console.requests import Waiting
from conveyor_console.responses import CALLER, build_page
from conveyor_console.usage import DAYS, Usage
from conveyor_protocol.usage import RequestReceipt
from conveyor_protocol.usage_rows import UsageRow

_MAX_ID: Final = 256
_MAX_WAITING: Final = 20


class Lookups:
    """The handlers, and what the page of a service shows of callers."""

    def __init__(self, gateways: Gateways, access: Access, usage: Usage) -> None:
        self._gateways = gateways
        self._access = access
        self._usage = usage

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/usage", self._show_usage)
        app.router.add_get("/requests", self._show_request)

    async def find_usage(self, caller: Caller, service: str) -> list[UsageRow]:
        """Return what callers have used of the service today, as far as the reader may see it."""
        rows, _ = await self._usage.read(DAYS[0])
        shown, _ = await self._select(caller, [row for row in rows if row.service == service])
        return shown

    async def find_waiting(self, caller: Caller, service: str) -> list[Waiting]:
        """Return whose requests for the service wait, as far as the reader may see it."""
        waiting = await self._gateways.read_waiting(service)
        _, namespaces = find_namespaces((), ((service, each.caller) for each in waiting))
        named = await self._access.find_visible(caller, namespaces, API_KEY_PLURAL)
        return select_waiting(waiting, service, named, _MAX_WAITING)

    async def _show_usage(self, request: web.Request) -> web.Response:
        caller, text = request[CALLER], request.query.get("days", "")
        days = next((each for each in DAYS if str(each) == text), DAYS[0])
        rows, problem = await self._usage.read(days)
        shown, seen = await self._select(caller, rows)
        return build_page(render_usage(shown, seen, days, problem, caller.name))

    async def _select(self, caller: Caller, rows: Sequence[UsageRow]) -> tuple[list[UsageRow], Set[str]]:
        """Return the rows that the reader may see, and the namespaces whose services the reader sees."""
        of_services, of_callers = find_namespaces(
            (row.service for row in rows), ((row.service, row.caller) for row in rows)
        )
        seen, named = await asyncio.gather(
            self._access.find_visible(caller, of_services),
            self._access.find_visible(caller, of_callers, API_KEY_PLURAL),
        )
        return select_usage(rows, seen, named), seen

    async def _show_request(self, request: web.Request) -> web.Response:
        caller, request_id = request[CALLER], request.query.get("id", "").strip()[:_MAX_ID]
        receipt = await self._find_receipt(caller, request_id) if request_id else None
        return build_page(render_receipt(request_id, receipt, caller.name), 404 if receipt is None else 200)

    async def _find_receipt(self, caller: Caller, request_id: str) -> RequestReceipt | None:
        """Return the newest receipt with this id that the reader may see; None if there is none."""
        receipts = await self._gateways.read_receipts(request_id)
        namespaces, _ = find_namespaces((receipt.service for receipt in receipts), ())
        seen = await self._access.find_visible(caller, namespaces)
        return find_newest(receipt for receipt in receipts if receipt.service.partition("/")[0] in seen)
