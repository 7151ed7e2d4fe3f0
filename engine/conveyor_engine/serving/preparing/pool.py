"""The pool of worker processes: a body in, engine requests out. Used by `engine_response`; made by `server`.

A small request finds a worker soon, whatever other clients send: long bodies share one worker, and chats, whose
template may be slow, leave one to completions. A worker that dies is replaced, and its job is refused as too costly.
"""

import asyncio
import contextlib
import logging
import os
import signal
import struct
from dataclasses import dataclass

from conveyor_engine.serving.preparing.prepare import Job, Kind, Prepared
from conveyor_engine.serving.preparing.prepare_embeddings import PreparedEmbeddings
from conveyor_engine.serving.preparing.process import (
    AnyPrepared,
    Bug,
    Failure,
    ForkServer,
    Reply,
    encode,
    frame,
    reply_decoder,
    too_costly,
)

NUM_WORKERS = 3
_NUM_CHAT_WORKERS = 2
_LONG_BYTES = 256 * 2**10
_LENGTH = struct.Struct("!I")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Worker:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def run(self, job: Job) -> Reply | None:
        """None if the worker died meanwhile."""
        self.writer.write(frame(encode(job)))
        try:
            await self.writer.drain()
            (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
            return reply_decoder.decode(await self.reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None


class WorkerPool:
    """The workers and the queue for them, which `EngineClient.hold_place` bounds."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._workers: set[_Worker] = set()
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._long = asyncio.Semaphore(1)
        self._by_kind: dict[Kind, asyncio.Semaphore] = {"chat": asyncio.Semaphore(_NUM_CHAT_WORKERS)}
        self._running: set[asyncio.Task[Reply | None]] = set()

    async def start(self) -> None:
        for _ in range(NUM_WORKERS):
            await self._add_worker()

    async def stop(self) -> None:
        """Ends the workers and the fork server."""
        self._fork_server.close()
        for task in self._running:
            task.cancel()
        for worker in self._workers:
            worker.writer.close()

    async def prepare(self, job: Job) -> AnyPrepared:
        """Raises what the job failed with. If this call is cancelled, the worker goes on to the end of the job."""
        async with contextlib.AsyncExitStack() as stack:
            if len(job.body) > _LONG_BYTES:
                await stack.enter_async_context(self._long)
            if job.kind in self._by_kind:
                await stack.enter_async_context(self._by_kind[job.kind])
            worker = await self._idle.get()
            task = asyncio.create_task(self._run(worker, job, stack.pop_all()))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        reply = await asyncio.shield(task)
        match reply:
            case None:
                raise too_costly()
            case Reply(Failure() as failure):
                raise failure.error()
            case Reply(Bug(what)):
                raise RuntimeError(f"a worker failed: {what}")
            case Reply(Prepared() | PreparedEmbeddings() as prepared):
                return prepared
        raise AssertionError(reply)

    async def _run(self, worker: _Worker, job: Job, places: contextlib.AsyncExitStack) -> Reply | None:
        async with places:
            reply = await worker.run(job)
            if reply is None or reply.retires:
                worker.writer.close()
                self._workers.discard(worker)
                await self._add_worker()
            else:
                self._idle.put_nowait(worker)
            return reply

    async def _add_worker(self) -> None:
        try:
            connection = self._fork_server.start_worker()
        except OSError:
            _log.critical('event=fork_server_ended message="this server drains, ends and must be started anew"')
            os.kill(os.getpid(), signal.SIGTERM)
            return
        worker = _Worker(*await asyncio.open_connection(sock=connection))
        self._workers.add(worker)
        self._idle.put_nowait(worker)
