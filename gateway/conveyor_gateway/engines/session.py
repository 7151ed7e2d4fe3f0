"""Sends HTTP requests to all engines: clients' requests, queries for places, and queries for the used tokens.

Used by `relaying`, and by `admission` for places. Bodies are forwarded unchanged: this module does not read JSON,
tokens or events. `send` returns an answer after its first byte. Until then the request can be sent to another engine.
An answer that is not a stream is first collected, if it is small and there is room. So if the engine fails meanwhile,
the client gets a 502 instead of half a document.
"""

import errno
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

import aiohttp

from conveyor_gateway.capacity.ledger import Hold
from conveyor_gateway.engines.connection import PARSED_BYTES
from conveyor_gateway.engines.exchange import (
    EngineAnswer,
    EngineBroke,
    EngineFull,
    EngineHasNoPlace,
    EngineIsBehind,
    EngineLost,
    EngineRefused,
    EngineRequest,
    EngineSilent,
    EngineUnreachable,
    describe,
)
from conveyor_gateway.engines.headers import find_host
from conveyor_gateway.engines.transport import PLAIN, Transport
from conveyor_gateway.usage import MAX_REPORT_BYTES, parse_usage
from conveyor_http.reading import AnswerTooLong, NoMemory, read_answer
from conveyor_protocol.engine_pages import PLACE_PATH, USAGE_PATH
from conveyor_protocol.request_headers import (
    LEVEL_HEADER,
    NO_PLACE,
    PLACE_GRANTED,
    PLACE_HEADER,
    PLACE_IF_FREE,
    REQUEST_TIMEOUT_HEADER,
    UNKNOWN_MODEL_HEADER,
)
from conveyor_protocol.usage import UsedTokens

# Answers that are not event streams are collected up to this size. The rest is forwarded as it arrives.
MAX_COLLECTED_BYTES: Final = 1 << 20
_UNKNOWN, _FULL, _LOST, _REFUSED = 404, 429, 502, 503
KEPT_BACK: Final = frozenset((_FULL, _LOST, _REFUSED))  # statuses of engines that are not forwarded to clients
_CONNECT_SECONDS: Final = 3.0  # to connect; `_post` lowers it to half of the request's remaining time
_MIN_CONNECT_SECONDS: Final = 0.25
# Limit for what an engine answers at once: the tokens of an ended request, and the return of a place.
_ANSWER_SECONDS: Final = 5.0
_PIECE_BYTES: Final = 256 << 10  # of a request's body
# Errors of a connection whose other end acknowledges nothing. If only a process ends, its node closes the connection.
_SILENT: Final = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH))


