"""`/openapi.json` of a service: what its engines say of their paths, and what the gateway answers before them.

Called by `listening`. One ready engine is asked for its document; a service that sleeps is not woken, and tells its
paths without the fields of their bodies. The engine's image may be anybody's: what its document does not have in
OpenAPI's form is left out. Only what the gateway adds to is read, by names that are known here, and the rest is passed
on as it was written. So a document costs little more than a look at its bytes, whatever is in it.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp.web import BaseRequest, Response, StreamResponse

from conveyor_api.endpoints import ENDPOINTS, Endpoint, Kind
from conveyor_gateway import __version__
from conveyor_gateway.capacity.reservations import Capacity, Reservation, build_memory_full
from conveyor_gateway.engines.fetching import SharedPages
from conveyor_gateway.engines.session import KEPT_BACK
from conveyor_gateway.errors import Code, ErrorAnswer
from conveyor_gateway.pages.models import Model, ModelList
from conveyor_gateway.pages.status import build_no_page
from conveyor_gateway.responses import find_request_id
from conveyor_gateway.watching.catalog import Service
from conveyor_protocol.request_headers import REQUEST_ID_HEADER

Json = dict[str, Any]
Raws = dict[str, msgspec.Raw]  # an object of which nothing below its names is read

_TIMEOUT_SECONDS: Final = 10.0  # vLLM makes its when first asked
MAX_BYTES: Final = 512 << 10  # of an engine's; ours have 50 KiB, vLLM's 270
_ANY_PATH: Final = (
    Code.MALFORMED_HTTP,
    Code.SERVICE_NOT_FOUND,
    Code.HEADERS_TOO_LARGE,
    Code.INTERNAL_ERROR,
    Code.NOT_SYNCED,
    Code.TOO_MANY_CONNECTIONS,
)
_ENGINES_ANSWER: Final = (
    Code.MALFORMED_BODY,
    Code.INVALID_TIMEOUT,
    Code.UNKNOWN_CLASS,
    Code.NO_CLASSES,
    Code.PRIORITY_NOT_READ,
    Code.SERVICE_DELETED,
    Code.BODY_TOO_SLOW,
    Code.REQUEST_TOO_LARGE,
    Code.QUEUE_FULL,
    Code.TOO_MANY_REQUESTS,
    Code.ENGINE_LOST,
    Code.ENGINE_BROKE,
    Code.STOPPING,
    Code.GATEWAY_MEMORY_FULL,
    Code.START_FAILED,
    Code.QUEUE_TIMEOUT,
    Code.DEADLINE_EXCEEDED,
)
_OF_KIND: Final[dict[Kind, tuple[Code, ...]]] = {
    Kind.LIST_MODELS: (),
    Kind.GET_MODEL: (Code.MODEL_NOT_FOUND,),
    Kind.STATUS: (Code.NO_ENGINE, Code.ENGINES_NOT_READY),
    Kind.DESCRIBE: (Code.NO_ENGINE, Code.ENGINES_NOT_READY, Code.GATEWAY_MEMORY_FULL),
}
_KEPT_BACK: Final = {str(status) for status in KEPT_BACK}
_NAME: Final = "Gateway{name}"
_REFERENCE: Final = f"#/components/schemas/{_NAME}"
_JSON: Final = "application/json"


class _Names:
    """The names of an object that are read. The decoder steps over all others without making anything of them."""

    _ABSENT: Final = msgspec.Raw()

    def __init__(self, *names: str) -> None:
        self._names = {f"field_{number}": name for number, name in enumerate(names)}
        fields = [
            (field, msgspec.Raw, msgspec.field(default=self._ABSENT, name=name)) for field, name in self._names.items()
        ]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Named", fields))

    def find(self, value: msgspec.Raw | None) -> Raws | None:
        """Those of them that are there; None for what is no object."""
        try:
            read = None if value is None else self._decoder.decode(value)
        except msgspec.ValidationError:
            read = None
        if read is None:
            return None
        found = {name: getattr(read, field) for field, name in self._names.items()}
        return {name: raw for name, raw in found.items() if raw is not self._ABSENT}

    def read(self, value: msgspec.Raw | None) -> Raws:
        """As `find`; empty for what is no object."""
        return self.find(value) or {}


class _Components(msgspec.Struct):
    schemas: msgspec.Raw = msgspec.Raw(b"{}")


class _EngineDocument(msgspec.Struct):
    openapi: str
    paths: msgspec.Raw
    components: _Components = msgspec.field(default_factory=_Components)


_METHODS: Final = _Names("get", "post")
# Without `servers`, `security` and `callbacks`: where a service is, its gateway says.
_OPERATION: Final = _Names(
    "tags", "summary", "description", "operationId", "parameters", "requestBody", "responses", "deprecated"
)
_RESPONSES: Final = _Names(*(str(status.value) for status in HTTPStatus if status >= 200), "4XX", "5XX", "default")
_RESPONSE: Final = _Names("description", "headers", "content")
_CONTENT: Final = _Names(_JSON, "text/event-stream", "text/plain")
_SCHEMA: Final = _Names("schema")


async def send_document(
    request: BaseRequest,
    client: str,
    path: str,
    service: Service,
    engines: Sequence[str],
    pages: SharedPages,
    capacity: Capacity,
) -> StreamResponse:
    """Returns when the client has it, until when its bytes count as held. Raises Unavailable.

    `engines` are the ready ones (`host:port`), `path` is the document's below the service's base.
    """
    with Reservation(capacity, service.key, client) as reservation:
        if not reservation.reserve(2 * MAX_BYTES):  # the engine's, and ours
            raise build_memory_full()
        page = await pages.find(path, service.key, engines, MAX_BYTES, _TIMEOUT_SECONDS)
        of_engine = page.body if page is not None else OUTLINE if service.answers_from_zero and not engines else b""
        document = write_document(of_engine, service.key, request.rel_url.raw_path.removesuffix(path))
        if document is None:
            raise build_no_page(service, engines)
        headers = {REQUEST_ID_HEADER: find_request_id(request), "Content-Type": _JSON}
        answer = Response(body=document, headers=headers)
        with contextlib.suppress(ConnectionError):
            await answer.prepare(request)
            await answer.write_eof()
        return answer


@lru_cache(maxsize=4)
def write_document(of_engine: bytes, service: str, base: str) -> bytes | None:
    """None for no document. Clients that ask at once, who share a page, share what is made of it."""
    try:
        return build_document(of_engine, service, base)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def build_document(of_engine: bytes, service: str, base: str) -> bytes:
    """`base`: the path at which the client has the service.

    Raises DecodeError, RecursionError or UnicodeDecodeError for no document.
    """
    engine = msgspec.json.decode(of_engine.decode(), type=_EngineDocument)  # Raw alone would take any bytes
    if not bytes(engine.paths).startswith(b"{"):
        raise msgspec.ValidationError("its paths are no object")
    known, paths = _PATHS.read(engine.paths), dict[str, Json]()
    for endpoint in ENDPOINTS:
        path, method = _template(endpoint), endpoint.method.lower()
        for operation in _describe(endpoint.kind, _OPERATION.find(_METHODS.read(known.get(path)).get(method))):
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
    """The engine's schemas and ours, joined as text: there may be tens of thousands."""
    inside = bytes(of_engine).strip()[1:-1] if bytes(of_engine).startswith(b"{") else b""
    return msgspec.Raw(b"{" + inside + (b"," if inside.strip() else b"") + _SCHEMAS[1:])


