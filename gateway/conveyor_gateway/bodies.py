"""Request bodies: read whole, within limits, before a request is queued.

A body is kept until its request has ended, because an engine that refuses it must not lose it. So one body has a limit
(413), all together have one (503: the gateway would run out of memory), and its arrival has one (408).
Called by `gateway`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.web import BaseRequest, RequestPayloadError

from conveyor_gateway.errors import EncodedBody, InvalidRequest, RequestTooLarge, RequestTooSlow, Unavailable


class BodyReader:
    """Counts the bytes that all bodies take."""

    def __init__(self, max_request_bytes: int, max_held_bytes: int, timeout_seconds: float) -> None:
        self._max_request_bytes = max_request_bytes
        self._max_held_bytes = max_held_bytes
        self._timeout_seconds = timeout_seconds
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, request: BaseRequest) -> AsyncIterator[bytes]:
        """The body as it was sent, kept inside the `with`. Raises an error of the gateway's tree if it is refused."""
        pieces: list[bytes] = []
        try:
            await self._receive(request, pieces)
            yield b"".join(pieces)
        finally:
            self.held_bytes -= sum(map(len, pieces))

    async def _receive(self, request: BaseRequest, pieces: list[bytes]) -> None:
        if (request.content_length or 0) > self._max_request_bytes:
            raise self._too_large()
        _invite(request)
        size = 0
        # Most bodies are there with their headers: no timer for those.
        limit_seconds = None if request.content.is_eof() else self._timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                while piece := await request.content.readany():
                    pieces.append(piece)
                    self._hold(len(piece))
                    size += len(piece)
                    if size > self._max_request_bytes:
                        raise self._too_large()
        except RequestPayloadError as error:
            raise InvalidRequest(f"the body cannot be read: {error}", "malformed_body") from error
        except TimeoutError:
            raise RequestTooSlow(
                f"the body did not arrive within {self._timeout_seconds:g} s", "body_too_slow"
            ) from None

    def _hold(self, size: int) -> None:
        self.held_bytes += size
        if self.held_bytes > self._max_held_bytes:
            raise Unavailable(
                f"the gateway holds {self._max_held_bytes} bytes of requests and takes no more; try again later",
                "gateway_memory_full",
            )

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the body is longer than {self._max_request_bytes} bytes", "request_too_large")


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
