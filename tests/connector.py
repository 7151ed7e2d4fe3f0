"""A connector for tests' proxies to the API server, whose connections can be closed before their event loop ends."""

import asyncio
import socket
import ssl

import aiohttp


class ApiServerConnector(aiohttp.TCPConnector):
    """Keeps its sockets, because closing TLS waits for the other side and takes longer than aiohttp's `close`."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._sockets: list[socket.socket] = []
        super().__init__(ssl=tls, limit=0, socket_factory=self._make_socket)

    def _make_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        self._sockets.append(made)
        return made

    async def wait_closed(self) -> None:
        """Wait until all connections are closed. Call it after closing the session that owns the connector."""
        async with asyncio.timeout(60):
            while any(made.fileno() != -1 for made in self._sockets):  # noqa: ASYNC110  a socket tells nobody
                await asyncio.sleep(0.01)
