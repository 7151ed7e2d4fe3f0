"""Request bodies: read whole, within limits, before a request is queued.

A body is kept until an engine has answered, because one that refuses it must not lose it. So one body has a limit
(413), a lower one if it has to be parsed to be routed; all together have one (503, kept by `memory`); and its arrival
has one (408). Called by `gateway`.
"""

import asyncio
import json
from typing import Any, Final

from aiohttp.web import BaseRequest, RequestPayloadError

from conveyor_gateway.errors import EncodedBody, InvalidRequest, RequestTooLarge, RequestTooSlow
from conveyor_gateway.memory import Holding, build_memory_full

# On the root the model in the body names the service. Parsing 1 MiB stops all other requests for 30 ms at most.
MAX_ROUTED_BYTES: Final = 1 << 20


class BodyReader:
    """Knows the limits of one body."""

    def __init__(self, max_request_bytes: int, timeout_seconds: float) -> None:
        self._max_request_bytes = max_request_bytes
        self._timeout_seconds = timeout_seconds

    async def read(self, request: BaseRequest, holding: Holding, is_routed: bool) -> bytes:
        """The body as it was sent, counted in `holding`; `is_routed`: the body names the service.

        Raises an error of the gateway's tree if it is refused.
        """
        max_bytes = min(MAX_ROUTED_BYTES, self._max_request_bytes) if is_routed else self._max_request_bytes
        if (request.content_length or 0) > max_bytes:
            raise self._too_large(max_bytes)
        _invite(request)
        received = bytearray()  # no list of pieces: they may be of one byte each
        # Most bodies are there with their headers: no timer for those.
        limit_seconds = None if request.content.is_eof() else self._timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                while piece := await request.content.readany():
                    if not holding.take(len(piece)):
                        raise build_memory_full()
                    if holding.size_bytes > max_bytes:
                        raise self._too_large(max_bytes)
                    received += piece
        except RequestPayloadError as error:
            raise InvalidRequest(f"the body cannot be read: {error}", "malformed_body") from error
        except TimeoutError:
            raise RequestTooSlow(
                f"the body did not arrive within {self._timeout_seconds:g} s", "body_too_slow"
            ) from None
        return bytes(received)

    def _too_large(self, max_bytes: int) -> RequestTooLarge:
        elsewhere = ""
        if max_bytes < self._max_request_bytes:
            elsewhere = f"; at /<namespace>/<name>/v1/... it may have {self._max_request_bytes}"
        return RequestTooLarge(f"the body is longer than {max_bytes} bytes{elsewhere}", "request_too_large")


def _invite(request: BaseRequest) -> None:
    """Answers `Expect: 100-continue`: without it curl waits a second before it sends a body above 1 MiB."""
    expected = request.headers.get("Expect", "").lower() == "100-continue"
    if expected and not request.content.is_eof() and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def parse_body(body: bytes, content_encoding: str | None) -> dict[str, Any]:
    """The JSON object in `body` with a string `model`, for requests that only the body routes.

    Raises InvalidRequest or EncodedBody.
    """
    if content_encoding not in (None, "", "identity"):
        raise EncodedBody(
            f"a body with Content-Encoding {content_encoding!r} cannot be routed by its model; "
            "send it uncompressed, or to /<namespace>/<name>/v1/...",
            "encoded_body",
        )
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is no JSON: {error}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", "invalid_json")
    if not isinstance(fields.get("model"), str):
        raise InvalidRequest("model must be a string: it says which service the request is for", "no_model", "model")
    return fields


def rename_model(fields: dict[str, Any], model: str) -> bytes:
    """The body with another model: a service does not know itself by the `namespace/name` that clients may write."""
    return json.dumps({**fields, "model": model}).encode()
