"""Tests a client's connection, on a server without an engine."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from conveyor_engine.serving.http import connection as module
from conveyor_engine.serving.http.connection import HEAD_BYTES_MAX, HEADERS_MAX, READ_BYTES_MIN, Connection

MUCH_BYTES = 32 << 20  # more than lies between two sockets
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer_much(scope: Any, receive: Any, send: Any) -> None:
    """Answer with much data after the body has arrived."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"%d" % MUCH_BYTES)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(MUCH_BYTES)})


@asynccontextmanager
async def connected(app: Any = answer_much, **options: Any) -> AsyncIterator[tuple[Client, uvicorn.Server]]:
    config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, **options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        client = await asyncio.open_connection(*listener.getsockname())
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(60):
            yield client, server
            client[1].close()
            server.should_exit = True
            await serving


async def until(check: Callable[[], Any]) -> Any:
    while not (value := check()):  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    return value


async def test_trailers_without_an_end_are_refused() -> None:
    async with connected() as ((reader, writer), server):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
        await until(lambda: any(connection.cycle for connection in server.server_state.connections))
        for _ in range(2):
            writer.write(b"X-A: " + b"a" * (HEAD_BYTES_MAX // 2) + b"\r\n")
        assert (await reader.read(1000)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("sent", [b"", b"G"])
async def test_a_connection_that_brings_no_whole_head_in_time_ends(answered: bool, sent: bytes) -> None:
    async with connected(timeout_keep_alive=0.3) as ((reader, writer), _):
        if answered:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(MUCH_BYTES)
        writer.write(sent)
        await read_to_the_end(reader)


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    """Return the data until the server closes the connection. It is reset if the server has not read everything."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            received += data
    return bytes(received)


async def test_a_head_that_comes_byte_by_byte_has_no_more_time() -> None:
    async with connected(timeout_keep_alive=0.3) as ((reader, writer), _):
        writer.write(b"GET /")
        closed = asyncio.create_task(read_to_the_end(reader))
        while not closed.done():
            if not writer.transport.is_closing():
                writer.write(b"a")
            await asyncio.wait([closed], timeout=0.01)


async def test_a_client_that_reads_too_little_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)
    async with connected() as ((reader, writer), server):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: not server.server_state.connections)


async def test_a_client_that_reads_slowly_is_not() -> None:
    async with connected() as ((reader, writer), server):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        (connection,) = await until(lambda: {c for c in server.server_state.connections if c.flow.write_paused})
        before = connection.transport.get_write_buffer_size()
        await reader.readexactly(MUCH_BYTES // 2)
        connection._expect_reading(before)
        assert not connection.transport.is_closing()
        connection._expect_reading(connection.transport.get_write_buffer_size() + READ_BYTES_MIN - 1)
        assert connection.transport.is_closing()


async def test_many_tiny_headers_are_refused() -> None:
    async with connected() as ((reader, writer), _):
        writer.write(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (HEADERS_MAX + 1) + b"\r\n")
        assert (await reader.read(1000)).startswith(b"HTTP/1.1 431 ")


async def test_few_requests_are_read_ahead() -> None:
    async with connected() as ((reader, writer), _):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        assert b"too_many_pipelined" in await read_to_the_end(reader)


@pytest.mark.parametrize("sent", [b"", b"GET /", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1"])
async def test_who_waits_longest_makes_room_for_a_new_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 1)
    async with connected() as ((oldest, first), server):
        first.write(sent)
        state = server.server_state
        await until(lambda: len(state.connections) == 1 and (b"POST" not in sent or state.tasks))
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await read_to_the_end(oldest) == b""
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def answer_never(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def test_requests_are_not_ended_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 1)
    async with connected(answer_never) as ((_, writer), server):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: server.server_state.tasks)
        late, other = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
        assert b"too_many_connections" in await read_to_the_end(late)
        other.close()
        assert server.server_state.tasks


async def test_a_client_that_sends_no_more_gets_its_answer() -> None:
    async with connected() as ((reader, writer), _):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        writer.write_eof()
        received = await read_to_the_end(reader)
        assert b"HTTP/1.1 200 " in received
        assert len(received) > MUCH_BYTES


async def test_a_client_that_leaves_before_its_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.01)
    async with connected(answer_never) as ((_, writer), server):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: server.server_state.tasks)
        writer.close()
        await until(lambda: not server.server_state.tasks)


async def echo_body(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the method, the path and the body."""
    parts = [scope["method"].encode(), scope["path"].encode()]
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b" ".join(parts)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
WITH_BODY = b"POST /p HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"Content-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("pieces", [[WITH_BODY], [WITH_BODY[:70], WITH_BODY[70:]], [bytes([b]) for b in WITH_BODY]])
async def test_a_request_for_another_protocol_is_answered_with_its_body(pieces: list[bytes]) -> None:
    chunked = b"POST /q HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    websocket = b"GET /w HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with connected(echo_body) as ((reader, writer), _):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
        writer.write(chunked + websocket)  # on the same connection, one behind the other
        assert b"POST /q ab" in await reader.readuntil(b"ab")
        assert b"GET /w " in await reader.readuntil(b"/w ")


@pytest.mark.parametrize("more", [b"", UPGRADE])
async def test_a_connect_is_refused_once(more: bytes) -> None:
    async with connected(echo_body) as ((reader, writer), _):
        writer.write(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n" + more + b"\r\n")
        answer = await reader.read()
        assert (answer[:13], answer.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 400 ", 1)


async def stream(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"POST /p", b" hello"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


@pytest.mark.parametrize("app", [echo_body, stream])
async def test_http_1_0_gets_an_answer_without_chunks_that_ends_with_the_connection(app: Any) -> None:
    async with connected(app) as ((reader, writer), _):
        writer.write(b"POST /p HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert (head[8:13], body) == (b" 200 ", b"POST /p hello")
        assert b"transfer-encoding" not in head


async def test_a_client_that_expects_100_continue_gets_it_from_an_engine_too() -> None:
    async with connected(echo_body) as ((reader, writer), _):
        writer.write(b"POST /p HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
