"""The admin port: probes, metrics, demand, activity, starts. A function from a request to an answer, for `listener`."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp.web import BaseRequest, Response, StreamResponse

from conveyor_api.names import (
    ACTIVITY_PATH,
    DEMAND_PATH,
    GATEWAY_HEALTH_PATH,
    PROMETHEUS_PATH,
    READINESS_PATH,
    START_PATH,
)
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.errors import Code, GatewayError, MethodNotAllowed, NotFound, Unavailable
from conveyor_gateway.pages.activity import read_activity
from conveyor_gateway.pages.demand import read_demand
from conveyor_gateway.pages.start import read_start
from conveyor_gateway.pages.status import build_probe
from conveyor_gateway.recording.metrics import Metrics
from conveyor_gateway.responses import build_error, build_json, find_request_id
from conveyor_gateway.watching.catalog import Catalog
from conveyor_gateway.watching.readiness import Readiness


def build_admin_handler(
    catalog: Catalog, queues: Queues, readiness: Readiness, metrics: Metrics
) -> Callable[[BaseRequest], Awaitable[StreamResponse]]:
    """Port 8081."""

    async def demand(request: BaseRequest) -> Response:
        check_synced()
        return build_json(await read_demand(queues, request.query.get("service")), find_request_id(request))

    async def activity(request: BaseRequest) -> Response:
        check_synced()
        return build_json(read_activity(queues), find_request_id(request))

    async def start(request: BaseRequest) -> Response:
        check_synced()
        service, pod = (request.query.get(key, "") for key in ("service", "pod"))
        return build_json(await read_start(catalog, service, pod), find_request_id(request))

    def check_synced() -> None:
        if not readiness.synced:
            raise Unavailable("; ".join(readiness.problems()), Code.NOT_SYNCED)

    async def render_metrics(request: BaseRequest) -> Response:
        return Response(body=metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def probe(request: BaseRequest) -> Response:
        return build_probe(request, readiness)

    pages: Mapping[str, Callable[[BaseRequest], Awaitable[Response]]] = {
        DEMAND_PATH: demand,
        ACTIVITY_PATH: activity,
        START_PATH: start,
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
