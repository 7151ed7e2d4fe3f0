"""Bytes to an engine and back: requests in their turn, answers as they come.

Called by `relaying` with a request's bytes and an engine's address. Bodies pass as they are read: nothing here knows
JSON, tokens or events. An answer is handed over when its first byte is there, so that until then the request can go
to another engine; an answer that is no stream is handed over whole, if it is small and there is memory for it, so that
a broken one becomes a 502 instead of half a document.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from conveyor_gateway.admission.memory import Holding
from conveyor_gateway.engines.connection import PARSED_BYTES, Connector
from conveyor_gateway.engines.headers import EVENT_STREAM, build_answer_headers, choose_content_type
from conveyor_gateway.usage import MAX_REPORT_BYTES, Usage, parse_usage, split_report
from conveyor_http.reading import AnswerTooLong, read_answer
from conveyor_protocol.request_headers import (
    NO_PLACE,
    PLACE_GRANTED,
    PLACE_HEADER,
    PLACE_IF_FREE,
    REQUEST_TIMEOUT_HEADER,
    USAGE_HEADER,
    USAGE_MARK,
    USAGE_PATH,
)

# Answers that are no event stream are collected up to this size, then passed on as they come.
MAX_COLLECTED_BYTES: Final = 1 << 20
_FULL, _LOST, _REFUSED = 429, 502, 503
KEPT_BACK: Final = frozenset((_FULL, _LOST, _REFUSED))  # statuses of engines' answers that no client sees
_CONNECT_SECONDS: Final = 3.0  # or half of what the request has left: the rest is for another engine
_MIN_CONNECT_SECONDS: Final = 0.25
_USAGE_SECONDS: Final = 5.0  # the engine answers once the request has ended
_PIECE_BYTES: Final = 256 << 10  # of a request


class EngineRefused(Exception):
    """The engine did not take the request (no connection, or 503): another one may, without limit."""


class EngineUnreachable(EngineRefused):
    """The engine took no connection in time; trying it again may cost as much time."""


class EngineFull(EngineRefused):
    """The engine had no room for this request (429); it may have room for one that asks for fewer choices."""


class EngineHasNoPlace(EngineRefused):
    """All places of the engine are taken (429 with a header): it grants one to who asks."""


class EngineLost(Exception):
    """The engine ended before the answer's first byte (the connection broke, or 502): one more engine may be tried."""


class EngineBroke(Exception):
    """The connection broke in the middle of the answer: no other engine may be tried."""


@dataclass(slots=True)
class EngineRequest:
    """What goes to whichever engine takes the request."""

    path: str  # without the query: no parameter of one is on a list of what passes
    headers: CIMultiDict[str]
    body: bytes
    holding: Holding  # where the body is counted, and what is collected of the answer

    def release_body(self) -> None:
        """Once an answer has begun."""
        self.holding.shrink(self.holding.size_bytes - len(self.body))
        self.body = b""


class Answer:
    """An engine's answer of which `first` has been read. Close it, whatever happens.

    `usage` is what the engine says that the request has used; while it `awaits_report`, that is not the last word.
    """

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, is_whole: bool) -> None:
        self._response = response
        self.status = response.status
        self.first = first
        self.is_whole = is_whole
        self.is_event_stream = _is_event_stream(response)
        self.usage = parse_usage(response.headers.get(USAGE_HEADER))  # a stream's until its end: so far
        self.awaits_report = self.is_event_stream and self.usage is not None
        self._is_over = is_whole
        self.headers = build_answer_headers(response.headers)
        if is_whole:
            self.headers["Content-Length"] = str(len(first))

    async def read(self) -> bytes:
        """What comes next after `first`, as it is read; empty at the end. Raises EngineBroke."""
        try:
            return await self.read_piece()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineBroke(_describe(error)) from error

    async def read_piece(self) -> bytes:
        """As `read`, but raises what aiohttp raises."""
        if self._is_over:
            return b""
        piece = await self._response.content.readany()
        if not self.awaits_report or USAGE_MARK not in piece:
            return piece
        events, report = await split_report(piece, self._response.content)
        self._is_over, self.awaits_report = True, False
        self.usage = parse_usage(report) or self.usage
        return events

    def close(self) -> None:
        """Ends the exchange; before the answer's end it breaks the connection, which aborts the request there."""
        self._response.close()


