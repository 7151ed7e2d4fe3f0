"""Tests the limits of the page for trying a service, with real HTTP servers in place of a browser and of a gateway."""

import asyncio
import io
import ssl
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from conveyor_console.playground.api_requests import ApiRequest, Reading
from conveyor_console.playground.fields import MAX_FORM_BYTES, MAX_TEXT_BYTES, InvalidForm, read_form
from conveyor_console.playground.relay import MAX_PARSED_BYTES, MAX_TEXT, Progress, Relay
from conveyor_console.responses import build_event, stream_changes

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """Yield the port at which the handler answers every POST."""
    app = web.Application(client_max_size=0)
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def read_sent(values: list[tuple[str, str]], file: bytes = b"") -> str:
    """Send a form, and return how many characters and bytes were read of it, or why it was refused."""

    async def describe(request: web.Request) -> web.Response:
        try:
            sent = await read_form(request)
        except InvalidForm as error:
            return web.Response(text=str(error))
        num_chars = sum(len(text) for texts in sent.values.values() for text in texts)
        return web.Response(text=f"{num_chars} {len(sent.upload.content) if sent.upload else 0}")

    form = aiohttp.FormData(values, default_to_multipart=True)
    if file:
        form.add_field("file", io.BytesIO(file), filename="x")
    async with (
        serving(describe) as port,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/", data=form) as response,
    ):
        return await response.text()


async def test_only_the_file_of_a_form_may_be_large() -> None:
    half = "x" * (MAX_TEXT_BYTES // 2)
    assert await read_sent([("a", half), ("b", half)], bytes(1 << 20)) == f"{MAX_TEXT_BYTES} {1 << 20}"
    for values, file in (
        ([("a", "\n" * (MAX_TEXT_BYTES + 1))], b""),
        ([("a", half), ("b", half), ("c", "x")], b""),
        ([("a", "x")], bytes(MAX_FORM_BYTES)),
    ):
        assert (await read_sent(values, file)).startswith("A form may have at most 256 KiB of text, and 8 MiB with")


async def ask(reading: Reading, body: bytes, status: int = 200) -> Progress:
    """Return what a relay has of an answer with this body."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    progress = Progress()
    async with serving(answer) as port, aiohttp.ClientSession() as session:
        relay = Relay(session, f"http://127.0.0.1:{port}", ssl.create_default_context())
        await relay.send("team/x", ApiRequest("/x", reading, {}, inputs=["x"]), "", "id", progress)
    return progress


def write_event(text: str) -> bytes:
    return b'data: {"choices": [{"delta": {"content": "%s"}}]}\n' % text.encode()


@pytest.mark.parametrize(
    ("reading", "body", "status"),
    [
        ("events", write_event("\\n" * 1024) * (MAX_TEXT // 1024 + 1), 200),
        ("events", b"data: " + b"x" * (1 << 20), 200),
        ("tensors", b'{"outputs": []}' + b" " * MAX_PARSED_BYTES, 200),
        ("events", b'{"error": []}' + b" " * MAX_PARSED_BYTES, 500),
    ],
)
async def test_a_longer_answer_is_not_read(reading: Reading, body: bytes, status: int) -> None:
    progress = await ask(reading, body, status)
    assert progress.problem == "The answer is longer than the console shows. Use the command."
    assert len("".join(progress.text)) <= MAX_TEXT


async def test_a_text_up_to_the_limit_is_read() -> None:
    end = b'data: {"choices": [{"finish_reason": "stop"}]}\n'
    progress = await ask("events", write_event("x" * 1024) * (MAX_TEXT // 1024) + end)
    assert (len("".join(progress.text)), progress.problem) == (MAX_TEXT, "")


def test_a_message_of_many_lines_takes_little_memory() -> None:
    assert build_event("a\r\nb\rc\n") == b"data: a\ndata: b\ndata: c\ndata: \n\n"
    assert build_event("") == b""
    text = "\n" * 100_000
    tracemalloc.start()
    event = build_event(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * len(event)


async def test_a_browser_that_does_not_read_keeps_no_turn() -> None:
    closed = asyncio.Event()

    async def change() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "x" * 65_536
        finally:
            closed.set()

    async def stream(request: web.Request) -> web.StreamResponse:
        return await stream_changes(request, change(), {"Cache-Control": "no-store"}, 1.0)

    async with serving(stream) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        async with asyncio.timeout(20):
            await closed.wait()
            sent = await reader.read()
        assert sent.startswith(b"HTTP/1.1 200 ")
        assert not sent.endswith(b"\r\n0\r\n\r\n")  # cut off, not ended
        writer.close()
