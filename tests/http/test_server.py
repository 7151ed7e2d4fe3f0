"""Tests ports with clients that occupy connections and memory but send nothing."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from conveyor_http import connection
from conveyor_http.server import Server, open_port
from conveyor_process.listening import close_port

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Port:
    """A port of this process, with four connections."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.go_on = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/late":
            await self.go_on.wait()
        self.bodies.append(await request.read())
        if request.path == "/wait":
            await self.go_on.wait()
        return web.Response(body=b"x" * (8 << 20) if request.path == "/large" else b"ok")

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Port"]:
        self.server = Server(self.handle, 4, handler_cancellation=True)
        runner = web.ServerRunner(self.server, shutdown_timeout=0.1)
        await runner.setup()
        self.accepting = open_port(runner, "127.0.0.1", 0)
        self.number = self.accepting.port
        async with contextlib.AsyncExitStack() as self.clients:
            yield self
        await close_port(self.accepting)
        await runner.cleanup()

    async def connect(self, sent: bytes = b"", address: str = "127.0.0.1") -> Client:
        """Return a client that has sent `sent`. Waits until the port has seen it."""
        known = set(self.server.connections)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number, local_addr=(address, 0))
        self.clients.callback(writer.close)
        await until(lambda: set(self.server.connections) - known)
        connection = next(iter(set(self.server.connections) - known))
        before = connection.silent_since  # type: ignore[attr-defined]
        if sent:
            writer.write(sent)
            await until(lambda: connection.silent_since > before)  # type: ignore[attr-defined]
        return reader, writer


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110  many conditions, none with an event
            await asyncio.sleep(0.001)


async def is_closed(client: Client, within_seconds: float = 20) -> bool:
    try:
        async with asyncio.timeout(within_seconds):
            while await client[0].read(1 << 20):
                pass
            return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def answer(client: Client) -> bytes:
    return await asyncio.wait_for(client[0].readuntil(b"ok"), 20)


async def read_answer(port: Port) -> Client:
    client = await port.connect(GET)
    await answer(client)
    return client


async def leave_answer(port: Port) -> Client:
    client = await port.connect(GET.replace(b"GET /", b"GET /large"))
    await until(lambda: sum(each.writing_paused for each in port.server.connections) > len(port.bodies) - 2)
    return client


@pytest.mark.parametrize(
    "wait_for_client",
    [
        pytest.param(lambda port: port.connect(), id="nothing sent"),
        pytest.param(lambda port: port.connect(GET[:-5]), id="half a head"),
        pytest.param(lambda port: port.connect(POST + b"Content-Length: 9\r\n\r\nx"), id="half a body"),
        pytest.param(read_answer, id="between two requests"),
        pytest.param(leave_answer, id="answer not read"),
    ],
)
async def test_a_new_connection_takes_the_place_of_the_one_silent_for_longest(
    wait_for_client: Callable[[Port], Awaitable[Client]],
) -> None:
    async with Port().open() as port:
        held = [await wait_for_client(port) for _ in range(4)]
        for _ in range(2):
            assert await answer(await port.connect(GET)) != b""
        await until(lambda: len(port.server.connections) <= 4)
        # Each newcomer ended two: a sixty-fourth of the places, and one.
        assert [await is_closed(client) for client in held[:2]] == [True, True]


async def test_requests_that_are_being_answered_keep_their_connections() -> None:
    async with Port().open() as port:
        busy = [await port.connect(GET.replace(b"GET /", b"GET /wait")) for _ in range(3)]
        await until(lambda: len(port.bodies) == 3)
        for _ in range(5):
            await answer(await port.connect(GET))
        busy.append(await port.connect(GET.replace(b"GET /", b"GET /wait")))
        await until(lambda: len(port.bodies) == 9)
        refused, writer = await asyncio.open_connection("127.0.0.1", port.number)
        assert (await asyncio.wait_for(refused.read(), 20)).startswith(b"HTTP/1.1 503 ")
        writer.close()
        port.go_on.set()
        for client in busy:
            assert (await answer(client)).startswith(b"HTTP/1.1 200 ")


