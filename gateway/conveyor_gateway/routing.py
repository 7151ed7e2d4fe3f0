"""Finds the service of a request by its path, its Host, or the model that it names. Pure.

`listening` calls `parse_route` with the request line and the headers. A request at the root may name a model instead of
a service: in the path, or in the body, which `relaying` reads. `find_model` finds the service for that model. This
module works on names only: it knows neither HTTP libraries nor queues.

    /<namespace>/<name>/v1/...                                  the path names the service, with any Host
    /<namespace>/<name>/health                                  the same; also /ping and /version
    <name>.<namespace>[.svc[.<domain>]]  and  /v1/...           the Host names it
    any other Host                       and  /v1/...           the root: `model` in the body names it
    any other Host                       and  /v2/models/...    the root: the path names the model

A path may end with a slash, and lack `/v1` or have it twice, because people give clients base URLs with and without.

A Host with one part (`http://qwen/`, from a pod in the service's namespace) does not contain the namespace. A request
with such a Host gets a 421, because a guess could reach another team's service.
"""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from conveyor_api.endpoints import ENDPOINTS, EndpointKind, find_endpoint
from conveyor_api.names import GATEWAY_SERVICE
from conveyor_gateway.errors import Code, GatewayError, MethodNotAllowed
from conveyor_gateway.watching.catalog import Directory, NamedModel, join_names
from conveyor_gateway.watching.view import View

_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_BESIDE_V1: Final = [each.path for each in ENDPOINTS if not each.path.startswith("/v1/") and not each.has_model]
_OWN_PATHS: Final = frozenset(endpoint.path for endpoint in ENDPOINTS)
# Paths of clients whose base URL lacks /v1. Those of clients that add it to a base URL with it begin with /v1/v1.
_WITHOUT_V1: Final = {
    path.removeprefix("/v1"): path
    for path in (each.path for each in ENDPOINTS if not each.has_model)
    if path.startswith("/v1/") and path.removeprefix("/v1") not in _BESIDE_V1
}
_SERVICE_PATH = re.compile(
    rf"/({_LABEL})/({_LABEL})(/v1/.*|/v2/models/.*|{'|'.join(map(re.escape, (*_BESIDE_V1, *_WITHOUT_V1)))})"
)
_ROOT_PATHS: Final = ("/v1/models/", "/v2/models/", "/v2/health/")  # at the root, with any model name
_BATCH_PATHS: Final = ("/v1/files", "/v1/batches")  # of OpenAI's Batch API: docs/jobs.md
# A segment `.` or `..`, after decoding. A proxy beside an engine could resolve it and reach another of its paths.
_DOTS: Final = re.compile(r"(?:^|[/\\])\.\.?(?:[/\\]|$)")
_SERVICE_HOST = re.compile(rf"({_LABEL})\.({_LABEL})(?:\.svc(?:\..+)?)?")


@dataclass(frozen=True, slots=True)
class Route:
    """The kind of a request, its service (`namespace/name`; None at the root), its path, and the model in the path."""

    kind: EndpointKind
    service: str | None
    path: str = ""
    model: str = ""
    version: str = ""
    may_stream: bool = False
    max_bytes: int = 0  # the path's own limit for bodies, if it is above the gateway's; otherwise 0

    def fill_path(self, found: NamedModel) -> str:
        """Return the path for an engine of the service. A client at the root may use another name for the model."""
        model = self.model if self.service is not None else found.engine_name
        return self.path.replace("{version}", quote(self.version, safe="")).replace("{model}", quote(model))


@dataclass(frozen=True, slots=True)
class OwnHosts:
    """The host names of the gateway itself, which do not name a service."""

    system_namespace: str
    public: tuple[str, ...] = ()

    def is_own(self, host: str) -> bool:
        if host in ("", "localhost", GATEWAY_SERVICE) or host in self.public:
            return True
        match = _SERVICE_HOST.fullmatch(host)
        return match is not None and match.groups() == (GATEWAY_SERVICE, self.system_namespace)


def parse_route(method: str, path: str, host: str, own: OwnHosts, view: View) -> Route:
    """Return the route of a request for `path` (as sent, without query) at `host` (as sent, with or without port).

    The view shows the route's service. Raises GatewayError.
    """
    if _has_dots(path):
        message = f"no such path: {path}; a segment may not be `.` or `..`, encoded or not"
        raise GatewayError(message, Code.PATH_NOT_FOUND)
    path = path.rstrip("/") if path.endswith("/") and not path.endswith("//") else path
    is_own = path in _OWN_PATHS or path.startswith(_ROOT_PATHS)  # /v1/images is not a service in a namespace v1
    is_own |= path.startswith("/v1/v1/") and view.find_service("v1/v1") is None
    if not is_own and (match := _SERVICE_PATH.fullmatch(path)):
        namespace, name, rest = match.groups()
        return _parse_rest(method, rest, _known(f"{namespace}/{name}", view))
    if not path.startswith(("/v1/", *_ROOT_PATHS)) and path not in _BESIDE_V1 and path not in _WITHOUT_V1:
        raise GatewayError(
            f"no such path: {path}; services are at /<namespace>/<name>/v1/..., models at /v1/models",
            Code.PATH_NOT_FOUND,
        )
    return _parse_rest(method, path, _parse_host(host, own, view))