class EngineSession:
    """Connections to all engines."""

    def __init__(self, transport: Transport = PLAIN) -> None:
        self._transport = transport
        self._session = transport.open_session(
            connector_owner=True,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            read_bufsize=PARSED_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def request_place(self, hold: Hold, address: str, level: int) -> bool:
        """Return True once the engine at `address` (`host:port`) has reserved a place; False if the query fails.

        level: the level of the request that needs the place.
        """
        return await self._request_place(hold, "GET", address, {LEVEL_HEADER: str(level)})

    async def give_place_back(self, hold: Hold, address: str) -> None:
        """Release a place that the engine has reserved and that no request needs."""
        await self._request_place(hold, "DELETE", address, {}, _ANSWER_SECONDS)

    async def _request_place(
        self, hold: Hold, method: str, address: str, headers: dict[str, str], seconds: float | None = None
    ) -> bool:
        hold.check()
        service, url = hold.owner.service, self._transport.build_url(address, PLACE_PATH)
        options = self._transport.build_options(service, address)
        try:
            response = await self._session.request(
                method,
                url,
                headers={"Host": find_host(service, address), **headers},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS),
                **options,
            )
        except (aiohttp.ClientError, OSError):
            return False
        response.release()
        return response.status == 204

    async def fetch_usage(self, hold: Hold, address: str, key: str) -> UsedTokens | None:
        """Return the usage of the request with this key, or None if the engine does not report it."""
        hold.check()
        try:
            async with self._session.get(
                self._transport.build_url(address, f"{USAGE_PATH}?key={key}"),
                headers={"Host": find_host(hold.owner.service, address)},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS),
                **self._transport.build_options(hold.owner.service, address),
            ) as response:
                return parse_usage(bytes(await read_answer(response.content, MAX_REPORT_BYTES, hold.reserve)))
        except (AnswerTooLong, NoMemory, aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def send(
        self, address: str, request: EngineRequest, remaining_seconds: float, is_granted: bool = False, level: int = 0
    ) -> EngineAnswer:
        """Send the request to the engine at `address` (`host:port`) and return its answer after the first byte.

        An answer that is not a stream is returned whole if it is small enough. `is_granted`: the engine has reserved a
        place for the request. The engine uses `level` as the request's priority, whatever the body says. Raises
        EngineRefused (one of its subclasses, or itself), EngineLost and EngineBroke. After connecting,
        there is no time limit. The caller may cancel this call, which aborts the request at the engine.
        """
        request.hold.check()
        request.headers[REQUEST_TIMEOUT_HEADER] = f"{max(remaining_seconds, 0.001):.3f}"
        request.headers[LEVEL_HEADER] = str(level)
        request.headers["Host"] = find_host(request.hold.owner.service, address)
        request.headers[PLACE_HEADER] = PLACE_GRANTED if is_granted else PLACE_IF_FREE
        response = await self._post(address, request, remaining_seconds)
        held_bytes = request.hold.size_bytes
        try:
            return await _receive(response, request)
        except BaseException:
            response.close()
            request.hold.shrink(held_bytes)
            raise

    async def _post(self, address: str, request: EngineRequest, remaining_seconds: float) -> aiohttp.ClientResponse:
        connect_seconds = max(_MIN_CONNECT_SECONDS, min(_CONNECT_SECONDS, remaining_seconds / 2))
        try:
            return await self._session.request(
                "POST",
                self._transport.build_url(address, request.path),
                headers=request.headers,
                data=_payload(request),
                allow_redirects=False,
                timeout=_limit_connecting(connect_seconds),
                **self._transport.build_options(request.hold.owner.service, address),
            )
        except aiohttp.ConnectionTimeoutError as error:
            had_its_time = connect_seconds >= _CONNECT_SECONDS
            raise (EngineUnreachable if had_its_time else EngineRefused)(describe(error)) from error
        except aiohttp.ClientConnectorError as error:
            raise EngineRefused(describe(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            is_silent = isinstance(error, OSError) and error.errno in _SILENT
            raise (EngineSilent if is_silent else EngineLost)(describe(error)) from error


@lru_cache(1)  # almost all requests have the same limit
def _limit_connecting(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=seconds)


async def _receive(response: aiohttp.ClientResponse, request: EngineRequest) -> EngineAnswer:
    try:
        if response.status in (_FULL, _REFUSED):
            # The body is not read. If it came with the headers, the connection stays open.
            raise _find_refusal(response)(f"the engine responded {response.status}")
        unknown_model = response.headers.get(UNKNOWN_MODEL_HEADER)
        if response.status == _UNKNOWN and unknown_model and request.is_coming(unquote(unknown_model)):
            raise EngineIsBehind("the engine does not serve the model yet")
        if response.status == _LOST or not 200 <= response.status < 600:
            raise EngineLost(f"the engine responded {response.status}")
        answer = EngineAnswer(response)
        if answer.is_event_stream:
            answer.first = await answer.read_piece()
        else:
            answer.set_collected(*await _collect(response.content, request.hold))
        return answer
    except (aiohttp.ClientError, OSError) as error:
        raise EngineLost(describe(error)) from error


def _find_refusal(response: aiohttp.ClientResponse) -> type[EngineRefused]:
    if response.status != _FULL:
        return EngineRefused
    return EngineHasNoPlace if response.headers.get(PLACE_HEADER) == NO_PLACE else EngineFull


async def _collect(content: aiohttp.StreamReader, hold: Hold) -> tuple[bytes, bool]:
    """Return the body up to the limits of size and memory, and whether that is the whole body."""
    collected = bytearray()
    while len(collected) < MAX_COLLECTED_BYTES:
        try:
            piece = await content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise (EngineBroke if collected else EngineLost)(describe(error)) from error
        if not piece:
            return bytes(collected), True
        collected += piece
        if not hold.reserve(len(piece)):
            break
    return bytes(collected), False


def _payload(request: EngineRequest) -> bytes | AsyncIterator[bytes]:
    """Return the body to send. A large body is sent in pieces, so that other requests are served in between."""
    if len(request.body) <= _PIECE_BYTES:
        return request.body
    request.headers["Content-Length"] = str(len(request.body))
    return _pieces(request)


async def _pieces(request: EngineRequest) -> AsyncIterator[bytes]:
    for start in range(0, len(request.body), _PIECE_BYTES):
        piece = request.body[start : start + _PIECE_BYTES]
        if not piece:
            raise ConnectionAbortedError("the engine responded before it had received the whole request")
        yield piece
