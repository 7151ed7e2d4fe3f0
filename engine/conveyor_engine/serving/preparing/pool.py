"""The pool of worker processes: a body in, engine requests out. Used by `engine_response`; made by `server`.

A small request finds a worker soon, whatever other clients send: long bodies share one worker, and chats, whose
template may be slow, leave one to completions. A worker that dies is replaced, and its job is refused as too costly.

A worker gets its next job in the turn of the event loop that brings its reply: while many answers stream, a turn takes
milliseconds, and requests come in bursts.
"""

import asyncio
import itertools
import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from conveyor_engine.serving.preparing.prepare import Job, Prepared
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
from conveyor_engine.wire.messages import FrameReader

NUM_WORKERS = 3
_NUM_CHAT_WORKERS = 2
_LONG_BYTES = 256 * 2**10
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    number: int  # in the order of arrival
    job: Job
    reply: asyncio.Future[Reply | None]  # None: the worker died

    @property
    def is_long(self) -> bool:
        return len(self.job.body) > _LONG_BYTES

    @property
    def is_chat(self) -> bool:
        return self.job.kind == "chat"


class _Worker(asyncio.Protocol):
    """The socket of one process, which does one job at a time."""

    def __init__(self, on_reply: Callable[["_Worker", Reply | None], None]) -> None:
        """`on_reply` gets each reply, and None when the process has ended."""
        self._on_reply = on_reply
        self._frames = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def run(self, job: Job) -> None:
        self._transport.write(frame(encode(job)))

    def close(self) -> None:
        """The process exits."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._on_reply(self, reply_decoder.decode(payload))

    def connection_lost(self, _: Exception | None) -> None:
        self._on_reply(self, None)


class WorkerPool:
    """The workers and the lines for them, which `EngineClient.hold_place` bounds."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._numbers = itertools.count()
        self._lines: dict[tuple[bool, bool], deque[_Task]] = {}  # by whether a task is long, and a chat
        self._idle: set[_Worker] = set()
        self._running: dict[_Worker, _Task] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def start(self) -> None:
        for _ in range(NUM_WORKERS):
            await self._add_worker()

    async def stop(self) -> None:
        """Ends the workers and the fork server."""
        self._stopped = True
        self._fork_server.close()
        for starting in self._starting:
            starting.cancel()
        for worker in (*self._idle, *self._running):
            worker.close()

    async def prepare(self, job: Job) -> AnyPrepared:
        """Raises what the job failed with. If this call is cancelled, a worker that has begun goes on to the end."""
        task = _Task(next(self._numbers), job, asyncio.get_running_loop().create_future())
        line = self._lines.setdefault((task.is_long, task.is_chat), deque())
        line.append(task)
        self._run_next()
        try:
            reply = await task.reply
        finally:
            if task in line:
                line.remove(task)
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

    def _run_next(self) -> None:
        """Gives idle workers those tasks that may run, first come, first served."""
        while self._idle and (lines := [line for line in self._lines.values() if line and self._may_run(line[0])]):
            task = min(lines, key=lambda line: line[0].number).popleft()
            worker = self._idle.pop()
            self._running[worker] = task
            worker.run(task.job)

    def _may_run(self, task: _Task) -> bool:
        running = self._running.values()
        if task.is_long and any(other.is_long for other in running):
            return False
        return not task.is_chat or sum(other.is_chat for other in running) < _NUM_CHAT_WORKERS

    def _on_reply(self, worker: _Worker, reply: Reply | None) -> None:
        was_idle, task = worker in self._idle, self._running.pop(worker, None)
        if task is not None and not task.reply.done():
            task.reply.set_result(reply)
        if reply is not None and not reply.retires:
            self._idle.add(worker)
        elif was_idle or task is not None:  # else it ends as it was told to
            self._idle.discard(worker)
            worker.close()
            self._replace()
        self._run_next()

    def _replace(self) -> None:
        if not self._stopped:
            starting = asyncio.create_task(self._add_worker())
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)

    async def _add_worker(self) -> None:
        try:
            connection = self._fork_server.start_worker()
        except OSError:
            _log.critical('event=fork_server_ended message="this server drains, ends and must be started anew"')
            os.kill(os.getpid(), signal.SIGTERM)
            return
        loop = asyncio.get_running_loop()
        _, worker = await loop.create_connection(lambda: _Worker(self._on_reply), sock=connection)
        self._idle.add(worker)
        self._run_next()
