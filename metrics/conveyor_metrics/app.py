"""Builds the HTTP applications: the API for the API server (HTTPS), and an admin port (plain HTTP) with probes, the
process's metrics and the page for KEDA.

aiohttp is used because it passes the peer's certificate to the request, which uvicorn does not. Responses are JSON, and
errors are `metav1.Status` objects. Called by `server`. This module knows neither TLS files nor the Kubernetes API.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import REGISTRY, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from conveyor_api.names import (
    CLASS_LABEL,
    DEMAND_PATH,
    LIMIT_LABEL,
    LIMITED_ENGINES_METRIC,
    LIVENESS_PATH,
    METRICS_GROUP,
    METRICS_VERSIONS,
    PROMETHEUS_PATH,
    READABLE_GATEWAYS,
    READINESS_PATH,
)
from conveyor_metrics import documents
from conveyor_metrics.auth import Trust, authenticate
from conveyor_metrics.demand import DemandSum
from conveyor_metrics.errors import MetricsError, NotFound, StatusReason
from conveyor_metrics.source import GatewaySource
from conveyor_process.tracing import TRACE_PARENT_HEADER, enter_trace
from conveyor_protocol.limit_reasons import LimitReason

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

disable_created_metrics()  # type: ignore[no-untyped-call]
REQUESTS = Counter("conveyor_metrics_requests", "Responses of the metrics API, by HTTP status.", ["code"])
VALUE_SECONDS = Histogram(
    "conveyor_metrics_value_seconds",
    "Time to answer one metric value, gateways included.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
)


def build_api_app(source: GatewaySource, trust: Trust) -> web.Application:
    """Build the custom.metrics.k8s.io API. Every path requires the front proxy's certificate."""

    @web.middleware
    async def authenticated(request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport else None
        authenticate(trust, certificate, request.headers)
        return await handler(request)

    app = web.Application(middlewares=[_answered_with_status, authenticated])
    app.router.add_get("/apis", _constant(documents.build_group_list()))
    app.router.add_get("/openapi/v2", _constant(documents.build_openapi_v2()))
    app.router.add_get("/openapi/v3", _constant(documents.build_openapi_v3_index()))
    group = f"/apis/{METRICS_GROUP}"
    app.router.add_get(group, _constant(documents.build_group()))
    for version in METRICS_VERSIONS:
        app.router.add_get(f"{group}/{version}", _constant(documents.build_resource_list(version)))
        path = f"{group}/{version}/namespaces/{{namespace}}/{documents.RESOURCE}/{{name}}/{{metric}}"
        app.router.add_get(path, _metric_value(source, version))
    return app


def build_admin_app(source: GatewaySource, missing: Callable[[], list[str]]) -> web.Application:
    """Build the admin application. `missing` returns what the server still waits for. An empty list means ready.

    Readiness does not depend on the gateways. Even without values, the API must respond to discovery. Otherwise no
    namespace of the cluster could be deleted.
    """

    async def livez(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_request: web.Request) -> web.Response:
        if reasons := missing():
            return web.Response(status=503, text=f"waiting for {', '.join(reasons)}\n")
        return web.Response(text="ok\n")

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get(LIVENESS_PATH, livez)
    app.router.add_get(READINESS_PATH, readyz)
    app.router.add_get(PROMETHEUS_PATH, metrics)
    app.router.add_get(DEMAND_PATH, _demand(source))
    return app


@web.middleware
async def _answered_with_status(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count every response, and return errors in the format that Kubernetes' clients expect."""
    enter_trace(request.headers.get(TRACE_PARENT_HEADER, ""))
    try:
        response = await handler(request)
    except MetricsError as error:
        response = refuse(error.reason, str(error))
    except web.HTTPNotFound:
        response = refuse(StatusReason.NOT_FOUND, f"the server has no {request.path}")
    except web.HTTPMethodNotAllowed as error:
        response = refuse(StatusReason.METHOD_NOT_ALLOWED, f"{request.method} is not allowed; only GET is")
        response.headers["Allow"] = error.headers["Allow"]
    REQUESTS.labels(str(response.status)).inc()
    return response


def refuse_outside(status: int, said: str | None) -> web.Response:
    """Count and return the response to an invalid request (status below 500) or to a bug.

    said: the parser's error.
    """
    REQUESTS.labels(str(status)).inc()
    if status < 500:
        words = f"the request is not valid HTTP: {(said or 'malformed').strip()[:200]}"
        return refuse(StatusReason.BAD_REQUEST, words, status)
    return refuse(StatusReason.INTERNAL_ERROR, "internal error in the metrics server; its log has the traceback")


def _metric_value(source: GatewaySource, version: str) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        namespace, name, metric = (request.match_info[key] for key in ("namespace", "name", "metric"))
        selector, service = request.query.get("metricLabelSelector", ""), f"{namespace}/{name}"
        if metric in documents.CLASS_METRICS:
            labels, value = await _read_class(source, service, selector, documents.CLASS_METRICS[metric])
        elif metric == LIMITED_ENGINES_METRIC:
            labels, value = await _read_limited(source, service, selector)
        elif field := (documents.METRICS | documents.COUNT_METRICS | documents.LIMIT_METRICS).get(metric):
            labels = _parse_labels(selector)
            value = getattr(await _read(source, service, labels), field)
        else:
            known = ", ".join(
                resource["name"].partition("/")[2] for resource in documents.build_resource_list(version)["resources"]
            )
            raise NotFound(f"there is no metric {metric}; the metrics are {known}")
        return web.json_response(documents.build_metric_values(version, namespace, name, metric, value, labels))

    return answer


def _demand(source: GatewaySource) -> Handler:
    """Build the handler for `?service=<namespace>/<name>`: both values of `METRICS` on one page, or an error."""

    async def read(request: web.Request) -> web.Response:
        service = request.query.get("service", "")
        if "/" not in service:
            raise NotFound("name an InferenceService with ?service=<namespace>/<name>")
        labels = _parse_labels(",".join(f"{key}={value}" for key, value in request.query.items() if key != "service"))
        demand = await _read(source, service, labels)
        return web.json_response({metric: getattr(demand, field) for metric, field in documents.METRICS.items()})

    async def answer(request: web.Request) -> web.StreamResponse:
        return await _answered_with_status(request, read)

    return answer


async def _read(source: GatewaySource, service: str, labels: Mapping[str, str]) -> DemandSum:
    begun = time.monotonic()
    demand = await source.read_demand(service, of_readable=bool(labels))
    VALUE_SECONDS.observe(time.monotonic() - begun)
    return demand


async def _read_class(source: GatewaySource, service: str, selector: str, field: str) -> tuple[Mapping[str, str], int]:
    """Return the label of a request class and the value of its metric. Raises NotFound."""
    label, _, name = selector.partition("=")
    if label != CLASS_LABEL or not name:
        raise NotFound(f"metrics of a request class need the label {CLASS_LABEL}=NAME")
    classes = (await _read(source, service, {})).classes
    if name not in classes:
        raise NotFound(f"{service} has no request class {name[:100]}; its classes are {', '.join(classes) or 'none'}")
    return {CLASS_LABEL: name}, getattr(classes[name], field)


async def _read_limited(source: GatewaySource, service: str, selector: str) -> tuple[Mapping[str, str], int]:
    """Return the label of a reason, and how many engines have a limit for this reason. Raises NotFound."""
    label, _, reason = selector.partition("=")
    if label != LIMIT_LABEL or reason not in set(LimitReason):
        raise NotFound(f"{LIMITED_ENGINES_METRIC} needs the label {LIMIT_LABEL}=REASON: {', '.join(LimitReason)}")
    return {LIMIT_LABEL: reason}, (await _read(source, service, {})).limited_engines.get(reason, 0)


def _parse_labels(selector: str) -> Mapping[str, str]:
    """Return the labels in the selector. Raises NotFound for an unknown label."""
    label = ",".join(f"{key}={value}" for key, value in READABLE_GATEWAYS.items())
    if selector not in ("", label):
        raise NotFound(f"the only label of metrics is {label}: select by it, or omit metricLabelSelector")
    return READABLE_GATEWAYS if selector else {}


def _constant(document: dict[str, Any]) -> Handler:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(document)

    return answer


def refuse(reason: StatusReason, message: str, status: int | None = None) -> web.Response:
    """Return an error response. `status`: overrides the reason's status, for errors of aiohttp's parser."""
    code = status or reason.status
    return web.json_response(documents.build_status(code, reason, message), status=code)
