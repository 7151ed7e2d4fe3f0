"""The connections to engines that `session` and `fetching` open, with limits on buffers, interim answers and chunks.

An engine runs its owner's image, so whatever it sends must not delay the answers of other engines.
"""

import asyncio
import functools
import socket
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

from conveyor_http.framing import FREE_CHUNKS, Framing

# Limit of the bytes that wait for a client slower than its engine; also the size of the socket's receive buffer.
BUFFER_BYTES: Final = 16 << 10
# aiohttp stops reading when it has parsed 2 x PARSED_BYTES bytes, or PARSED_BYTES / 16 chunks.
PARSED_BYTES: Final = 4 << 10
_TCP_OPTIONS: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}  # last: ms
_MAX_INTERIM: Final = 8  # interim answers (status below 200) that may precede the final one
_HEAD_PIECE_BYTES: Final = 1 << 10
_TINY_CHUNKS_A_SECOND: Final = 100  # chunks that may be smaller than others, because an event of a stream may be short
_IDLE_SECONDS: Final = 60.0  # below the engine's 75 s, so that the gateway closes idle connections first


class _Connection(ResponseHandler):
    """aiohttp's handler with limits on interim answers and on tiny chunks. aiohttp itself would read any number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._framing: Framing | None = None  # of a chunked answer that is arriving
        self._answered_at = 0.0
        self._awaits_head = True
        self._num_interim = 0

    def set_response_params(self, **params: Any) -> None:
        self._awaits_head, self._num_interim, self._framing = True, 0, None
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        while self._awaits_head and len(data) > _HEAD_PIECE_BYTES:
            super().data_received(data[:_HEAD_PIECE_BYTES])
            data = data[_HEAD_PIECE_BYTES:]
        framing = self._framing  # None if the head ends in this piece
        super().data_received(data)
        if framing is not None and framing.feed(len(data)):
            self._check_framing(framing)

    def _check_framing(self, framing: Framing) -> None:
        if self._reading_paused:
            return
        free_chunks = FREE_CHUNKS + int(_TINY_CHUNKS_A_SECOND * (self._loop.time() - self._answered_at))
        if framing.is_excessive(free_chunks):
            why = "the engine sent its response in too many tiny chunks"
            framing.body.set_exception(aiohttp.ClientPayloadError(why))
            self._break(why)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Count interim answers. aiohttp calls this with each parsed message."""
        self._awaits_head = data[0].code < 200
        self._num_interim += self._awaits_head
        message, body = data
        if message.chunked and not self._awaits_head:
            self._framing, self._answered_at = Framing(body), self._loop.time()
        if self._num_interim <= _MAX_INTERIM:
            super().feed_data(data, size)
        else:
            self._break("the engine sent too many interim (1xx) responses")

    def _break(self, why: str) -> None:
        if self.transport is not None:
            self.set_exception(aiohttp.ServerDisconnectedError(why))
            self.transport.abort()


class Connector(aiohttp.TCPConnector):
    """Opens connections without a limit on their number, because its users bound it."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_open_socket)
        self._factory = functools.partial[ResponseHandler](self._make_connection)

    def _make_connection(self) -> ResponseHandler:
        return _Connection(self._loop)


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Open a socket that detects within half a minute that the engine's node is gone.

    While nothing is sent, keep-alive probes detect the loss. While sent data is unacknowledged, Linux sends no probes,
    and TCP_USER_TIMEOUT detects the loss.
    """
    opened = socket.socket(*address[:3])
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS.items():
        if hasattr(socket, option):  # macOS lacks some
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return opened
