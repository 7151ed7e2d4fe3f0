"""The two HTTP faces of the process: the public one for clients, the admin one for probes, metrics and demand.

Both are plain functions from a request to an answer, run by `listener`. The public one reads the route and leaves
requests for engines to `relaying`.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp.web import BaseRequest, Response, StreamResponse

from conveyor_api.endpoints import Task
from conveyor_api.names import DEMAND_PATH, GATEWAY_HEALTH_PATH, PROMETHEUS_PATH, READINESS_PATH
from conveyor_gateway.admission.memory import Memory
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.answering.demand import read_demand
from conveyor_gateway.answering.document import send_document
from conveyor_gateway.answering.status import build_own_status, find_status
from conveyor_gateway.answers import Model, build_error, build_json, build_model, build_model_list, find_request_id
from conveyor_gateway.engines.pages import SharedPages
from conveyor_gateway.errors import Code, GatewayError, MethodNotAllowed, NotFound, Unavailable
from conveyor_gateway.recording.metrics import Metrics
from conveyor_gateway.relaying.request_life import Gateway
from conveyor_gateway.routing import OwnHosts, Route, find_model, parse_route
from conveyor_gateway.watching.catalog import Directory
from conveyor_gateway.watching.readiness import Readiness


@dataclass(frozen=True, slots=True)
class PublicApp:
    """Port 8080."""

    gateway: Gateway
    directory: Directory
    readiness: Readiness
    metrics: Metrics
    own_hosts: OwnHosts
    memory: Memory
    pages: SharedPages = field(default_factory=SharedPages)

    async def handle(self, request: BaseRequest) -> StreamResponse:
        path = request.rel_url.raw_path
        if path in (GATEWAY_HEALTH_PATH, READINESS_PATH):
            answer: StreamResponse = build_probe(request, self.readiness)
        else:
            try:
                answer = await self._answer(request, path)
            except GatewayError as error:
                self.metrics.count_request("", error.status)
                answer = build_error(error, find_request_id(request))
        if self.readiness.draining and not answer.prepared:  # one that has promised to keep the connection keeps it
            answer.force_close()
        return answer

    async def _answer(self, request: BaseRequest, path: str) -> StreamResponse:
        if not self.readiness.synced:
            raise Unavailable("the gateway has not read the InferenceServices yet; try again", Code.NOT_SYNCED)
        route = parse_route(request.method, path, _find_host(request), self.own_hosts, self.directory)
        request_id = find_request_id(request)
        match route.task:
            case Task.LIST_MODELS:
                answer: StreamResponse = build_json(build_model_list(route.service, self.directory), request_id)
            case Task.GET_MODEL:
                answer = build_json(self._find_model(route), request_id)
            case Task.STATUS:
                answer = await self._find_status(route, request_id)
            case Task.DESCRIBE:
                answer = await self._send_document(request, route)
            case _:
                return await self.gateway.answer(request, route)
        self.metrics.count_request(route.service or "", HTTPStatus.OK)
        return answer

    async def _find_status(self, route: Route, request_id: str) -> Response:
        if route.service is None:
            return build_own_status(route.path, self.readiness, request_id)
        service, engines = self.directory.services[route.service], self.gateway.find_engines(route.service)
        return await find_status(self.pages, route.path, service, engines, request_id)

    async def _send_document(self, request: BaseRequest, route: Route) -> StreamResponse:
        service = self.directory.services[route.service or ""]
        engines = self.gateway.find_engines(service.key)
        return await send_document(request, route.path, service, engines, self.pages, self.memory)

    def _find_model(self, route: Route) -> Model:
        if route.service is None:
            return build_model(find_model(route.model, self.directory), route.model)
        service = self.directory.services[route.service]
        if route.model != service.model_name:
            raise NotFound(f"{service.key} serves the model {service.model_name!r}", Code.MODEL_NOT_FOUND, "model")
        return build_model(service, route.model)


def _find_host(request: BaseRequest) -> str:
    """A target with a host of its own, as proxies are sent, counts before the Host header (RFC 9112, section 3.2.2)."""
    if "Host" not in request.headers:  # aiohttp would ask the DNS for this machine's name
        return ""
    host = request.host
    return f"[{host}]" if host.count(":") > 1 and "[" not in host else host


def build_admin_handler(
    queues: Queues, readiness: Readiness, metrics: Metrics
) -> Callable[[BaseRequest], Awaitable[StreamResponse]]:
    """Port 8081."""

    async def demand(request: BaseRequest) -> Response:
        if not readiness.synced:
            raise Unavailable("; ".join(readiness.problems()), Code.NOT_SYNCED)
        return build_json(await read_demand(queues, request.query.get("service")), find_request_id(request))

    async def render_metrics(request: BaseRequest) -> Response:
        return Response(body=metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def probe(request: BaseRequest) -> Response:
        return build_probe(request, readiness)

    pages: Mapping[str, Callable[[BaseRequest], Awaitable[Response]]] = {
        DEMAND_PATH: demand,
        PROMETHEUS_PATH: render_metrics,
        GATEWAY_HEALTH_PATH: probe,
        READINESS_PATH: probe,
    }

    async def handle(request: BaseRequest) -> StreamResponse:
        path = request.rel_url.raw_path
        try:
            if path not in pages:
                raise NotFound(f"no such path: {path}; there are {', '.join(pages)}", Code.PATH_NOT_FOUND)
            if request.method not in ("GET", "HEAD"):
                raise MethodNotAllowed(f"{path} takes GET, not {request.method}", "GET, HEAD")
            return await pages[path](request)
        except GatewayError as error:
            return build_error(error, find_request_id(request))

    return handle


def build_probe(request: BaseRequest, readiness: Readiness) -> Response:
    """/healthz: the event loop runs. /readyz: whether requests should come here, and what else is wrong."""
    is_health = request.rel_url.raw_path == GATEWAY_HEALTH_PATH
    problems = [] if is_health else readiness.problems()
    lines = problems or ["ok"]
    if not is_health:
        lines = lines + readiness.warnings()
    return Response(status=503 if problems else 200, text="\n".join(lines) + "\n")
