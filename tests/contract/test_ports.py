"""Tests that every port accepts a burst of new connections, and that all ports have the same backlog in the kernel."""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from ipaddress import ip_network

import pytest
import uvicorn
import uvloop
from aiohttp import web
from starlette.applications import Starlette

from conveyor_engine.serving.http.connection import Connection
from conveyor_engine.serving.server import _listen, _Server
from conveyor_gateway.clients import Clients
from conveyor_gateway.listening.listener import Listener as GatewayListener
from conveyor_http import server
from conveyor_http.server import AppRunner, open_port
from conveyor_metrics.auth import Trust
from conveyor_metrics.certificates import Serving
from conveyor_metrics.listener import Listener as MetricsListener
from conveyor_process import listening
from conveyor_process.listening import BACKLOG, Acceptor, close_port, listen


@pytest.fixture
def backlogs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The backlogs with which this process calls `listen`."""
    ports: list[int] = []
    listen = socket.socket.listen

    def record(self: socket.socket, backlog: int = 0) -> None:
        ports.append(backlog)
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", record)
    return ports


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
    for opened in _listen("", 0):
        opened.close()
    assert set(backlogs) == {BACKLOG}


CLIENTS = 160
TURNS = 30  # of the event loop; a server of uvloop's takes one connection in each
FLOOD, OTHER = "127.0.0.2", "127.0.0.3"


@contextlib.contextmanager
def clients(port: int, address: str, count: int) -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.enter_context(socket.create_connection(("127.0.0.1", port), source_address=(address, 0)))
        yield


async def take_turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def count_connected(*networks: str) -> Counter[str]:
    """Return the gateway's connections by peer, after a flood, another client, and some turns of the event loop."""
    find_peer = Clients([ip_network(each) for each in networks]).find_peer
    listener = GatewayListener(refuse, "127.0.0.1", 0, BACKLOG, find_peer=find_peer)
    await listener.open()
    try:
        with clients(listener.port, FLOOD, CLIENTS), clients(listener.port, OTHER, 1):
            await take_turns()
            server = listener._runner.server
            assert server is not None
            return Counter(each.peer for each in server.connections)  # type: ignore[attr-defined]
    finally:
        await listener.close()


def test_a_client_of_the_gateway_does_not_wait_behind_a_flood_of_connections() -> None:
    connected = uvloop.run(count_connected())
    assert connected[OTHER] == 1
    assert 0 < connected[FLOOD] <= TURNS


def test_the_gateway_takes_connections_of_a_trusted_proxy_as_those_of_many_clients() -> None:
    assert uvloop.run(count_connected(f"{FLOOD}/32")) == {FLOOD: CLIENTS, OTHER: 1}


def test_a_peer_with_more_new_connections_than_may_wait_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_WAITING", 2)

    async def answers() -> tuple[list[bytes], bytes]:
        listener = GatewayListener(refuse, "127.0.0.1", 0, BACKLOG)
        await listener.open()
        try:
            with contextlib.ExitStack() as opened:
                flood, other = [
                    [
                        opened.enter_context(socket.create_connection(("127.0.0.1", listener.port), 20, (address, 0)))
                        for _ in range(count)
                    ]
                    for address, count in ((FLOOD, 6), (OTHER, 1))
                ]
                for client in (*flood, *other):
                    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                received = [await asyncio.to_thread(client.recv, 10_000) for client in (*flood, *other)]
                return received[:-1], received[-1]
        finally:
            await listener.close()

    of_flood, of_other = uvloop.run(answers())
    assert b"too_many_connections" not in of_other
    assert [b"too_many_connections" in each for each in of_flood] == [False, True, True, True, True, True]


def test_the_engine_accepts_all_that_wait() -> None:
    async def count_accepted() -> int:
        config = uvicorn.Config(Starlette(), http=Connection, lifespan="off", log_config=None)
        config.load()
        server = _Server(config, None)
        server.lifespan = config.lifespan_class(config)
        listening = listen("127.0.0.1", 0)
        await server.startup(listening)
        try:
            with clients(listening[0].getsockname()[1], FLOOD, CLIENTS):
                await take_turns()
                return len(server.server_state.connections)
        finally:
            await server.shutdown()

    assert uvloop.run(count_accepted()) == CLIENTS


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
    """A listening socket whose `accept` fails a few times, as in a process that may open no more files."""

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

        class Recorder(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set()

        few = TooFew(listen("127.0.0.1", 0)[0], looks=3)
        acceptor = Acceptor([few], Recorder)  # type: ignore[list-item]
        with socket.create_connection(("127.0.0.1", acceptor.port)):
            await asyncio.wait_for(made.wait(), 20)
        await close_port(acceptor)
        return few.looks

    assert uvloop.run(accepted()) == 0
