"""Builds the gateway's own responses: JSON, and errors in the format that the path's clients expect.

Used by `listening`, `pages` and `relaying`. This module does not know queues or engines.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from aiohttp.web import BaseRequest, Response, StreamResponse

from conveyor_gateway.errors import Code, GatewayError
from conveyor_protocol.request_headers import REQUEST_ID_HEADER, choose_request_id

_OF_RESPONSES: Final = ("code", "message", "param")  # fields of the event `error` of OpenAI's Responses API


def find_request_id(request: BaseRequest) -> str:
    return choose_request_id(request.headers.get(REQUEST_ID_HEADER, ""))


def build_json(content: Any, request_id: str, status: int = 200) -> Response:
    """Build a JSON response. `content`: values that JSON supports, or a page (`conveyor_protocol.pages`)."""
    headers = {REQUEST_ID_HEADER: request_id, "Content-Type": "application/json"}
    return Response(status=status, headers=headers, body=json.dumps(content, default=msgspec.to_builtins).encode())


def build_error(error: GatewayError, request_id: str, path: str = "") -> Response:
    """Build an error response. If the gateway has no room for this client, the response closes the connection.

    A client that repeats a refused request at once then has to open a connection each time.
    """
    answer = build_json(error.to_json(path), request_id, error.status)
    answer.headers.update(error.headers)
    if error.code is Code.TOO_MANY_REQUESTS:
        answer.force_close()
    return answer


async def send_pieces(request: BaseRequest, content_type: str, pieces: Iterator[bytes]) -> StreamResponse:
    """Send a long page. Each piece is built when the client has read those before, in a turn of the loop of its own.

    Returns when the client has received the page or has left.
    """
    answer = StreamResponse(headers={REQUEST_ID_HEADER: find_request_id(request), "Content-Type": content_type})
    with contextlib.suppress(ConnectionError):
        await answer.prepare(request)
        for piece in () if request.method == "HEAD" else pieces:
            await answer.write(piece)
            if request.protocol.writing_paused:
                await request.writer.drain()
            await asyncio.sleep(0)  # lets the event loop serve other requests
        await answer.write_eof()
    return answer


def build_stopping() -> GatewayError:
    return GatewayError("the gateway is stopping; retry", Code.STOPPING)


def build_error_event(error: GatewayError, path: str) -> bytes:
    """Return the last event of a stream that fails. OpenAI's and Anthropic's clients raise it as an APIError."""
    return write_error_event(error.to_json(path), path)


def write_error_event(body: dict[str, Any], path: str) -> bytes:
    """Return the body of an error as an event. Clients of Anthropic's and of OpenAI's Responses API need its name."""
    if path.endswith("/v1/responses") and isinstance(error := body.get("error"), dict):
        body = {"type": "error", "sequence_number": 0, **{key: error.get(key) for key in _OF_RESPONSES}, **body}
    name = b"event: error\n" if body.get("type") == "error" else b""
    return name + b"data: " + json.dumps(body).encode() + b"\n\n"