async def test_the_address_with_the_most_silent_connections_gives_them_up() -> None:
    async with Port().open() as port:
        kept = await port.connect(address="127.0.0.2")
        flood = [await port.connect() for _ in range(3)]
        for _ in range(6):
            flood.append(await port.connect())
        assert not await is_closed(kept, within_seconds=0.05)
        assert await is_closed(flood[0])


def mark(port: Port, known: set[object], owner: str = "", is_kept: bool | None = None) -> None:
    """Set what a handler sets, on the connections that are not in `known`."""
    for each in set(port.server.connections) - known:
        assert isinstance(each, connection.Connection)
        each.owner, each.is_kept = owner, is_kept


async def test_the_owner_with_the_most_silent_connections_gives_them_up_whatever_their_addresses() -> None:
    async with Port().open() as port:
        kept = await port.connect(address="127.0.0.2")
        mark(port, set(), owner="small")
        known = set[object](port.server.connections)
        large = [await port.connect(address=f"127.0.0.{number}") for number in (3, 4, 5)]
        mark(port, known, owner="large")
        await answer(await port.connect(GET, address="127.0.0.6"))
        assert not await is_closed(kept, within_seconds=0.05)
        assert await is_closed(large[0])


async def test_a_handler_decides_whether_its_connection_may_be_closed() -> None:
    async with Port().open() as port:
        kept = await port.connect(POST + b"Content-Length: 9\r\n\r\nx")
        mark(port, set(), is_kept=True)
        known = set[object](port.server.connections)
        given_up = await port.connect(GET.replace(b"GET /", b"GET /wait"))
        mark(port, known, is_kept=False)
        busy = [await port.connect(GET.replace(b"GET /", b"GET /wait")) for _ in range(2)]
        await until(lambda: len(port.bodies) == 3)
        await answer(await port.connect(GET))
        assert await is_closed(given_up)
        assert not await is_closed(kept, within_seconds=0.05)
        assert not await is_closed(busy[0], within_seconds=0.05)


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1 << 20])
async def test_requests_behind_a_slow_one_are_answered_in_order_and_not_read_before(piece_bytes: int) -> None:
    posts = [POST + b"Content-Length: 3\r\n\r\n%03d" % number for number in range(20)]
    posts.append(POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\n020\r\n0\r\n\r\n")
    sent = b"".join((GET.replace(b"GET /", b"GET /wait"), *posts))
    async with Port().open() as port:
        client = await port.connect()
        for start in range(0, len(sent), piece_bytes):
            client[1].write(sent[start : start + piece_bytes])
            await asyncio.sleep(0)
        await until(lambda: port.bodies)
        port.go_on.set()
        for _ in range(22):
            assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        assert port.bodies == [b"", *(b"%03d" % number for number in range(21))]
        assert port.server.ahead_bytes == 0


async def test_what_comes_behind_requests_that_wait_is_bounded_for_all_connections_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_AHEAD_BYTES", 300_000)
    wait = GET.replace(b"GET /", b"GET /wait")
    behind = POST + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1_000_000
    async with Port().open() as port:
        clients = []
        for _ in range(4):
            client = await port.connect(wait)
            client[1].write(behind)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client[1].drain(), 0.2)
            clients.append(client)
        await until(lambda: len(port.bodies) == 4)
        assert 0 < port.server.ahead_bytes <= 300_000
        port.go_on.set()
        for _ in range(2):  # the first one was there first, and loses nothing
            assert (await answer(clients[0])).startswith(b"HTTP/1.1 200 ")
        await until(lambda: port.server.ahead_bytes == 0)


async def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    async with Port().open() as port:
        _, writer = await port.connect(GET.replace(b"GET /", b"GET /wait"))
        await until(lambda: port.bodies)
        writer.close()
        await until(lambda: not port.server.connections)


