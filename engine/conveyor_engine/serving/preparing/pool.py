"""The pool of worker processes: a body in, engine requests out. Used by `engine_response`; made by `server`.

A small request finds a worker soon, whatever other clients send: long bodies share one worker, and chats, whose
template may be slow, leave one to completions. A worker that dies is replaced, and its job is refused as too costly.

A worker gets its next job in the turn of the event loop that brings its reply: while many answers stream, a turn takes
milliseconds, and requests come in bursts.
"""

import asyncio
import itertools
import logging
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
_LONG = "long"
_AFTER_DEATH_SECONDS = 0.1  # until a worker that died is replaced, so that no loop of deaths takes a core
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
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

    def __init__(self, on_reply: Callable[["_Worker", Reply], None], on_end: Callable[["_Worker"], None]) -> None:
        self._on_reply = on_reply
        self._on_end = on_end
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
        self._on_end(self)


class WorkerPool:
    """The workers and the lines for them, which `EngineClient.hold_place` bounds."""

    def __init__(self, fork_server: ForkServer, on_broken: Callable[[], None]) -> None:
        """`on_broken` is called when there can be no new workers any more."""
        self._fork_server = fork_server
        self._on_broken = on_broken
        self._numbers = itertools.count()
        self._lines: dict[str, deque[_Order]] = {}  # of long bodies, and of short ones by their kind
        self._idle: set[_Worker] = set()
        self._running: dict[_Worker, _Order] = {}
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for _ in range(NUM_WORKERS):
            await self._add_worker()

    async def stop(self) -> None:
        """Ends the workers and the fork server."""
        self._fork_server.close()
        for starting in self._starting:
            starting.cancel()
        workers = (*self._idle, *self._running)
        self._idle.clear()
        self._running.clear()  # so that nobody replaces them
        for worker in workers:
            worker.close()

    async def prepare(self, job: Job) -> AnyPrepared:
        """Raises what the job failed with. If this call is cancelled, a worker that has begun goes on to the end."""
        order = _Order(next(self._numbers), job, asyncio.get_running_loop().create_future())
        line = self._lines.setdefault(_LONG if order.is_long else job.kind, deque())
        line.append(order)
        self._run_next()
        try:
            reply = await order.reply
        except asyncio.CancelledError:
            if order in line:
                line.remove(order)
            raise
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
        """Gives idle workers those that may run, of the heads of lines the one that came first."""
        while self._idle and (lines := [line for line in self._lines.values() if line and self._may_run(line[0])]):
            order = min(lines, key=lambda line: line[0].number).popleft()
            worker = self._idle.pop()
            self._running[worker] = order
            worker.run(order.job)

    def _may_run(self, order: _Order) -> bool:
        running = self._running.values()
        if order.is_long and any(other.is_long for other in running):
            return False
        return not order.is_chat or sum(other.is_chat for other in running) < _NUM_CHAT_WORKERS

    def _on_reply(self, worker: _Worker, reply: Reply) -> None:
        self._conclude(worker, reply)
        if reply.retires:
            worker.close()
            self._replace()
        else:
            self._idle.add(worker)
        self._run_next()

    def _on_end(self, worker: _Worker) -> None:
        """It was told to end, and is in no list any more, or it has died."""
        if worker in self._idle or worker in self._running:
            self._idle.discard(worker)
            self._conclude(worker, None)
            self._replace(_AFTER_DEATH_SECONDS)
            self._run_next()

    def _conclude(self, worker: _Worker, reply: Reply | None) -> None:
        order = self._running.pop(worker, None)
        if order is not None and not order.reply.done():
            order.reply.set_result(reply)

    def _replace(self, wait_seconds: float = 0.0) -> None:
        starting = asyncio.create_task(self._add_worker(wait_seconds))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _add_worker(self, wait_seconds: float = 0.0) -> None:
        await asyncio.sleep(wait_seconds)
        try:
            connection = self._fork_server.start_worker()
        except OSError:
            _log.critical('event=fork_server_ended message="this server drains, ends and must be started anew"')
            self._on_broken()
            return
        loop = asyncio.get_running_loop()
        _, worker = await loop.create_connection(lambda: _Worker(self._on_reply, self._on_end), sock=connection)
        self._idle.add(worker)
        self._run_next()
