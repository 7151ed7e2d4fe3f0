"""A plain HTTP proxy for the API server that can lose events, end watches, and refuse requests."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web
from tests.connector import ApiServerConnector

from conveyor_http.server import open_port
from conveyor_process.listening import close_port
from e2e.cluster.api import read_kubeconfig


class ApiProxy:
    """Forwards all requests until a test changes this. Counts the requests of each kind, and the refused ones."""

    def __init__(self, kubeconfig: Path) -> None:
        self._server, self._tls = read_kubeconfig(kubeconfig)
        self.loses_events = False
        self.lost = b""  # the events that it has lost
        self.is_shut = False
        self.refused = 0
        self.ends_in_order = False
        self.lists: list[str] = []
        self.watches = 0
        self._endings: set[asyncio.Future[bytes | None]] = set()

    def end_watches(self, code: int | None = None) -> None:
        """Break off every watch, or end it as after its normal time (`ends_in_order`).

        With a code, an error event is sent first.
        """
        status = {"kind": "Status", "code": code, "reason": "Expired", "message": "too old resource version"}
        words = None if code is None else json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
        for ending in self._endings:
            ending.set_result(words)
        self._endings.clear()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Run the proxy. Yields its URL."""
        connector = ApiServerConnector(self._tls)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            runner = web.ServerRunner(web.Server(self._pass_on), shutdown_timeout=0.1)
            await runner.setup()
            accepting = open_port(runner, "127.0.0.1", 0)
            try:
                yield f"http://127.0.0.1:{accepting.port}"
            finally:
                await close_port(accepting)
                await runner.cleanup()
        await connector.wait_closed()

    async def _pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.is_shut:
            self.refused += 1
            return web.Response(status=503, text="the API server is away")
        is_watch = "watch=true" in request.query_string
        if not is_watch:
            self.lists.append(request.path_qs)
        async with self._session.get(self._server + request.path_qs) as upstream:
            answer = web.StreamResponse(status=upstream.status, headers={"Content-Type": "application/json"})
            await answer.prepare(request)
            if is_watch:
                self.watches += 1
                await self._pass_events(upstream, answer)
                assert request.transport is not None
                if not self.ends_in_order:
                    request.transport.abort()
            else:
                await answer.write(await upstream.read())
        return answer

    async def _pass_events(self, upstream: aiohttp.ClientResponse, answer: web.StreamResponse) -> None:
        ending: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._endings.add(ending)

        async def pass_on() -> None:
            async for chunk in upstream.content.iter_any():
                if self.loses_events:
                    self.lost += chunk
                else:
                    for start in range(0, len(chunk), 100):  # lines arrive in pieces
                        await answer.write(chunk[start : start + 100])

        passing = asyncio.create_task(pass_on())
        try:
            await asyncio.wait((ending, passing), return_when=asyncio.FIRST_COMPLETED)
            if ending.done() and (words := ending.result()):
                await answer.write(words)
                await asyncio.sleep(0.05)
        finally:
            self._endings.discard(ending)
            passing.cancel()
