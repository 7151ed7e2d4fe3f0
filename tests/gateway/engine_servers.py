"""Engines for tests. They are real HTTP servers whose answers the test chooses, to the byte if necessary."""

import asyncio
import contextlib
import ctypes
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tests.gateway.cluster import own_address

from conveyor_http.server import open_port
from conveyor_process.listening import close_port

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
EVENT_STREAM = {"Content-Type": "text/event-stream"}


@dataclass(slots=True)
class Engine:
    """A server. `requests` are the bodies that it got, in order."""

    port: int
    requests: list[tuple[web.Request, bytes]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def running_engine(handle: Handle) -> AsyncIterator[Engine]:
    """Run an aiohttp server on this machine's own address. `handle` is cancelled when its client disconnects."""
    engine = Engine(0)

    async def record(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, web.Request)
        engine.requests.append((request, await request.read()))
        return await handle(request)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", record)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, auto_decompress=False)
    await runner.setup()
    accepting = open_port(runner, own_address(), 0)
    engine.port = accepting.port
    try:
        yield engine
    finally:
        await close_port(accepting)
        await runner.cleanup()


@contextlib.asynccontextmanager
async def running_raw_engine(talk: Talk) -> AsyncIterator[int]:
    """Run a TCP server that reads one request per connection and then lets `talk` write anything. Yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-l")
            )
            await reader.readexactly(length)
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, own_address(), 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def answering(kind: Callable[..., web.StreamResponse], **arguments: Any) -> Handle:
    """Return a handler that answers every request with a new `kind(**arguments)`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return kind(**arguments)

    return handle


def answering_in_two(first: bytes, second: bytes, gate: asyncio.Event) -> Handle:
    """Return a handler that answers with JSON in two pieces. The second one waits for the gate."""

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        await answer.write(first)
        await gate.wait()
        await answer.write(second)
        return answer

    return handle


class SlowEngine:
    """An engine that answers when the test lets it. `cancelled` counts clients that disconnected first."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.running = self.most_running = 0
        self.cancelled = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return web.json_response({"engine": request.url.port})


async def begin_stream(request: web.Request, *events: bytes) -> web.StreamResponse:
    answer = web.StreamResponse(headers=EVENT_STREAM)
    await answer.prepare(request)
    for event in events:
        await answer.write(event)
    return answer


@contextlib.contextmanager
def silent_address() -> Iterator[tuple[str, int]]:
    """Yield an address that answers nothing, like that of a lost node. Its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(full.getsockname())
        yield full.getsockname()


@contextlib.contextmanager
def refusing_address() -> Iterator[tuple[str, int]]:
    with socket.socket() as bound:  # and never listening
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


def drop_all_that_arrives(writer: asyncio.StreamWriter) -> None:
    """Let the kernel drop all that arrives on this connection, so that nothing is acknowledged, as by a lost node."""
    drop = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # one BPF instruction: return 0 bytes
    program = struct.pack("@HP", 1, ctypes.addressof(drop))
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