def _has_dots(path: str) -> bool:
    return ("." in path or "%" in path) and _DOTS.search(unquote(unquote(path))) is not None


def _parse_rest(method: str, path: str, service: str | None) -> Route:
    path = _WITHOUT_V1.get(path) or (path.removeprefix("/v1") if path.startswith("/v1/v1/") else path)
    endpoint = find_endpoint(path)
    if endpoint is None and path.startswith(_BATCH_PATHS):
        raise GatewayError(f"no such path: {path}; an offline job sends the requests of a file", Code.PATH_NOT_FOUND)
    if endpoint is None:
        known = ", ".join(each.path for each in ENDPOINTS)
        raise GatewayError(f"no such path: {path}; the paths are {known}", Code.PATH_NOT_FOUND)
    if method != endpoint.method and (method, endpoint.method) != ("HEAD", "GET"):
        raise MethodNotAllowed(f"{path} supports {endpoint.method}, not {method}", endpoint.method)
    model = version = ""
    if endpoint.has_model and (named := endpoint.match(path)) is not None:
        model, version = (unquote(named.get(name, "")) for name in ("model", "version"))
    match endpoint.kind:
        case EndpointKind.ENGINE:
            return Route(endpoint.kind, service, endpoint.path, model, version, endpoint.may_stream, endpoint.max_bytes)
        case EndpointKind.DESCRIBE | EndpointKind.ENGINE_PAGE if service is None and not endpoint.has_model:
            where = f"at /<namespace>/<name>{path}, and not at the root"
            raise GatewayError(f"{path} exists for each service, {where}", Code.PATH_NOT_FOUND)
        case EndpointKind.ENGINE_PAGE:
            return Route(endpoint.kind, service, endpoint.path, model, version)
        case EndpointKind.STATUS:
            return Route(endpoint.kind, service, path.removeprefix("/v1"))
        case EndpointKind.GET_MODEL:
            return Route(endpoint.kind, service, model=model)
        case EndpointKind.LIST_MODELS:
            return Route(endpoint.kind, service)
        case EndpointKind.DESCRIBE:
            return Route(endpoint.kind, service, path)


def _parse_host(host: str, own: OwnHosts, view: View) -> str | None:
    """Return the service that `host` names; None for the root. Raises GatewayError."""
    name = re.sub(r":[0-9]*$", "", host).rstrip(".").lower()
    if own.is_own(name) or re.fullmatch(r"\[.*\]|[0-9.]+", name):
        return None
    if match := _SERVICE_HOST.fullmatch(name):
        return _known(f"{match[2]}/{match[1]}", view)
    if "." in name:
        return None
    urls = f"http://{name}.<namespace>/v1, or http://<gateway>/<namespace>/{name}/v1"
    raise GatewayError(f"the Host {name!r} names no namespace; use {urls}", Code.HOST_WITHOUT_NAMESPACE)


def _known(service: str, view: View) -> str:
    if view.find_service(service) is not None:
        return service
    namespace, _, name = service.partition("/")
    raise view.build_missing(f"there is no service {name!r} in namespace {namespace!r}", Code.SERVICE_NOT_FOUND)


def find_model(model: str, view: View) -> NamedModel:
    """Return the service that `model` names at the root, and its adapter if `model` names one. Raises GatewayError.

    model: the service's `namespace/name`, or a model name that it claimed; then perhaps a colon and an adapter.
    """
    if (found := view.find_model(model)) is not None:
        return found
    raise build_no_model(model, view)


def find_route_model(route: Route, view: View) -> NamedModel:
    """Return the service of a route that names a service, or a model at the root. Raises GatewayError."""
    if route.service is None:
        return find_model(route.model, view)
    return NamedModel(view.directory.services[route.service])


def build_no_model(model: str, view: View) -> GatewayError:
    """Return the error for a model that does not exist or is hidden. Both look the same to clients."""
    message = f"the model {model[:100]!r} does not exist, or is not listed here"
    return view.build_missing(message, Code.MODEL_NOT_FOUND, "model")


def model_id(model: NamedModel, directory: Directory) -> str:
    """Return the shortest name with which `find_model` finds `model`."""
    service, adapter = model
    found = directory.find_model(model.engine_name)
    if found is not None and found.service is service and found.adapter == adapter:
        return model.engine_name
    return join_names(service.key, adapter)
