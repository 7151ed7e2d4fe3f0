"""Serves status pages: this gateway's probes; `/health`, `/ping` and `/version` as in vLLM; and the pages of `/v2`.

Called by `listening`, for the base of a service and for the root. For a service, one of its engines returns the page.
Without a ready engine, and on the root, the gateway responds. A service at zero, or one that starts for a request,
counts as ready. These pages do not start a service. Pages of the Open Inference Protocol about a model always come from
an engine, except for the page on whether the model is ready.
"""

from collections.abc import Sequence
from typing import Final

from aiohttp.web import BaseRequest, Response

from conveyor_api.names import GATEWAY_HEALTH_PATH
from conveyor_gateway import __version__
from conveyor_gateway.capacity.ledger import Hold
from conveyor_gateway.engines.fetching import SharedPages
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.responses import build_json
from conveyor_gateway.routing import Route
from conveyor_gateway.watching.catalog import NamedModel, Service
from conveyor_gateway.watching.readiness import Readiness
from conveyor_protocol.open_inference import LIVE_PATH, READY_PATH, SERVER_PATH, build_server_metadata
from conveyor_protocol.request_headers import REQUEST_ID_HEADER

VERSION_PATH: Final = "/version"
_READY_END: Final = "/ready"


def build_probe(request: BaseRequest, readiness: Readiness, is_public: bool = False) -> Response:
    """Return /healthz (the event loop runs) or /readyz (whether this gateway should get requests, and other problems).

    The response to a client omits the details, because they name namespaces.
    """
    is_health = request.rel_url.raw_path == GATEWAY_HEALTH_PATH
    problems = [] if is_health else readiness.problems()
    lines = problems or ["ok"]
    if is_public:
        lines = ["not ready"] if problems else ["ok"]
    elif not is_health:
        lines = lines + readiness.warnings()
    return Response(status=503 if problems else 200, text="\n".join(lines) + "\n")


def build_own_status(path: str, readiness: Readiness, request_id: str) -> Response:
    """Return the gateway's own status page. Raises GatewayError."""
    if (known := _find_known(path)) is not None:
        return build_json(known, request_id)
    if readiness.problems():
        raise GatewayError("the gateway is starting or stopping; retry", Code.NOT_READY)
    return build_json({"ready": True} if path == READY_PATH else {"status": "ready"}, request_id)


def _find_known(path: str) -> dict[str, object] | None:
    """Return a page that does not depend on engines; None if the path is not such a page."""
    if path == VERSION_PATH:
        return {"version": __version__}
    if path == SERVER_PATH:
        return build_server_metadata(__version__)
    return {"live": True} if path == LIVE_PATH else None


async def find_status(
    pages: SharedPages, hold: Hold, path: str, service: Service, engines: Sequence[str], request_id: str
) -> Response:
    """Return the service's status page, from one of its engines (`host:port`) or else from the gateway.

    Raises GatewayError if no engine returns the page and the gateway has none of its own.
    """
    page = await pages.find(hold, path, engines)
    if page is not None:
        headers = {"Content-Type": page.content_type, REQUEST_ID_HEADER: request_id}
        return Response(body=page.body, headers=headers)
    if (known := _find_known(path)) is not None:
        return build_json(known, request_id)
    if service.answers_from_zero and not engines:
        asleep = {"status": "asleep" if service.is_asleep else "starting"}
        return build_json(asleep | ({"ready": True} if path == READY_PATH else {}), request_id)
    raise build_no_page(service, engines)


async def find_engine_page(
    pages: SharedPages, hold: Hold, route: Route, model: NamedModel, engines: Sequence[str], request_id: str
) -> Response:
    """Return an engine's page about the model that the route names. Raises GatewayError."""
    path, service = route.fill_path(model), model.service
    if path.endswith(_READY_END) and service.answers_from_zero and not engines:
        return build_json({"name": model.engine_name, "ready": True}, request_id)
    page = await pages.find(hold, path, engines, takes_refusals=True)
    if page is None:
        raise build_no_page(service, engines)
    headers = {"Content-Type": page.content_type, REQUEST_ID_HEADER: request_id}
    return Response(status=page.status, body=page.body, headers=headers)


def build_no_page(service: Service, engines: Sequence[str]) -> GatewayError:
    """Return the error if none of the engines has returned a page."""
    if engines:
        return GatewayError(f"no engine of {service.key} reports that it is healthy", Code.ENGINES_NOT_READY)
    seconds = service.queue_timeout_seconds
    return GatewayError(
        f"no engine of {service.key} is ready; a request waits up to {seconds:g} s for one", Code.NO_ENGINE
    )
