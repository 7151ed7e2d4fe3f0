"""One line of a job's input: a request in the format of OpenAI's Batch API. Pure.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "qwen", "messages": [...]}}
"""

import codecs
from dataclasses import dataclass
from typing import Final

import msgspec

from conveyor_api.endpoints import ENDPOINTS, EndpointKind

MAX_CUSTOM_ID: Final = 512  # characters
# The paths that take JSON. Paths with a limit of their own take forms with audio; those with a model take tensors.
_PATHS: Final = tuple(
    each.path for each in ENDPOINTS if each.kind is EndpointKind.ENGINE and not each.has_model and not each.max_bytes
)


class InvalidLine(ValueError):
    """The line is no request. The message says why."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a job. `body` is its JSON, as written in the file."""

    custom_id: str
    path: str
    body: bytes


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    stream: bool | None = None


_LINES: Final = msgspec.json.Decoder(_Line)
_BODIES: Final = msgspec.json.Decoder(_Body)


def parse_line(line: bytes) -> BatchRequest:
    """Return the request of a line. Raises InvalidLine."""
    if line.startswith(codecs.BOM_UTF8):
        raise InvalidLine("it begins with a byte order mark (BOM): save the file as UTF-8 without it")
    try:
        parsed = _LINES.decode(line)
        body = _BODIES.decode(parsed.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidLine(f"it is not a request in JSON: {error}") from None
    if not 1 <= len(parsed.custom_id) <= MAX_CUSTOM_ID:
        raise InvalidLine(f"custom_id must have 1 to {MAX_CUSTOM_ID} characters")
    if parsed.method != "POST":
        raise InvalidLine(f"method must be POST, not {parsed.method[:20]!r}")
    if parsed.url not in _PATHS:
        raise InvalidLine(f"url must be one of {', '.join(_PATHS)}, not {parsed.url[:100]!r}")
    if body.stream:
        raise InvalidLine("a job does not stream: leave out `stream`")
    return BatchRequest(parsed.custom_id, parsed.url, bytes(parsed.body))
