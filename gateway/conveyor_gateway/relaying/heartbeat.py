"""Keeps a stream's connection while its request waits for a start: a comment of an event stream, now and then.

Used by `request_life` for services that may go to zero: proxies end connections on which nothing comes for a minute or
so. After the first comment the answer is a stream with status 200, so what goes wrong is told as in a stream that
breaks: by an event.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
from aiohttp.web import BaseRequest, StreamResponse

from conveyor_gateway.answers import build_error_event
from conveyor_gateway.engines.client import Answer
from conveyor_gateway.engines.headers import EVENT_STREAM_HEADERS
from conveyor_gateway.errors import Code, EngineFailed, GatewayError
from conveyor_gateway.relaying.bodies import asks_for_stream
from conveyor_protocol.request_headers import REQUEST_ID_HEADER

COMMENT: Final = b": waiting\n\n"


class _Refusal(msgspec.Struct):
    error: dict[str, Any] | str


class Heartbeat:
    """Of one request; `response` is the stream, once it has begun."""

    def __init__(
        self, request: BaseRequest, request_id: str, period_seconds: float, is_draining: Callable[[], bool]
    ) -> None:
        self._request = request
        self._request_id = request_id
        self._period_seconds = period_seconds
        self._is_draining = is_draining
        self.response: StreamResponse | None = None

    @contextlib.asynccontextmanager
    async def beating(self, body: bytes) -> AsyncIterator[None]:
        """While the request with this body waits."""
        task = asyncio.create_task(self._beat(body))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _beat(self, body: bytes) -> None:
        await asyncio.sleep(self._period_seconds)
        if not asks_for_stream(body):
            return
        response = StreamResponse(headers=EVENT_STREAM_HEADERS | {REQUEST_ID_HEADER: self._request_id})
        if self._is_draining():
            response.force_close()
        with contextlib.suppress(ConnectionError):  # whoever waits for an answer hears of it too
            await response.prepare(self._request)
            self.response = response
            while True:
                await response.write(COMMENT)
                await asyncio.sleep(self._period_seconds)

    async def end(self, failure: GatewayError) -> StreamResponse:
        """The stream that has begun, ended by an error."""
        return await self._end_with(build_error_event(failure))

    async def end_with(self, answer: Answer) -> StreamResponse:
        """The stream that has begun, ended by an engine's answer that is none: an error in OpenAI's form, as it is."""
        try:
            said = msgspec.json.decode(answer.first, type=_Refusal)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            words = f"the engine answered {answer.status}, neither with a stream nor with an error"
            return await self.end(EngineFailed(words, Code.ENGINE_BROKE))
        return await self._end_with(b"data: " + msgspec.json.encode(said) + b"\n\n")

    async def _end_with(self, event: bytes) -> StreamResponse:
        assert self.response is not None, "it has begun"
        with contextlib.suppress(ConnectionError):
            await self.response.write(event)
            await self.response.write_eof()
        return self.response
