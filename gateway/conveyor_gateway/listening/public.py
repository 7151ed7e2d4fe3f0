"""Serves the public port for clients: finds the route and calls the part that responds.

`listener` calls `PublicApp.handle`. Requests that need a place on an engine go to `relaying`, the others to `pages`.
Each request has a hold in the ledger until its answer is sent, except for probes, which are answered at once.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from aiohttp.web import BaseRequest, Response, StreamResponse

from conveyor_api.endpoints import EndpointKind
from conveyor_api.names import GATEWAY_HEALTH_PATH, READINESS_PATH
from conveyor_gateway.capacity.ledger import Hold, Ledger, build_memory_full
from conveyor_gateway.clients import Client, Clients
from conveyor_gateway.engines.fetching import SharedPages
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.held_request import HeldRequest, find_owner
from conveyor_gateway.listening.cors import NOBODY, Cors
from conveyor_gateway.pages.document import find_document
from conveyor_gateway.pages.models import build_model_list, find_model_page, send_model_list
from conveyor_gateway.pages.status import build_own_status, build_probe, find_engine_page, find_status
from conveyor_gateway.proofs import Proofs
from conveyor_gateway.recording.metrics import Metrics
from conveyor_gateway.relaying.open_requests import OpenRequests
from conveyor_gateway.responses import build_error, build_json, find_request_id
from conveyor_gateway.routing import OwnHosts, Route, find_route_model, parse_route
from conveyor_gateway.watching.catalog import Catalog
from conveyor_gateway.watching.readiness import Readiness
from conveyor_gateway.watching.view import View
from conveyor_process.tracing import TRACE_PARENT_HEADER, enter_trace


@dataclass(frozen=True, slots=True)
class PublicApp:
    """The handler for port 8080."""

    open_requests: OpenRequests
    catalog: Catalog
    readiness: Readiness
    metrics: Metrics
    own_hosts: OwnHosts
    ledger: Ledger
    clients: Clients
    proofs: Proofs
    pages: SharedPages
    cors: Cors = NOBODY
    lists_all: bool = False  # whether the root also lists services without `listed`

    async def handle(self, request: BaseRequest) -> StreamResponse:
        path = request.rel_url.raw_path
        enter_trace(request.headers.get(TRACE_PARENT_HEADER, ""))
        if path in (GATEWAY_HEALTH_PATH, READINESS_PATH):
            answer: StreamResponse = build_probe(request, self.readiness, is_public=True)
        elif (preflight := self.cors.answer_preflight(request)) is not None:
            answer = preflight
        else:
            try:
                answer = await self._respond(request, path)
            except GatewayError as error:
                self.metrics.count_request("", error.status)
                answer = build_error(error, find_request_id(request), path)
        if self.readiness.draining and not answer.prepared:  # headers that are already sent cannot announce the close
            answer.force_close()
        return answer

    async def _respond(self, request: BaseRequest, path: str) -> StreamResponse:
        if not self.readiness.synced:
            raise GatewayError("the gateway is starting and does not know the services yet; retry", Code.NOT_SYNCED)
        client = self.clients.find(request)
        view = View(self.catalog.directory, *self.proofs.find(request.headers), client.id)
        if view.caller is not None:
            client = Client(view.caller.name, is_named=True)
        try:
            route = parse_route(request.method, path, _find_host(request), self.own_hosts, view)
        except GatewayError as error:
            self.catalog.keys.log.note_error(view.caller, error.code)
            await self.ledger.turns.wait(view.name_client(None))
            raise
        await self.ledger.turns.wait(route.service.partition("/")[0] if route.service else view.name_client(None))
        if route.kind is EndpointKind.ENGINE:
            return await self.open_requests.handle(request, route, client, view)
        answer = await self._send_page(request, route, view)
        self.metrics.count_request(route.service or "", answer.status)
        return answer

    async def _send_page(self, request: BaseRequest, route: Route, view: View) -> StreamResponse:
        """Send a page. Returns when the client has received it or has left. Raises GatewayError."""
        service = view.directory.services.get(route.service or "")
        if route.kind is EndpointKind.ENGINE_PAGE:
            service = find_route_model(route, view).service
        held = HeldRequest(self.ledger, request, find_owner(service, view))
        try:
            with held:
                return await self._answer(request, route, held.hold, view)
        except asyncio.CancelledError:
            if held.error is None or request.writer.output_size > 0:
                raise
            held.clear()
            answer = build_error(held.error, find_request_id(request), request.rel_url.raw_path)
            answer.force_close()
            return answer

    async def _answer(self, request: BaseRequest, route: Route, hold: Hold, view: View) -> StreamResponse:
        request_id, directory = find_request_id(request), self.catalog.directory
        match route.kind:
            case EndpointKind.LIST_MODELS:
                if route.service is None:
                    view.check_any()
                    return await send_model_list(request, view, self.lists_all)
                answer = build_json(build_model_list(directory.services[route.service]), request_id)
            case EndpointKind.GET_MODEL:
                answer = build_json(find_model_page(route, view, self.lists_all), request_id)
            case EndpointKind.STATUS:
                answer = await self._find_status(route, hold, request_id)
            case EndpointKind.ENGINE_PAGE:
                model = find_route_model(route, view)
                engines = self.catalog.engines(model.service.key)
                answer = await find_engine_page(self.pages, hold, route, model, engines, request_id)
            case EndpointKind.ENGINE:
                raise AssertionError("`_respond` has passed it to `open_requests`")
            case EndpointKind.DESCRIBE:
                assert route.service is not None, "the route of a document has a service"
                service, engines = directory.services[route.service], self.catalog.engines(route.service)
                answer = await find_document(request, hold, route.path, service, engines, self.pages)
        return await self._send(request, answer, hold)

    async def _find_status(self, route: Route, hold: Hold, request_id: str) -> Response:
        if route.service is None:
            return build_own_status(route.path, self.readiness, request_id)
        service, engines = self.catalog.directory.services[route.service], self.catalog.engines(route.service)
        return await find_status(self.pages, hold, route.path, service, engines, request_id)

    async def _send(self, request: BaseRequest, answer: Response, hold: Hold) -> Response:
        """Send the answer while its bytes are held."""
        body = answer.body
        if isinstance(body, bytes) and not hold.reserve(len(body)):
            raise build_memory_full()
        if self.readiness.draining:
            answer.force_close()
        with contextlib.suppress(ConnectionError):
            await answer.prepare(request)
            await answer.write_eof()
        return answer


def _find_host(request: BaseRequest) -> str:
    """Return the request's host; "" without one.

    A host in the request target overrides the Host header (RFC 9112, section 3.2.2).
    """
    if "Host" not in request.headers:  # aiohttp would look up this machine's name in DNS
        return ""
    host = request.host
    return f"[{host}]" if host.count(":") > 1 and "[" not in host else host
