"""Serves `/openapi.json` of a service: the engine's description of its paths, with the gateway's own responses added.

Called by `listening`. The description comes from one ready engine. A service at zero is not started: its document has
the paths without the fields of their bodies. Engines run tenants' images, so parts of a document that do not have
OpenAPI's form are left out. This module decodes only the parts to which the gateway adds something, and finds them by
known names. It copies all other parts unchanged, so the cost depends little on the document's content.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp.web import BaseRequest, Response

from conveyor_api.endpoints import ENDPOINTS, Endpoint, EndpointKind
from conveyor_gateway import __version__
from conveyor_gateway.capacity.ledger import Hold
from conveyor_gateway.engines.fetching import SharedPages
from conveyor_gateway.engines.session import KEPT_BACK
from conveyor_gateway.pages.gateway_answers import JSON_TYPE, SCHEMAS, Json, build_refusals, refer
from conveyor_gateway.pages.partial_json import Names, Raws, read_text
from conveyor_gateway.pages.status import build_no_page
from conveyor_gateway.responses import find_request_id
from conveyor_gateway.watching.catalog import Service
from conveyor_protocol.open_inference import build_path_parameters
from conveyor_protocol.request_headers import REQUEST_ID_HEADER

_TIMEOUT_SECONDS: Final = 10.0  # for all engines; vLLM builds its document on the first request
MAX_BYTES: Final = 512 << 10  # of an engine's document; Conveyor's engine has 200 KiB, vLLM 270 KiB
_KEPT_BACK: Final = {str(status) for status in KEPT_BACK}


class _Components(msgspec.Struct):
    schemas: msgspec.Raw = msgspec.Raw(b"{}")


class _EngineDocument(msgspec.Struct):
    openapi: str
    paths: msgspec.Raw
    components: _Components = msgspec.field(default_factory=_Components)


_METHODS: Final = Names("get", "post")
# Without `servers`, `security` and `callbacks`, because only the gateway knows the service's address.
_OPERATION: Final = Names(
    "tags", "summary", "description", "operationId", "parameters", "requestBody", "responses", "deprecated"
)
_RESPONSES: Final = Names(*(str(status.value) for status in HTTPStatus if status >= 200), "4XX", "5XX", "default")
_RESPONSE: Final = Names("description", "headers", "content")
_CONTENT: Final = Names(JSON_TYPE, "text/event-stream", "text/plain")
_SCHEMA: Final = Names("schema")


async def find_document(
    request: BaseRequest, hold: Hold, path: str, service: Service, engines: Sequence[str], pages: SharedPages
) -> Response:
    """Return the document. Raises GatewayError.

    engines: the ready engines (`host:port`). path: the document's path below the service's base.
    """
    page = await pages.find(hold, path, engines, MAX_BYTES, _TIMEOUT_SECONDS)
    of_engine = page.body if page is not None else OUTLINE if service.answers_from_zero and not engines else b""
    document = write_document(of_engine, service.key, request.rel_url.raw_path.removesuffix(path))
    if document is None:
        raise build_no_page(service, engines)
    headers = {REQUEST_ID_HEADER: find_request_id(request), "Content-Type": JSON_TYPE}
    return Response(body=document, headers=headers)


@lru_cache(maxsize=4)
def write_document(of_engine: bytes, service: str, base: str) -> bytes | None:
    """Return the service's OpenAPI document, or None if `of_engine` is no document. Concurrent clients share it."""
    try:
        return build_document(of_engine, service, base)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def build_document(of_engine: bytes, service: str, base: str) -> bytes:
    """Build the service's document from an engine's. `base`: the path under which the client reaches the service.

    Raises DecodeError, RecursionError or UnicodeDecodeError if `of_engine` is not a document.
    """
    engine = msgspec.json.decode(of_engine.decode(), type=_EngineDocument)  # `decode` checks for UTF-8; Raw does not
    if not bytes(engine.paths).startswith(b"{"):
        raise msgspec.ValidationError("`paths` is not an object")
    known, paths = _PATHS.read(engine.paths), dict[str, Json]()
    for endpoint in ENDPOINTS:
        path, method = endpoint.path, endpoint.method.lower()
        for operation in _describe(endpoint, _OPERATION.find(_METHODS.read(known.get(path)).get(method))):
            paths.setdefault(path, {})[method] = operation
    document = {
        "openapi": engine.openapi,
        "info": {"title": service, "version": __version__},
        "servers": [{"url": base or "/"}],
        "paths": paths,
        "components": {"schemas": _add_schemas(engine.components.schemas)},
    }
    return msgspec.json.encode(document)


