"""Serves the admin port: probes, metrics, demand, activity, starts, adapters, engines, waiting clients, usage, keys,
receipts."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp.web import BaseRequest, Response, StreamResponse

from conveyor_api.names import (
    ACTIVITY_PATH,
    ADAPTERS_PAGE,
    DEMAND_PATH,
    ENGINES_PAGE,
    GATEWAY_HEALTH_PATH,
    KEYS_PAGE,
    PROMETHEUS_PATH,
    READINESS_PATH,
    RECEIPT_PATH,
    RECEIPTS_PAGE,
    START_PATH,
    STEPS_PAGE,
    USAGE_PAGE,
    WAITING_PAGE,
)
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.engines.transport import Transport
from conveyor_gateway.errors import Code, GatewayError, MethodNotAllowed
from conveyor_gateway.pages.activity import read_activity
from conveyor_gateway.pages.adapters import read_adapters
from conveyor_gateway.pages.demand import encode_demand, read_demand
from conveyor_gateway.pages.engines import read_engines, read_steps
from conveyor_gateway.pages.start import read_start
from conveyor_gateway.pages.status import build_probe
from conveyor_gateway.pages.waiting import read_waiting
from conveyor_gateway.recording.metrics import Metrics
from conveyor_gateway.recording.receipts import Receipts
from conveyor_gateway.recording.usage_book import UsageBook
from conveyor_gateway.responses import build_error, build_json, find_request_id, send_pieces
from conveyor_gateway.watching.catalog import Catalog
from conveyor_gateway.watching.readiness import Readiness


class AdminApp:
    """The handler for port 8081."""

    def __init__(
        self,
        catalog: Catalog,
        queues: Queues,
        readiness: Readiness,
        metrics: Metrics,
        book: UsageBook,
        receipts: Receipts,
        ledger: Ledger,
        transport: Transport,
    ) -> None:
        self._transport = transport
        self._catalog = catalog
        self._ledger = ledger
        self._queues = queues
        self._readiness = readiness
        self._metrics = metrics
        self._book = book
        self._receipts = receipts
        self._pages: Mapping[str, Callable[[BaseRequest], Awaitable[StreamResponse]]] = {
            DEMAND_PATH: self._send_demand,
            ACTIVITY_PATH: self._send_activity,
            START_PATH: self._send_start,
            ADAPTERS_PAGE: self._send_adapters,
            ENGINES_PAGE: self._send_engines,
            STEPS_PAGE: self._send_steps,
            WAITING_PAGE: self._send_waiting,
            RECEIPTS_PAGE: self._send_receipts,
            USAGE_PAGE: self._send_usage,
            KEYS_PAGE: self._send_keys,
            RECEIPT_PATH: self._send_receipt,
            PROMETHEUS_PATH: self._send_metrics,
            GATEWAY_HEALTH_PATH: self._send_probe,
            READINESS_PATH: self._send_probe,
        }

    async def handle(self, request: BaseRequest) -> StreamResponse:
        """Return the page at the request's path, or an error response."""
        path = request.rel_url.raw_path
        try:
            if path not in self._pages:
                raise GatewayError(f"no such path: {path}; the paths are {', '.join(self._pages)}", Code.PATH_NOT_FOUND)
            if request.method not in ("GET", "HEAD"):
                raise MethodNotAllowed(f"{path} supports GET, not {request.method}", "GET, HEAD")
            return await self._pages[path](request)
        except GatewayError as error:
            return build_error(error, find_request_id(request))

    async def _send_demand(self, request: BaseRequest) -> StreamResponse:
        self._check_synced()
        only = request.query.get("service")
        if only is None:
            return await send_pieces(request, "application/json", encode_demand(self._queues))
        return build_json(
            await read_demand(self._queues, self._ledger, only, self._transport), find_request_id(request)
        )

    async def _send_activity(self, request: BaseRequest) -> Response:
        self._check_synced()
        return build_json(read_activity(self._queues), find_request_id(request))

    async def _send_start(self, request: BaseRequest) -> Response:
        self._check_synced()
        service, pod = (request.query.get(key, "") for key in ("service", "pod"))
        return build_json(
            await read_start(self._catalog, self._ledger, service, pod, self._transport), find_request_id(request)
        )

    async def _send_adapters(self, request: BaseRequest) -> Response:
        self._check_synced()
        service = request.query.get("service", "")
        page = await read_adapters(self._catalog, self._ledger, service, self._transport)
        return build_json(page, find_request_id(request))

    async def _send_engines(self, request: BaseRequest) -> Response:
        self._check_synced()
        service = request.query.get("service", "")
        page = await read_engines(self._catalog, self._ledger, service, self._transport)
        return build_json(page, find_request_id(request))

    async def _send_steps(self, request: BaseRequest) -> Response:
        self._check_synced()
        service = request.query.get("service", "")
        page = await read_steps(self._catalog, self._ledger, service, self._transport)
        return build_json(page, find_request_id(request))

    async def _send_waiting(self, request: BaseRequest) -> Response:
        self._check_synced()
        return build_json(read_waiting(self._queues, request.query.get("service", "")), find_request_id(request))

    async def _send_receipts(self, request: BaseRequest) -> Response:
        page = await self._receipts.find_slowest(request.query.get("service", ""))
        return build_json(page, find_request_id(request))

    async def _send_usage(self, request: BaseRequest) -> Response:
        return build_json(self._book.build_page(), find_request_id(request))

    async def _send_keys(self, request: BaseRequest) -> Response:
        page = self._catalog.keys.log.build_page(request.query.get("after", ""))
        return build_json(page, find_request_id(request))

    async def _send_receipt(self, request: BaseRequest) -> Response:
        request_id = request.query.get("id", "")
        receipts = self._receipts.find(request_id)
        if receipts is None:
            words = f"this gateway keeps no receipt of a request with the id {request_id[:128]!r}"
            raise GatewayError(words, Code.RECEIPT_NOT_FOUND)
        return Response(body=receipts, content_type="application/json")

    async def _send_metrics(self, request: BaseRequest) -> StreamResponse:
        return await send_pieces(request, "text/plain; version=0.0.4; charset=utf-8", self._metrics.write_page())

    async def _send_probe(self, request: BaseRequest) -> Response:
        return build_probe(request, self._readiness)

    def _check_synced(self) -> None:
        if not self._readiness.synced:
            raise GatewayError("; ".join(self._readiness.problems()), Code.NOT_SYNCED)
