"""The connections to engines that `session` opens, with limits on buffers and on interim answers.

An engine runs its owner's image, so whatever it sends must not delay the answers of other engines.
"""

import asyncio
import functools
import socket
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler

# Limit of the bytes that wait for a client slower than its engine; also the size of the socket's receive buffer.
BUFFER_BYTES: Final = 16 << 10
# aiohttp stops reading when it has parsed 2 x PARSED_BYTES bytes, or PARSED_BYTES / 16 chunks.
PARSED_BYTES: Final = 4 << 10
_MAX_INTERIM: Final = 8  # interim answers (status below 200) that may precede the final one
_HEAD_PIECE_BYTES: Final = 1 << 10
_IDLE_SECONDS: Final = 60.0  # below the engine's 75 s, so that the gateway closes idle connections first


class _Connection(ResponseHandler):
    """aiohttp's handler with a limit on interim answers. aiohttp itself would read any number of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._awaits_head = True
        self._num_interim = 0

    def set_response_params(self, **params: Any) -> None:
        self._awaits_head, self._num_interim = True, 0
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        while self._awaits_head and len(data) > _HEAD_PIECE_BYTES:
            super().data_received(data[:_HEAD_PIECE_BYTES])
            data = data[_HEAD_PIECE_BYTES:]
        super().data_received(data)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Count interim answers. aiohttp calls this with each parsed message."""
        self._awaits_head = data[0].code < 200
        self._num_interim += self._awaits_head
        if self._num_interim <= _MAX_INTERIM:
            super().feed_data(data, size)
        elif self.transport is not None:
            self.set_exception(aiohttp.ServerDisconnectedError("the engine sent too many interim (1xx) responses"))
            self.transport.abort()


class Connector(aiohttp.TCPConnector):
    """Opens connections without a limit on their number, because the place limits of `admission` already bound it."""

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
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)  # milliseconds
    return opened
