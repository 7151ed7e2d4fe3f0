"""Keeps a stream's connection open while its request waits for an engine or its first byte, by sending empty lines.

Used by `request_life`, because proxies close connections that are silent for a minute. Readers of streams skip empty
lines, but some take a comment for an event (ADR 138). After the first of them the response is a stream with status 200,
so a later error is sent as its last event. Log and metrics have the status that the error would have had.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp.web import BaseRequest, StreamResponse

from conveyor_gateway.engines.exchange import EngineAnswer
from conveyor_gateway.engines.headers import EVENT_STREAM_HEADERS
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.recording.record import Record
from conveyor_gateway.relaying.bodies import requests_stream
from conveyor_gateway.responses import build_error_event, write_error_event
from conveyor_gateway.watching.readiness import Readiness
from conveyor_protocol.request_headers import REQUEST_ID_HEADER

BEAT: Final = b"\n\n"


class _Refusal(msgspec.Struct, omit_defaults=True):
    """An error in OpenAI's or Anthropic's format."""

    error: dict[str, Any] | str
    type: str | None = None  # only in Anthropic's format


@dataclass(slots=True)
class Heartbeat:
    """The heartbeat of one request: sends empty lines while the request waits, in an `async with` block.

    Nothing but a timer runs for a quick answer. `response` is the stream after it has started.
    """

    request: BaseRequest
    body: bytes
    record: Record
    period_seconds: float
    readiness: Readiness
    response: StreamResponse | None = None
    _timer: asyncio.TimerHandle | None = None
    _beats: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self.period_seconds:
            self._timer = asyncio.get_running_loop().call_later(self.period_seconds, self._begin)

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.wait((self._beats,))

    def _begin(self) -> None:
        if requests_stream(self.body):
            self._beats = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        response = StreamResponse(headers=EVENT_STREAM_HEADERS | {REQUEST_ID_HEADER: self.record.request_id})
        if self.readiness.draining:
            response.force_close()
        with contextlib.suppress(ConnectionError):  # if the client has left, aiohttp cancels the waiting task
            await response.prepare(self.request)
            self.response = response
            while True:
                await response.write(BEAT)
                await asyncio.sleep(self.period_seconds)

    async def end_with_error(self, failure: GatewayError) -> StreamResponse:
        """End the started stream with an error."""
        assert self.response is not None, "the stream has started"
        self.record.status, self.record.reason = failure.status, failure.code
        return await self._end_with_event(build_error_event(failure, self.record.path))

    async def end_with_answer(self, answer: EngineAnswer) -> StreamResponse:
        """End the started stream with an error event, because the engine's answer is not a stream.

        The event has the engine's own error if the answer contains one.
        """
        assert self.response is not None, "the stream has started"
        self.record.set_answered(answer.status)
        self.record.leave_engine(answer.usage)
        try:
            refusal = msgspec.to_builtins(msgspec.json.decode(answer.first, type=_Refusal))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            words = f"the engine responded {answer.status} with neither a stream nor an error"
            return await self.end_with_error(GatewayError(words, Code.ENGINE_BROKE))
        return await self._end_with_event(write_error_event(refusal, self.record.path))

    async def _end_with_event(self, event: bytes) -> StreamResponse:
        assert self.response is not None, "the stream has started"
        with contextlib.suppress(ConnectionError):
            await self.response.write(event)
            await self.response.write_eof()
        return self.response
