"""Every port takes a burst of new connections: the kernel keeps as many as for any other, and all are accepted."""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable

import pytest
import uvicorn
import uvloop
from aiohttp import web
from starlette.applications import Starlette

from conveyor_engine.serving.http.connection import Connection
from conveyor_engine.serving.server import _listen, _Server
from conveyor_gateway.listening.listener import Listener as GatewayListener
from conveyor_kube.http_server import AppRunner, open_port
from conveyor_metrics.auth import Trust
from conveyor_metrics.certificates import Serving
from conveyor_metrics.listener import Listener as MetricsListener
from conveyor_process import listening
from conveyor_process.listening import BACKLOG, MAX_ACCEPTED_A_TURN, Acceptor, close_port, listen


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
    await close_port(open_port(runner, "127.0.0.1", 0))
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


CLIENTS = 10 * MAX_ACCEPTED_A_TURN
TURNS = 30  # of the event loop; a server of uvloop's takes one connection in each


async def count_accepted(port: int, is_open: Callable[[], int]) -> int:
    """How many of the clients that came at once have a connection after some turns of the event loop."""
    with contextlib.ExitStack() as clients:
        for _ in range(CLIENTS):
            clients.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return is_open()


def test_the_gateway_accepts_all_that_wait() -> None:
    async def accepted() -> int:
        listener = GatewayListener(refuse, "127.0.0.1", 0, BACKLOG)
        await listener.open()
        try:
            server = listener._runner.server
            assert server is not None
            return await count_accepted(listener.port, lambda: len(server.connections))
        finally:
            await listener.close()

    assert uvloop.run(accepted()) == CLIENTS


def test_the_engine_accepts_all_that_wait() -> None:
    async def accepted() -> int:
        config = uvicorn.Config(Starlette(), http=Connection, lifespan="off", log_config=None)
        config.load()
        server = _Server(config)
        server.lifespan = config.lifespan_class(config)
        listening = _listen("127.0.0.1", 0)
        await server.startup([listening])
        try:
            port = listening.getsockname()[1]
            return await count_accepted(port, lambda: len(server.server_state.connections))
        finally:
            await server.shutdown()

    assert uvloop.run(accepted()) == CLIENTS


def test_what_has_reached_a_port_that_closes_is_accepted() -> None:
    async def answered() -> bytes:
        listener = GatewayListener(refuse, "127.0.0.1", 0, BACKLOG)
        await listener.open()
        with socket.create_connection(("127.0.0.1", listener.port)) as client:
            await listener.stop_accepting()
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            received = await asyncio.wait_for(loop.sock_recv(client, 100), 20)
        await listener.close()
        return received

    assert uvloop.run(answered()).startswith(b"HTTP/1.1 503 ")


class TooFew:
    """A listening socket of a process that may open no more files, for some looks."""

    def __init__(self, listening: socket.socket, looks: int) -> None:
        self._listening, self.looks = listening, looks

    def __getattr__(self, name: str) -> object:
        return getattr(self._listening, name)

    def accept(self) -> tuple[socket.socket, object]:
        if self.looks:
            self.looks -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listening.accept()


def test_a_port_without_descriptors_pauses_and_then_accepts_who_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_PAUSE_SECONDS", 0.01)

    async def accepted() -> int:
        made = asyncio.Event()

        class Told(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set()

        few = TooFew(listen("127.0.0.1", 0)[0], looks=3)
        acceptor = Acceptor([few], Told)  # type: ignore[list-item]
        with socket.create_connection(("127.0.0.1", acceptor.port)):
            await asyncio.wait_for(made.wait(), 20)
        await close_port(acceptor)
        return few.looks

    assert uvloop.run(accepted()) == 0
