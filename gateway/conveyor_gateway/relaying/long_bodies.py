"""Finds `model` in JSON bodies that are too long to be parsed in one turn of the event loop. Pure.

Called by `request_life` for requests at the root. Only the first and the last MAX_ROUTED_BYTES are read. The engine
checks the whole body, so a body that is not JSON gets its error there.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.relaying.bodies import MAX_ROUTED_BYTES, names_model
from conveyor_gateway.relaying.forms import ModelField

_KEY: Final = b'"model"'
_MEMBER: Final = re.compile(rb'"model"\s*+:\s*+("(?:[^"\\]|\\.){0,512}")', re.DOTALL)
_PLACES_MAX: Final = 2  # at each end of a body; each costs as much as parsing MAX_ROUTED_BYTES


def find_long_model(body: bytes) -> ModelField:
    """Return the model of the JSON object in `body`, and its place without quotation marks. Raises GatewayError.

    A member belongs to the object itself, and not to one within it, if the members before it, or those from it on, are
    an object by themselves.
    """
    for at, is_last in _find_places(body):
        end = len(body) if is_last else MAX_ROUTED_BYTES
        if (member := _MEMBER.match(body, at, end)) is None:
            continue
        members = b"{" + body[at:] if is_last else body[: member.end()] + b"}"
        if names_model(members, member[1]):
            try:
                model = msgspec.json.decode(member[1], type=str)
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            return ModelField(model, member.start(1) + 1, member.end(1) - 1)
    message = f"a body above {MAX_ROUTED_BYTES} bytes must have model within this distance of its beginning or end"
    raise GatewayError(f"{message}, once and without escapes: it selects the service", Code.NO_MODEL, "model")


def _find_places(body: bytes) -> Iterator[tuple[int, bool]]:
    """Yield where the key is written, and whether the members from there on are short enough to be parsed."""
    at = len(body)
    for _ in range(_PLACES_MAX):
        at = body.rfind(_KEY, len(body) - MAX_ROUTED_BYTES, at)
        if at < 0:
            break
        yield at, True
    at = -1
    for _ in range(_PLACES_MAX):
        at = body.find(_KEY, at + 1, MAX_ROUTED_BYTES)
        if at < 0:
            break
        yield at, False
