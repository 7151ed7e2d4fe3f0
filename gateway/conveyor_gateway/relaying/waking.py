"""Refuses some requests that no engine could answer, before they start a service from zero. Pure.

Called by `request_life` while the service sleeps. Otherwise its engines refuse such requests, with better messages.
"""

import re
from typing import Final

import msgspec

from conveyor_api.endpoints import ENDPOINTS, Endpoint, find_endpoint
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.relaying.bodies import MAX_ROUTED_BYTES, decode
from conveyor_gateway.routing import Route
from conveyor_gateway.watching.catalog import Service
from conveyor_protocol.tasks import TASKS

_NAMES: Final = sorted({name for each in ENDPOINTS for fields in each.required for name in fields})
_ABSENT: Final = msgspec.Raw(b"")
# Any JSON object. Of its members, which are checked to be valid JSON, those that some path requires are kept.
_Object = msgspec.defstruct("_Object", [(name, msgspec.Raw, _ABSENT) for name in _NAMES])
_OBJECT: Final = msgspec.json.Decoder(_Object)
_BEGINS_OBJECT: Final = re.compile(rb"\s*+\{")


def check_may_wake(service: Service, route: Route, json_body: bytes | None) -> None:
    """Raise GatewayError if the service's engines could not answer. json_body: None if the body is not JSON."""
    endpoint = find_endpoint(route.path)
    assert endpoint is not None, "the route of a request for engines has an endpoint"
    if not endpoint.suits(service.task):
        message = (
            f"{route.path} is for a model that {endpoint.models}; the task of this service's model is {service.task}"
        )
        raise GatewayError(message, Code.WRONG_TASK)
    if json_body is None:
        return
    body = _read_object(json_body)
    if body is not None and service.task in TASKS:
        _check_required(endpoint, body)


def _check_required(endpoint: Endpoint, body: msgspec.Struct) -> None:
    """Raise GatewayError if the body lacks fields that Conveyor's engines require on this path."""
    present = {name for name in _NAMES if getattr(body, name) != _ABSENT}
    if endpoint.required and not any(fields <= present for fields in endpoint.required):
        fields = " or ".join(" and ".join(f"`{name}`" for name in entry.split()) for entry in endpoint.fields)
        lacking = min(endpoint.required[0] - present)
        raise GatewayError(f"the body of {endpoint.path} must have {fields}", Code.INVALID_VALUE, lacking)


def _read_object(body: bytes) -> msgspec.Struct | None:
    """Return the JSON object; None for a body of more than MAX_ROUTED_BYTES, of which only the beginning is read.

    Raises GatewayError.
    """
    try:
        if len(body) <= MAX_ROUTED_BYTES:
            return decode(_OBJECT, body)
        is_object = _BEGINS_OBJECT.match(body, 0, MAX_ROUTED_BYTES) is not None
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    if not is_object:
        raise GatewayError("the body must be a JSON object", Code.INVALID_JSON)
    return None
