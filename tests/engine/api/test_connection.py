"""One client's connection, on a server without an engine."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn

from conveyor_engine.api import connection as module
from conveyor_engine.api.connection import HEAD_BYTES_MAX, Connection

MUCH_BYTES = 32 << 20  # more than lies between two sockets
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer_much(scope: Any, receive: Any, send: Any) -> None:
    """When the body is there."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"%d" % MUCH_BYTES)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(MUCH_BYTES)})


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[Client, uvicorn.Server]]:
    config = uvicorn.Config(answer_much, http=Connection, lifespan="off", log_config=None, **options)
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


async def end_of(reader: asyncio.StreamReader) -> None:
    """Until the other side has closed the connection, which TCP calls a reset where bytes lay unread."""
    with suppress(ConnectionResetError):
        await reader.read()


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
        await end_of(reader)


async def test_a_head_that_comes_byte_by_byte_has_no_more_time() -> None:
    async with connected(timeout_keep_alive=0.3) as ((reader, writer), _):

        async def trickle() -> None:
            writer.write(b"GET /")
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.01)

        writing = asyncio.create_task(trickle())
        await end_of(reader)
        writing.cancel()


async def test_a_client_that_reads_nothing_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD_SECONDS_MAX", 0.1)
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
        connection._expect_reading(connection.transport.get_write_buffer_size())
        assert connection.transport.is_closing()