def _add_schemas(of_engine: msgspec.Raw) -> msgspec.Raw:
    """Return the engine's and the gateway's schemas.

    They are joined as text, because there may be tens of thousands.
    """
    inside = bytes(of_engine).strip()[1:-1] if bytes(of_engine).startswith(b"{") else b""
    return msgspec.Raw(b"{" + inside + (b"," if inside.strip() else b"") + SCHEMAS[1:])


def _describe(endpoint: Endpoint, known: Raws | None) -> Iterator[Json]:
    """Yield the operation of a path, if it has one. `known`: the engine's description of the operation."""
    refusals = build_refusals(endpoint.kind, endpoint.path)
    match endpoint.kind:
        case EndpointKind.LIST_MODELS:
            yield _page("Lists the model of this service and its adapters.", refer("ModelList"), refusals)
        case EndpointKind.GET_MODEL:
            page = _page("Describes the model or the adapter with this id.", refer("Model"), refusals)
            yield {"parameters": build_path_parameters(endpoint.path), **page}
        case EndpointKind.DESCRIBE:
            yield _page("This document.", {"type": "object"}, refusals)
        case EndpointKind.STATUS:
            response: object = _responses(known).get("200", {"description": "Yes."})
            yield {"summary": "Whether the service answers requests.", "responses": {"200": response} | refusals}
        case _:
            if known is not None:
                yield known | {"responses": _join(_responses(known), refusals)}


def _responses(operation: Raws | None) -> Raws:
    return _RESPONSES.read((operation or {}).get("responses"))


def _page(summary: str, schema: Json, refusals: Json) -> Json:
    whole = {"description": summary, "content": {JSON_TYPE: {"schema": schema}}}
    return {"summary": summary, "responses": {"200": whole} | refusals}


def _join(engine: Raws, gateway: Json) -> Json:
    """Return the responses of the engine and of the gateway, joined by status."""
    engine = {status: response for status, response in engine.items() if status not in _KEPT_BACK}
    both = {
        status: _join_one(_RESPONSE.read(engine[status]), gateway[status]) for status in engine.keys() & gateway.keys()
    }
    return dict(sorted((engine | gateway | both).items()))


def _join_one(engine: Raws, gateway: Json) -> Json:
    content = _CONTENT.read(engine.get("content"))
    schemas = [_SCHEMA.read(content.get(JSON_TYPE)).get("schema", {}), gateway["content"][JSON_TYPE]["schema"]]
    return {
        "description": f"By an engine: {read_text(engine.get('description'))} {gateway['description']}",
        "content": content | {JSON_TYPE: {"schema": {"anyOf": schemas}}},
    }


_PATHS: Final = Names(*(endpoint.path for endpoint in ENDPOINTS))


def _outline(endpoint: Endpoint) -> Json:
    """Return what is known of a path's operation without an engine."""
    parameters = build_path_parameters(endpoint.path)
    operation: Json = {"parameters": parameters} if parameters else {}
    if endpoint.kind is EndpointKind.ENGINE_PAGE:
        return operation | {
            "summary": "About the model.",
            "responses": {"200": {"description": "An engine's response."}},
        }
    return operation | {
        "summary": f"Only if the model {endpoint.models}.",
        "description": "No engine runs now. While one runs, this document has the fields of the body.",
        "requestBody": {"required": True, "content": {JSON_TYPE: {"schema": {"type": "object"}}}},
        "responses": {"200": {"description": "The response of the engine that this request starts."}},
    }


def _build_outline() -> bytes:
    """Return what is known of an engine's document without an engine."""
    paths = {
        endpoint.path: {endpoint.method.lower(): _outline(endpoint)}
        for endpoint in ENDPOINTS
        if endpoint.kind in (EndpointKind.ENGINE, EndpointKind.ENGINE_PAGE)
    }
    return msgspec.json.encode({"openapi": "3.1.0", "paths": paths})


OUTLINE: Final = _build_outline()