class EngineClient:
    """Connections to all engines."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=Connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            read_bufsize=PARSED_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask_for_place(self, address: str) -> bool:
        """See `Granting`."""
        return await self._request_place("GET", address)

    async def give_place_back(self, address: str) -> None:
        """See `Granting`."""
        await self._request_place("DELETE", address)

    async def _request_place(self, method: str, address: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        try:
            response = await self._session.request(
                method, f"http://{address}/place", allow_redirects=False, timeout=timeout
            )
        except (aiohttp.ClientError, OSError):
            return False
        response.release()
        return response.status == 204

    async def fetch_usage(self, address: str, key: str) -> Usage | None:
        """What the request with this key has used at the engine, if it says so."""
        try:
            async with self._session.get(
                URL(f"http://{address}{USAGE_PATH}?key={key}", encoded=True),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=_USAGE_SECONDS),
            ) as response:
                return parse_usage(bytes(await read_answer(response.content, MAX_REPORT_BYTES)))
        except (AnswerTooLong, aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def ask(
        self, address: str, request: EngineRequest, remaining_seconds: float, is_granted: bool = False
    ) -> Answer:
        """The answer of the engine at `address` (`host:port`), with its first byte; of what is no stream, all of it.

        `is_granted`: the engine has kept a place for the request.
        Raises EngineRefused (EngineUnreachable, EngineFull, EngineHasNoPlace), EngineLost and EngineBroke.
        Waits as long as the caller lets it; cancelling it aborts the request at the engine.
        """
        request.headers[REQUEST_TIMEOUT_HEADER] = f"{max(remaining_seconds, 0.001):.3f}"
        request.headers[PLACE_HEADER] = PLACE_GRANTED if is_granted else PLACE_IF_FREE
        connect_seconds = max(_MIN_CONNECT_SECONDS, min(_CONNECT_SECONDS, remaining_seconds / 2))
        try:
            response = await self._session.request(
                "POST",
                URL(f"http://{address}{request.path}", encoded=True),
                headers=request.headers,
                data=_payload(request),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds),
            )
        except aiohttp.ConnectionTimeoutError as error:
            had_its_time = connect_seconds >= _CONNECT_SECONDS
            raise (EngineUnreachable if had_its_time else EngineRefused)(_describe(error)) from error
        except aiohttp.ClientConnectorError as error:
            raise EngineRefused(_describe(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(_describe(error)) from error
        held_bytes = request.holding.size_bytes
        try:
            return await _begin(response, request.holding)
        except BaseException:
            response.close()
            request.holding.shrink(held_bytes)
            raise


async def _begin(response: aiohttp.ClientResponse, holding: Holding) -> Answer:
    try:
        if response.status in (_FULL, _REFUSED):
            # The body is not read. If it came with the headers, the connection stays open.
            raise _find_refusal(response)(f"it answered {response.status}")
        if response.status == _LOST or not 200 <= response.status < 600:
            raise EngineLost(f"it answered {response.status}")
        if _is_event_stream(response):
            answer = Answer(response, b"", is_whole=False)
            answer.first = await answer.read_piece()
            return answer
        return Answer(response, *await _collect(response.content, holding))
    except (aiohttp.ClientError, OSError) as error:
        raise EngineLost(_describe(error)) from error


def _find_refusal(response: aiohttp.ClientResponse) -> type[EngineRefused]:
    if response.status != _FULL:
        return EngineRefused
    return EngineHasNoPlace if response.headers.get(PLACE_HEADER) == NO_PLACE else EngineFull


async def _collect(content: aiohttp.StreamReader, holding: Holding) -> tuple[bytes, bool]:
    """The body, as far as the limit and the memory let it, and whether that is all."""
    collected = bytearray()
    while len(collected) < MAX_COLLECTED_BYTES:
        try:
            piece = await content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise (EngineBroke if collected else EngineLost)(_describe(error)) from error
        if not piece:
            return bytes(collected), True
        collected += piece
        if not holding.take(len(piece)):
            break
    return bytes(collected), False


def _payload(request: EngineRequest) -> bytes | AsyncIterator[bytes]:
    """A large body goes in pieces, so that other requests are served in between."""
    if len(request.body) <= _PIECE_BYTES:
        return request.body
    request.headers["Content-Length"] = str(len(request.body))
    return _pieces(request)


async def _pieces(request: EngineRequest) -> AsyncIterator[bytes]:
    for start in range(0, len(request.body), _PIECE_BYTES):
        piece = request.body[start : start + _PIECE_BYTES]
        if not piece:
            raise ConnectionAbortedError("the engine answered before it had the whole request, which is not kept")
        yield piece


def _is_event_stream(response: aiohttp.ClientResponse) -> bool:
    return choose_content_type(response.headers.get("Content-Type", "")) == EVENT_STREAM


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


def ends_event(tail: bytes) -> bool:
    """Whether an event stream whose last bytes are `tail` stands between two events."""
    return tail.endswith((b"\n\n", b"\r\r", b"\r\n\r\n"))
