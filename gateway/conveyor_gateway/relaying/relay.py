"""Forwards an engine's answer to the client as it arrives. The client can see whether an answer breaks off.

Called by `request_life` after the answer's first byte. From then on no other engine can be tried.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from aiohttp.web import BaseRequest, Response, StreamResponse

from conveyor_gateway.engines.connection import BUFFER_BYTES
from conveyor_gateway.engines.exchange import EngineAnswer, EngineBroke, ends_event
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.held_request import HeldRequest
from conveyor_gateway.recording.record import Record
from conveyor_gateway.responses import build_error_event

# The engine ends an overdue answer with an error. If the engine does not, the gateway does, this long after the
# deadline.
GRACE_SECONDS: Final = 3.0
_LAST_WORDS_SECONDS: Final = 1.0
# A write costs the same for one byte as for thousands. If small pieces arrive more often than every `_SMALL_SECONDS`,
# for longer than `_BURST_SECONDS`, they are joined and sent a few milliseconds later. Large pieces may arrive every
# `_LARGE_SECONDS`.
_SMALL_SECONDS: Final = 1 / 200
_LARGE_SECONDS: Final = 1 / 2000
_BURST_SECONDS: Final = 0.25
_EVENT_END: Final = b"\n\n"


class _Pace:
    """Limits how fast the pieces of one answer are read."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()

    async def wait(self, num_bytes: int) -> None:
        """Wait until the next piece may be read, after a piece of `num_bytes`."""
        now = self._loop.time()
        seconds = _SMALL_SECONDS if num_bytes < BUFFER_BYTES else _LARGE_SECONDS
        self._due = max(self._due, now - _BURST_SECONDS) + seconds
        if self._due > now:
            await asyncio.sleep(self._due - now)


@dataclass(slots=True)
class Relay:
    """Forwards one answer to one client. A stream ends soon after `deadline`, on the loop's clock.

    If the client does not read, its connection (`conveyor_http.connection`) is closed after a while, which ends the
    answer. Without `keep_alive` the answer announces that the connection will be closed.
    """

    request: BaseRequest
    answer: EngineAnswer
    record: Record
    deadline: float
    held: HeldRequest
    keep_alive: bool
    _tail: bytes = b""

    async def send_whole(self) -> StreamResponse:
        """Send headers and body in one write."""
        answer = self.answer
        response = Response(status=answer.status, headers=answer.headers, body=answer.first)
        try:
            await self._send_headers(response)
            await response.write_eof()
            self.record.sent_bytes = len(answer.first)
        except ConnectionError:
            self.record.set_client_gone()
        return response

    async def send_stream(self, begun: StreamResponse | None = None) -> StreamResponse:
        """Send the answer piece by piece. `begun`: a stream that has already begun and is continued."""
        response = begun or StreamResponse(status=self.answer.status, headers=self.answer.headers)
        try:
            await self._pass_on(response)
        except ConnectionError:
            self.record.set_client_gone()
        except EngineBroke as error:
            failure = GatewayError(f"the engine failed during its response: {error}", Code.ENGINE_BROKE)
            await self._end_with_error(response, failure)
        except TimeoutError:
            await self._end_with_error(
                response, GatewayError("the request's deadline passed during its response", Code.DEADLINE_EXCEEDED)
            )
        except asyncio.CancelledError:
            if self.held.error is None:
                raise
            self.held.clear()
            response.force_close()
            await self._end_with_error(response, self.held.error)
        return response

    async def _send_headers(self, response: StreamResponse) -> None:
        if not self.keep_alive:
            response.force_close()
        await response.prepare(self.request)

    async def _pass_on(self, response: StreamResponse) -> None:
        pace, metered = _Pace(), self.record.metered if self.answer.is_event_stream else None
        async with asyncio.timeout_at(self.deadline + GRACE_SECONDS):
            if not response.prepared:
                await self._send_headers(response)
            chunk = self.answer.first
            while chunk:
                await response.write(chunk)
                if self.request.protocol.writing_paused:
                    await self.request.writer.drain()
                self.record.sent_bytes += len(chunk)
                if metered is not None:
                    metered.count_tokens(chunk.count(_EVENT_END))
                self._tail = chunk if len(chunk) >= 4 else (self._tail + chunk)[-4:]
                await pace.wait(len(chunk))
                chunk = await self.answer.read()
            await response.write_eof()

    async def _end_with_error(self, response: StreamResponse, failure: GatewayError) -> None:
        """End an event stream with an event that has the reason. For any other answer, abort the connection."""
        self.record.reason = failure.code
        if self.answer.is_event_stream:
            glue = b"" if not self._tail or ends_event(self._tail) else b"\n\n"
            try:
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await response.write(glue + build_error_event(failure, self.record.path))
                    await response.write_eof()
                    return
            except (TimeoutError, ConnectionError):
                pass
        self._abort()

    def _abort(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()
