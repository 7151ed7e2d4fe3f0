"""Connections of a test's own proxies to the API server, closed before their event loop ends."""

import asyncio
import socket
import ssl

import aiohttp


class ApiServerConnector(aiohttp.TCPConnector):
    """Knows its sockets: what closes TLS waits for the other side, and outlives aiohttp's own `close`."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._sockets: list[socket.socket] = []
        super().__init__(ssl=tls, limit=0, socket_factory=self._make_socket)

    def _make_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        self._sockets.append(made)
        return made

    async def wait_closed(self) -> None:
        """To be called after the session is closed, in whose hands the connector was."""
        async with asyncio.timeout(60):
            while any(made.fileno() != -1 for made in self._sockets):  # noqa: ASYNC110  a socket tells nobody
                await asyncio.sleep(0.01)
