"""Tests malformed requests at the port, and the response after a bug."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.metrics.aggregation import Aggregated
from tests.metrics.test_server import read_health

from conveyor_http.server import AppRunner, open_port
from conveyor_metrics import listener
from conveyor_metrics.auth import Trust
from conveyor_metrics.certificates import Serving
from conveyor_metrics.listener import ApiConnection, Listener
from conveyor_process.listening import close_port
from e2e.cluster.certificates import Authority

HEADERS = b"GET /apis HTTP/1.1\r\nHost: localhost\r\n"


def parse(received: bytes) -> tuple[int, dict[str, Any]]:
    """Return HTTP status and body of an answer after which the connection was closed."""
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)


def read_to_the_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /apis HTTP/9.9\r\n\r\n",
        HEADERS + b"Bad Header: 1\r\n\r\n",
        HEADERS + b"Content-Length: x\r\n\r\n",
        HEADERS + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        HEADERS + b"".join(b"X-%d: 1\r\n" % number for number in range(200)) + b"\r\n",
    ],
    ids=lambda sent: sent[:60].decode(),
)
def test_what_is_no_http_is_answered_with_a_status_and_the_connection_closed(
    aggregated: Aggregated, sent: bytes
) -> None:
    context = ssl.create_default_context(cafile=str(aggregated.authority.certificate))
    context.check_hostname = False  # its name is that of the Service
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    with (
        socket.create_connection(("127.0.0.1", aggregated.port), timeout=60) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(sent)
        code, status = parse(read_to_the_end(connection))
    assert (code, status["kind"], status["code"], status["reason"]) == (400, "Status", 400, "BadRequest")
    assert "the request is not valid HTTP" in status["message"]


@pytest.mark.parametrize("sent", [HEADERS + b"\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 100, b"\0"])
def test_what_is_no_tls_is_hung_up_on_and_harms_nobody(aggregated: Aggregated, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", aggregated.port), timeout=60) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert not read_to_the_end(connection).startswith(b"HTTP")
    assert read_health(aggregated.admin_port, "/readyz") == (200, "ok\n")


async def test_a_bug_is_answered_with_a_status_without_details(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: web.Request) -> web.Response:
        raise ZeroDivisionError("a secret")

    app = web.Application()
    app.router.add_get("/apis", fail)
    runner = AppRunner(app, 10, ApiConnection)
    await runner.setup()
    try:
        accepting = open_port(runner, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", accepting.port)
        writer.write(HEADERS + b"\r\n")
        received = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await close_port(accepting)
    finally:
        await runner.cleanup()
    code, status = parse(received)
    assert (code, status["kind"], status["reason"]) == (500, "Status", "InternalError")
    assert "secret" not in status["message"]
    assert "a secret" in caplog.text


async def turns() -> None:
    """Wait for some turns of the event loop, more than any task of the listener needs if it does not wait."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_stopping_in_the_middle_of_a_change_of_certificates_answers_what_was_accepted(tmp_path: Path) -> None:
    pair = Authority(tmp_path, "serving-authority").issue("tls", "localhost", names=["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    accepted, retiring, answering = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def servings() -> AsyncIterator[Serving]:
        yield Serving(context, Trust("", (), ()))
        await accepted.wait()
        yield Serving(context, Trust("", (), ()))

    async def answer(request: web.Request) -> web.Response:
        accepted.set()
        await answering.wait()
        return web.Response(text="answered")

    async def retire(_: web.Application) -> None:
        retiring.set()

    def build_app(_: Trust) -> web.Application:
        app = web.Application()
        app.on_shutdown.append(retire)
        app.router.add_get("/", answer)
        return app

    async def send() -> str:
        async with http.get(f"https://127.0.0.1:{opened.port}/", ssl=False) as got:
            return await got.text()

    opened = Listener("127.0.0.1", 0, build_app)
    serving = asyncio.create_task(opened.serve(servings()))
    async with aiohttp.ClientSession() as http, asyncio.timeout(120):
        while opened.port is None:  # noqa: ASYNC110  it has no event for it
            await asyncio.sleep(0.01)
        task = asyncio.create_task(send())
        await retiring.wait()
        await turns()  # the old server waits for its request now
        serving.cancel()
        await turns()
        assert not serving.done()
        answering.set()
        assert await task == "answered"
        await asyncio.wait({serving})


async def test_a_connection_that_begins_no_handshake_is_closed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE_SECONDS", 0.2)
    pair = Authority(tmp_path, "serving-authority").issue("tls", "localhost", names=["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    async def servings() -> AsyncIterator[Serving]:
        yield Serving(context, Trust("", (), ()))
        await asyncio.Event().wait()

    opened = Listener("127.0.0.1", 0, lambda _: web.Application())
    serving = asyncio.create_task(opened.serve(servings()))
    async with asyncio.timeout(120):
        while opened.port is None:  # noqa: ASYNC110  it has no event for it
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
        assert await reader.read() == b""
    writer.close()
    serving.cancel()
    await asyncio.wait({serving})


@pytest.mark.slow
async def test_no_connection_is_lost_when_certificates_change(tmp_path: Path) -> None:
    pair = Authority(tmp_path, "serving-authority").issue("tls", "localhost", names=["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    changed = asyncio.Event()

    async def servings() -> AsyncIterator[Serving]:
        for _ in range(30):
            yield Serving(context, Trust("", (), ()))
            await asyncio.sleep(0.02)
        changed.set()
        await asyncio.Event().wait()

    async def connect() -> None:
        while not changed.is_set():
            _, writer = await asyncio.open_connection("127.0.0.1", opened.port)
            async with asyncio.timeout(5):  # a connection that nobody serves is silent for ever
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    await writer.start_tls(trusting)
            writer.close()

    trusting = ssl.create_default_context(cafile=str(pair.certificate))
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    opened = Listener("127.0.0.1", 0, lambda _: web.Application())
    serving = asyncio.create_task(opened.serve(servings()))
    while opened.port is None:  # noqa: ASYNC110  it has no event for it
        await asyncio.sleep(0.01)
    await asyncio.gather(*(connect() for _ in range(8)))
    serving.cancel()
    await asyncio.wait({serving})