def _template(endpoint: Endpoint) -> str:
    return f"{endpoint.path}{{model}}" if endpoint.kind is Kind.GET_MODEL else endpoint.path


def _describe(kind: Kind, known: Raws | None) -> Iterator[Json]:
    """The operation of a path, if there is one; `known` is the engine's."""
    refusals = _build_refusals((*_ANY_PATH, *_OF_KIND.get(kind, _ENGINES_ANSWER)))
    match kind:
        case Kind.LIST_MODELS:
            yield _page("The model of this service.", _refer("ModelList"), refusals)
        case Kind.GET_MODEL:
            model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            yield {"parameters": [model], **_page("The model, if its id is this one.", _refer("Model"), refusals)}
        case Kind.DESCRIBE:
            yield _page("This document.", {"type": "object"}, refusals)
        case Kind.STATUS:
            told: object = _responses(known).get("200", {"description": "Yes."})
            yield {"summary": "Whether requests are answered, and by what.", "responses": {"200": told} | refusals}
        case _:
            if known is not None:
                yield known | {"responses": _join(_responses(known), refusals)}


def _responses(operation: Raws | None) -> Raws:
    return _RESPONSES.read((operation or {}).get("responses"))


def _read_text(value: msgspec.Raw | None) -> str:
    """Empty for what is none."""
    try:
        return "" if value is None else msgspec.json.decode(value, type=str)
    except msgspec.ValidationError:
        return ""


