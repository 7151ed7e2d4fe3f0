"""The end of a server whose engine is idle and whose client still reads."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.serving import server as module
from conveyor_engine.serving.engine_client import EngineClient

MUCH_BYTES = 64 << 20  # more than lies between two sockets


async def send_much(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"%d" % MUCH_BYTES)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(MUCH_BYTES)})


@dataclass(frozen=True, slots=True)
class Draining:
    reader: asyncio.StreamReader  # of the client
    stopping: module._Stopping
    ending: asyncio.Task[None]


@asynccontextmanager
async def draining() -> AsyncIterator[Draining]:
    """A server whose engine is idle has had a signal since its client began to read, and takes nobody any more."""
    config = uvicorn.Config(send_much, http="httptools", lifespan="off", log_config=None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        server, stopping, served = module._Server(config, None), module._Stopping(), asyncio.Event()
        serving = asyncio.create_task(server.serve([listener]))
        serving.add_done_callback(lambda _: served.set())
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        engine = EngineClient(EngineConfig(model="none"))
        ending = asyncio.create_task(module._until_stopped(engine, server, served, stopping, 100))
        stopping.on_signal("SIGTERM")
        while not server.should_exit:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0)
        yield Draining(reader, stopping, ending)
        writer.close()
        await asyncio.gather(ending, serving)


async def test_a_client_that_reads_slowly_has_the_whole_drain_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.0)
    async with draining() as drain:
        assert len(await drain.reader.read(-1)) == MUCH_BYTES


async def test_a_second_signal_cuts_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.0)
    async with draining() as drain:
        drain.stopping.on_signal("SIGTERM")
        await drain.ending
        assert len(await drain.reader.read(-1)) < MUCH_BYTES
