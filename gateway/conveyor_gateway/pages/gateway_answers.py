"""The gateway's own responses for OpenAPI documents: schemas, and errors for each kind of path."""

from typing import Any, Final

import msgspec

from conveyor_api.endpoints import EndpointKind
from conveyor_gateway.errors import Code
from conveyor_protocol.answer_codes import ERROR_FORMS, ErrorDetails, find_error_form
from conveyor_protocol.engine_pages import Model, ModelList

Json = dict[str, Any]

JSON_TYPE: Final = "application/json"
_NAME: Final = "Gateway{name}"
_REFERENCE: Final = f"#/components/schemas/{_NAME}"
_ANY_PATH: Final = (
    Code.MALFORMED_HTTP,
    Code.NO_API_KEY,
    Code.INVALID_API_KEY,
    Code.SERVICE_NOT_FOUND,
    Code.HEADERS_TOO_LARGE,
    Code.INTERNAL_ERROR,
    Code.UNKNOWN_TRANSFER_CODING,
    Code.NOT_SYNCED,
    Code.TOO_MANY_REQUESTS,
    Code.TOO_MANY_CONNECTIONS,
    Code.GATEWAY_MEMORY_FULL,
)
_ENGINES_ANSWER: Final = (
    Code.INVALID_JSON,
    Code.INVALID_VALUE,
    Code.WRONG_TASK,
    Code.ENCODED_BODY,
    Code.MALFORMED_BODY,
    Code.INVALID_TIMEOUT,
    Code.UNKNOWN_CLASS,
    Code.NO_CLASSES,
    Code.PRIORITY_NOT_READ,
    Code.SERVICE_DELETED,
    Code.BODY_TOO_SLOW,
    Code.REQUEST_TOO_LARGE,
    Code.QUEUE_FULL,
    Code.RATE_LIMITED,
    Code.ENDS_ENGINES,
    Code.ENGINE_LOST,
    Code.ENGINE_BROKE,
    Code.STOPPING,
    Code.EVICTED,
    Code.START_FAILED,
    Code.QUEUE_TIMEOUT,
    Code.DEADLINE_EXCEEDED,
)
_OF_KIND: Final[dict[EndpointKind, tuple[Code, ...]]] = {
    EndpointKind.LIST_MODELS: (),
    EndpointKind.GET_MODEL: (Code.MODEL_NOT_FOUND,),
    EndpointKind.ENGINE_PAGE: (Code.MODEL_NOT_FOUND, Code.NO_ENGINE, Code.ENGINES_NOT_READY),
    EndpointKind.STATUS: (Code.NO_ENGINE, Code.ENGINES_NOT_READY),
    EndpointKind.DESCRIBE: (Code.NO_ENGINE, Code.ENGINES_NOT_READY),
}


def refer(name: str) -> Json:
    return {"$ref": _REFERENCE.format(name=name)}


def build_refusals(kind: EndpointKind, path: str) -> Json:
    """Return the gateway's error responses for a path of this kind, by status."""
    form = refer(find_error_form(path).answer.__name__)
    codes = (*_ANY_PATH, *_OF_KIND.get(kind, _ENGINES_ANSWER))
    refusals = {}
    for status in sorted({code.status for code in codes}):
        cases = "; ".join(f"`{code}`: {code.meaning}" for code in codes if code.status == status)
        refusals[str(status)] = {
            "description": f"By the gateway: {cases}.",
            "content": {JSON_TYPE: {"schema": form}},
        }
    return refusals


def _build_schemas() -> bytes:
    types = (*(form.answer for form in ERROR_FORMS), Code, Model, ModelList)
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schemas[ErrorDetails.__name__]["properties"]["code"] = refer(Code.__name__)
    return msgspec.json.encode({_NAME.format(name=name): schema for name, schema in schemas.items()})


SCHEMAS: Final = _build_schemas()