def _page(summary: str, schema: Json, refusals: Json) -> Json:
    whole = {"description": summary, "content": {_JSON: {"schema": schema}}}
    return {"summary": summary, "responses": {"200": whole} | refusals}


def _refer(name: str) -> Json:
    return {"$ref": _REFERENCE.format(name=name)}


def _build_refusals(codes: Collection[Code]) -> Json:
    """By status."""
    told = {}
    for status in sorted({code.status for code in codes}):
        cases = "; ".join(f"`{code}`: {code.meaning}" for code in codes if code.status == status)
        told[str(status)] = {
            "description": f"By the gateway: {cases}.",
            "content": {_JSON: {"schema": _refer("ErrorAnswer")}},
        }
    return told


def _join(engine: Raws, gateway: Json) -> Json:
    """The responses of two who may answer, by status."""
    engine = {status: response for status, response in engine.items() if status not in _KEPT_BACK}
    both = {
        status: _join_one(_RESPONSE.read(engine[status]), gateway[status]) for status in engine.keys() & gateway.keys()
    }
    return dict(sorted((engine | gateway | both).items()))


def _join_one(engine: Raws, gateway: Json) -> Json:
    content = _CONTENT.read(engine.get("content"))
    schemas = [_SCHEMA.read(content.get(_JSON)).get("schema", {}), gateway["content"][_JSON]["schema"]]
    return {
        "description": f"By an engine: {_read_text(engine.get('description'))} {gateway['description']}",
        "content": content | {_JSON: {"schema": {"anyOf": schemas}}},
    }


_PATHS: Final = _Names(*(_template(endpoint) for endpoint in ENDPOINTS))
_SCHEMAS: Final = msgspec.json.encode(
    {
        _NAME.format(name=name): schema
        for name, schema in msgspec.json.schema_components((ErrorAnswer, Model, ModelList), ref_template=_REFERENCE)[
            1
        ].items()
    }
)


def _build_outline() -> bytes:
    """An engine's document as far as it is known without one."""
    body = {"required": True, "content": {_JSON: {"schema": {"type": "object"}}}}
    paths = {
        endpoint.path: {
            endpoint.method.lower(): {
                "summary": f"Only if the model {endpoint.models}.",
                "description": "No engine runs now. The document of one that runs has the fields of the body.",
                "requestBody": body,
                "responses": {"200": {"description": "The answer of the engine that this starts."}},
            }
        }
        for endpoint in ENDPOINTS
        if endpoint.kind is Kind.ENGINE
    }
    return msgspec.json.encode({"openapi": "3.1.0", "paths": paths})


OUTLINE: Final = _build_outline()