async def test_a_client_that_does_not_read_its_answer_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.1)
    async with Port().open() as port:
        await leave_answer(port)
        await until(lambda: not port.server.connections)


async def test_a_client_that_reads_slowly_gets_its_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.4)
    async with Port().open() as port:
        reader, _ = await leave_answer(port)
        received = 0
        while received < 8 << 20:  # an eighth of a megabyte in each of 64 looks at it
            part = await reader.read(1 << 17)
            assert part, f"closed after {received} bytes"
            received += len(part)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("path", [b"/", b"/wait"])
async def test_a_client_that_closes_its_own_side_gets_its_answer(path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBE_SECONDS", 0.05)
    async with Port().open() as port:
        reader, writer = await port.connect()
        writer.write(GET.replace(b"GET /", b"GET " + path))
        writer.write_eof()
        if path == b"/wait":
            received = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert received == b"HTTP/1.1 102 Processing\r\n\r\n"
            port.go_on.set()
        received = await asyncio.wait_for(reader.read(), 20)
        assert received.endswith(b"ok")
        assert b"HTTP/1.1 200 OK" in received


async def test_a_client_of_http_1_0_that_sends_no_more_has_left() -> None:
    async with Port().open() as port:
        reader, writer = await port.connect(b"GET /wait HTTP/1.0\r\n\r\n")
        await until(lambda: port.bodies)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 20) == b""


async def test_what_was_accepted_in_the_turn_in_which_the_port_is_closed_is_answered() -> None:
    async with Port().open() as port:
        with socket.create_connection(("127.0.0.1", port.number), timeout=20) as client:
            client.sendall(GET)
            for _ in range(2):  # it is accepted in the second turn from here
                await asyncio.sleep(0)
            await close_port(port.accepting)
            assert (await asyncio.to_thread(client.recv, 100)).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01" * 5000, b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n: x\r\n\r\n"])
async def test_what_is_no_http_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture, sent: bytes) -> None:
    """A hostile client would otherwise fill the log with tracebacks."""
    async with Port().open() as port:
        reader, _ = await port.connect(sent)
        answer = await reader.read()
    assert answer[:13] == b"HTTP/1.0 400 "
    assert len(answer) < 1000
    assert not caplog.records


async def test_a_turn_of_the_loop_parses_a_piece_of_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other connections have their turns in between, whatever one client sends."""
    turn, parsed = 0, Counter[tuple[int, int]]()
    read = connection.Connection._read

    def count(self: connection.Connection, data: bytes) -> None:
        parsed[id(self), turn] += len(data)
        read(self, data)

    def go_on() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(go_on)

    monkeypatch.setattr(connection.Connection, "_read", count)
    loop = asyncio.get_running_loop()
    body = b"100\r\n" + b"x" * 256 + b"\r\n"
    async with Port().open() as port:
        clients = [await port.connect() for _ in range(3)]
        go_on()
        for _, writer in clients:
            writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n" + body * 1_000 + b"0\r\n\r\n" + GET)
        for client in clients:
            assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
            assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        assert port.bodies.count(b"x" * 256_000) == 3
    assert max(parsed.values()) <= 16 << 10
    assert sum(parsed.values()) > 3 * 256_000


@pytest.mark.parametrize("piece_bytes", [1, 100, 10_000, 1 << 20])
async def test_a_body_that_nobody_reads_stops_nothing(piece_bytes: int) -> None:
    """The handler reads bodies only when it goes on, so parsing pauses in the middle."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (size, b"x" * size) for size in range(1, 1_000))
    sent = POST.replace(b"POST /", b"POST /late") + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n" + GET
    async with Port().open() as port:
        client = await port.connect()
        for start in range(0, len(sent), piece_bytes):
            client[1].write(sent[start : start + piece_bytes])
            if start % 50 == 0:
                await asyncio.sleep(0)
        port.go_on.set()
        for _ in range(2):
            assert (await answer(client)).startswith(b"HTTP/1.1 200 ")
        assert port.bodies == [b"x" * (999 * 500), b""]
