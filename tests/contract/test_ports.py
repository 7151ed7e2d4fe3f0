"""Every port takes a burst of new connections: the kernel keeps as many for it as for any other."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from conveyor_engine.serving.server import _listen
from conveyor_gateway.listening.listener import Listener as GatewayListener
from conveyor_kube.http_server import AppRunner, open_port
from conveyor_metrics.auth import Trust
from conveyor_metrics.certificates import Serving
from conveyor_metrics.listener import Listener as MetricsListener
from conveyor_process.listening import BACKLOG, close_port


@pytest.fixture
def backlogs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What this process asks the kernel for, each time that it listens."""
    asked: list[int] = []
    listen = socket.socket.listen

    def record(self: socket.socket, backlog: int = 0) -> None:
        asked.append(backlog)
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", record)
    return asked


async def refuse(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(status=503)


async def test_the_gateways(backlogs: list[int]) -> None:
    listener = GatewayListener(refuse, "127.0.0.1", 0, 10)
    await listener.open()
    await listener.close()
    assert backlogs == [BACKLOG]


async def test_the_admin_ports_of_operator_and_metrics_server(backlogs: list[int]) -> None:
    runner = AppRunner(web.Application(), 10)
    await runner.setup()
    await close_port(await open_port(runner, "127.0.0.1", 0))
    await runner.cleanup()
    assert backlogs == [BACKLOG]


async def test_the_metrics_servers(backlogs: list[int]) -> None:
    async def servings() -> AsyncIterator[Serving]:
        yield Serving(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Trust("", (), ()))

    listener = MetricsListener("127.0.0.1", 0, lambda _: web.Application())
    await asyncio.wait_for(listener.serve(servings()), 30)
    assert listener.port is not None
    assert set(backlogs) == {BACKLOG}


def test_the_engines(backlogs: list[int]) -> None:
    _listen("127.0.0.1", 0).close()
    assert backlogs == [BACKLOG]
