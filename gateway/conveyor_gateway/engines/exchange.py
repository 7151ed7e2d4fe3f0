"""One exchange with an engine: the request, the answer after its first byte, and the errors.

`relaying` builds the requests and reads the answers. `session` sends the requests and returns the answers.

EngineRefused            the engine did not accept the request (no connection or 503); any number of others may be tried
├── EngineUnreachable    it accepted no connection within the time-out; a second attempt would lose as much time
├── EngineFull           it had no room for this request (429); it may have room for one with fewer choices
├── EngineHasNoPlace     all its places are taken (429 with a header); it grants one on a query
└── EngineIsBehind       it does not serve a model that the service has now (404 with a header); newer engines do
EngineLost               it failed before the answer's first byte, or sent 502; one more engine may be tried
└── EngineSilent         its node stopped acknowledging: the node or its network is lost, so the request is no suspect
EngineBroke              it failed in the middle of the answer; no other engine may be tried
"""

from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict

from conveyor_gateway.capacity.ledger import Hold
from conveyor_gateway.engines.headers import EVENT_STREAM, build_answer_headers
from conveyor_gateway.usage import parse_usage, split_report
from conveyor_protocol.request_headers import USAGE_HEADER, USAGE_MARK


class EngineRefused(Exception):
    pass


class EngineUnreachable(EngineRefused):
    pass


class EngineFull(EngineRefused):
    pass


class EngineHasNoPlace(EngineRefused):
    pass


class EngineIsBehind(EngineRefused):
    pass


class EngineLost(Exception):
    pass


class EngineSilent(EngineLost):
    pass


class EngineBroke(Exception):
    pass


@dataclass(slots=True)
class EngineRequest:
    """The request that is sent to each engine that is tried."""

    path: str  # without a query: query parameters are not passed to engines
    headers: CIMultiDict[str]
    body: bytes
    hold: Hold  # with the bytes of the body, and of the collected part of the answer
    is_coming: Callable[[str], bool]  # whether a rollout brings engines that serve the model of this name

    def note_answer(self, is_whole: bool) -> None:
        """Drop the body, because the request is not sent again. A whole answer is about to be sent at once."""
        if not is_whole:
            self.hold.note_begun()
        self.hold.shrink(self.hold.size_bytes - len(self.body))
        self.body = b""


class EngineAnswer:
    """An engine's answer, from which `first` has already been read. The caller must close it in every case.

    `usage` is what the engine reports. While `awaits_report` is True, a newer report may follow.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.first = b""
        self.is_whole = False
        self.headers = build_answer_headers(response.headers)
        self.is_event_stream = self.headers["Content-Type"] == EVENT_STREAM
        self.usage = parse_usage(response.headers.get(USAGE_HEADER))  # for a stream, the usage so far
        self._has_trailer = self.is_event_stream and self.usage is not None
        self._is_over = False

    @property
    def awaits_report(self) -> bool:
        """Whether the stream has not ended, or the engine process had not ended the request at the last report."""
        return self._has_trailer or (self.usage is not None and not self.usage.is_final)

    def set_collected(self, first: bytes, is_whole: bool) -> None:
        """Set the collected part of an answer that is not a stream. `is_whole`: nothing follows."""
        self.first, self.is_whole, self._is_over = first, is_whole, is_whole
        if is_whole:
            self.headers["Content-Length"] = str(len(first))

    async def read(self) -> bytes:
        """Return the next piece after `first`, unchanged; b"" at the end. Raises EngineBroke."""
        try:
            return await self.read_piece()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineBroke(describe(error)) from error

    async def read_piece(self) -> bytes:
        """Read the next piece like `read`, but raise aiohttp's own errors."""
        if self._is_over:
            return b""
        piece = await self._response.content.readany()
        if not self._has_trailer or USAGE_MARK not in piece:
            return piece
        events, report = await split_report(piece, self._response.content)
        self._is_over, self._has_trailer = True, False
        self.usage = parse_usage(report) or self.usage
        return events

    def close(self) -> None:
        """End the exchange.

        Before the end of the answer this closes the connection, which aborts the engine's request.
        """
        self._response.close()


def ends_event(tail: bytes) -> bool:
    """Return whether an event stream whose last bytes are `tail` is between two events."""
    return tail.endswith((b"\n\n", b"\r\r", b"\r\n\r\n"))


def describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
