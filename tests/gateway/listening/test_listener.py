"""Tests malformed requests at the port."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from tests.gateway.process import GatewayProcess

from conveyor_gateway.listening.listener import Listener
from conveyor_http import connection
from conveyor_http.framing import MIN_CHUNK_BYTES

COMPLETIONS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = COMPLETIONS + b"Transfer-Encoding: chunked\r\n\r\n"
MANY_HEADERS = b"".join(b"X-%d: 1\r\n" % number for number in range(200))
LONG_HEADERS = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 7_000) for number in range(6))


async def talk(gateway: GatewayProcess, sent: bytes) -> tuple[int, bytes, dict[str, str]]:
    """Return status, head and error of the answer to raw bytes. Checks that the connection is closed after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.write(sent)
        received = await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), head, json.loads(body)["error"]


def is_safe(head: bytes) -> bool:
    """Return whether a browser neither guesses the type of an answer nor executes any of it."""
    return b"\r\nX-Content-Type-Options: nosniff" in head and b"\r\nContent-Security-Policy: default-src 'none'" in head


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "malformed_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "malformed_http"),
        (b"GET /v1/models HTTP/9.9\r\n\r\n", 400, "malformed_http"),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400, "malformed_http"),
        (COMPLETIONS + b"Content-Length: x\r\n\r\n", 400, "malformed_http"),
        (COMPLETIONS + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "malformed_http"),
        (COMPLETIONS + MANY_HEADERS + b"\r\n", 400, "malformed_http"),
        (COMPLETIONS + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "unknown_transfer_coding"),
        (CHUNKED.replace(b"/1.1", b"/1.0") + b"1\r\nx\r\n0\r\n\r\n", 400, "malformed_http"),
        (CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n", 400, "malformed_body"),
        (CHUNKED + b"1;a=%b\r\nx\r\n" % (b"b" * 1_000) * 100 + b"0\r\n\r\n", 400, "malformed_body"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed_http"),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "malformed_http"),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404, "path_not_found"),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404, "path_not_found"),
        (b"GET /v1/models HTTP/1.1\r\nHost: \xff\r\nConnection: close\r\n\r\n", 421, "host_without_namespace"),
        (COMPLETIONS + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (COMPLETIONS + b"X-Long: " + b"a" * 9_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431, "headers_too_large"),
        (COMPLETIONS + LONG_HEADERS + b"\r\n", 431, "headers_too_large"),
        (COMPLETIONS + LONG_HEADERS, 431, "headers_too_large"),  # and no end of them
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else None,
)
async def test_what_is_malformed_is_answered_in_openais_form_and_the_connection_closed(
    gateway: GatewayProcess, sent: bytes, status: int, code: str
) -> None:
    answered, head, error = await talk(gateway, sent)
    assert (answered, error["code"]) == (status, code)
    assert is_safe(head)


async def test_an_upload_in_tiny_chunks_gets_an_error_that_names_the_remedy(gateway: GatewayProcess) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(CHUNKED + b"1\r\nx\r\n" * 500_000)  # the connection is not reset before the answer is read
    received = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert b"send larger chunks, or a Content-Length" in received


@pytest.mark.parametrize("chunk_bytes", [MIN_CHUNK_BYTES, 1_000, 100_000])
async def test_larger_chunks_are_a_body(gateway: GatewayProcess, chunk_bytes: int) -> None:
    chunk = b"%x\r\n%b\r\n" % (chunk_bytes, b" " * chunk_bytes)
    sent = CHUNKED.replace(b"Host", b"Connection: close\r\nHost") + chunk * (700_000 // chunk_bytes) + b"0\r\n\r\n"
    status, _, error = await talk(gateway, sent)
    assert (status, error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("piece_bytes", [1_000, 40_000, 1_000_000])
async def test_requests_behind_each_other_are_answered_in_order_however_they_are_cut(
    gateway: GatewayProcess, piece_bytes: int
) -> None:
    """Bodies do not count towards the limit of a head, and each head has its own limit."""
    get = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Pad: " + b"a" * 7_000 + b"\r\n\r\n"
    post = b"POST /a/b/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b" " * 100_000
    sent = get + post + get * 5 + post + get.replace(b"Host: x", b"Host: x\r\nConnection: close")
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    for start in range(0, len(sent), piece_bytes):
        writer.write(sent[start : start + piece_bytes])
        await writer.drain()
        await asyncio.sleep(0)
    received = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    statuses = [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 404, 200, 200, 200, 200, 200, 404, 200]


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    """Open a port in this process that answers every request immediately."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="ok")

    opened = Listener(handle, "127.0.0.1", 0, max_connections=10)
    await opened.open()
    try:
        yield opened
    finally:
        await opened.close()


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHo"])
async def test_a_connection_whose_headers_do_not_come_is_closed_in_time(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    async with listening() as opened:
        for before in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
            writer.write(before)
            if before:
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
            writer.write(begun)
            if before and not begun:  # between two requests there is time
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.read(), 0.5)
            else:
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()


async def test_a_connection_too_many_is_refused_in_openais_form_while_every_other_one_is_being_answered() -> None:
    answering, go_on = asyncio.Event(), asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        answering.set()
        await go_on.wait()
        return web.Response(text="ok")

    opened = Listener(handle, "127.0.0.1", 0, max_connections=1)
    await opened.open()
    held, held_writer = await asyncio.open_connection("127.0.0.1", opened.port)
    held_writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await answering.wait()
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
    head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Connection: close" in head
    assert is_safe(head)
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    go_on.set()
    assert (await asyncio.wait_for(held.readuntil(b"ok"), 20)).startswith(b"HTTP/1.1 200 ")
    writer.close()
    held_writer.close()
    await opened.close()


async def test_a_client_that_says_nothing_harms_nobody(gateway: GatewayProcess) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.close()
    assert (await asyncio.to_thread(gateway.admin, "/readyz"))[0] == 200


async def test_an_idle_connection_is_closed_after_the_time_of_the_setting() -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="ok")

    opened = Listener(handle, "127.0.0.1", 0, 10, keep_alive_seconds=0.2)
    await opened.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
    assert await asyncio.wait_for(reader.read(), 20) == b"", "the default is minutes"
    writer.close()
    await opened.close()
