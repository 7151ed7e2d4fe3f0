"""Refuses some requests that no engine could answer, before they start a service from zero. Pure.

Called by `request_life` while the service sleeps. Otherwise its engines refuse such requests, with better messages.
"""

import re
from typing import Final

import msgspec

from conveyor_api.endpoints import find_endpoint
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.relaying.bodies import MAX_ROUTED_BYTES
from conveyor_gateway.routing import Route
from conveyor_gateway.watching.catalog import Service


class _AnyObject(msgspec.Struct):
    """Any JSON object. Its members are only checked to be valid JSON."""


_OBJECT: Final = msgspec.json.Decoder(_AnyObject)
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
    if json_body is not None and not _is_object(json_body):
        raise GatewayError("the body must be a JSON object", Code.INVALID_JSON)


def _is_object(body: bytes) -> bool:
    """Return whether a body is a JSON object. Of a body of more than MAX_ROUTED_BYTES, only the beginning is read."""
    if len(body) > MAX_ROUTED_BYTES:
        return _BEGINS_OBJECT.match(body, 0, MAX_ROUTED_BYTES) is not None
    try:
        _OBJECT.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
