"""The pool of worker processes: a body in, engine requests out. Used by `engine_response`; made by `server`.

A small request finds a worker soon, whatever other clients send: long bodies share one worker, and chats, whose
template may be slow, leave one to completions. A worker that dies is replaced, and its job is refused as too costly.
A worker that is silent past its deadline (stopped, or stuck in the kernel) is killed and replaced, and its job may be
sent again. One that cannot be killed keeps its place, so processes never pile up; if all are like that, `is_alive` is
false.

A worker gets its next job in the turn of the event loop that brings its reply: while many answers stream, a turn takes
milliseconds, and requests come in bursts.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from conveyor_engine.errors import Unavailable
from conveyor_engine.serving.preparing.jobs import Prepared, find_kind
from conveyor_engine.serving.preparing.process import ForkServer, deadline_seconds, too_costly
from conveyor_engine.wire.frames import FrameReader, encode_frame
from conveyor_engine.wire.worker import Bug, Failure, Job, Reply, Started, from_worker_decoder

NUM_WORKERS = 3
_NUM_TEMPLATE_WORKERS = 2
_LONG_BYTES = 256 * 2**10
_LONG = "long"
START_SECONDS = 30.0  # until a new worker has sent its first message
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
    def runs_template(self) -> bool:
        return find_kind(self.job).runs_template


class _Worker(asyncio.Protocol):
    """The socket of one process, which does one job at a time and has a deadline for its next message."""

    def __init__(
        self,
        on_message: Callable[["_Worker", Started | Reply], None],
        on_overdue: Callable[["_Worker"], None],
        on_end: Callable[["_Worker"], None],
    ) -> None:
        self._on_message = on_message
        self._on_overdue = on_overdue
        self._on_end = on_end
        self._frames = FrameReader()
        self.pid: int | None = None  # as it says itself
        self._was_killed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._expect_message(START_SECONDS)

    def run(self, job: Job) -> None:
        self._expect_message(deadline_seconds(job))
        self._transport.write(encode_frame(job))

    def _expect_message(self, seconds: float) -> None:
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._on_overdue, self)

    def kill(self) -> None:
        """Ends the process, whatever it does; its socket closes once it has ended. One without a pid never started."""
        if self.pid is not None:
            self._was_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """The process exits."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            if self._was_killed:
                return  # its job was given up
            self._deadline.cancel()
            message = from_worker_decoder.decode(payload)
            if isinstance(message, Started):
                self.pid = message.pid
            self._on_message(self, message)

    def connection_lost(self, _: Exception | None) -> None:
        self._deadline.cancel()
        self._on_end(self)


class WorkerPool:
    """The workers and the lines for them, which `EngineClient.hold_place` bounds."""

    def __init__(self, fork_server: ForkServer, on_broken: Callable[[], None]) -> None:
        """`on_broken` is called when there can be no new workers any more."""
        self._fork_server = fork_server
        self._on_broken = on_broken
        self._numbers = itertools.count()
        self._lines: dict[str, deque[_Order]] = {}  # of long bodies, and of short ones by their kind
        self._workers: set[_Worker] = set()  # those that are replaced when they end
        self._idle: set[_Worker] = set()
        self._running: dict[_Worker, _Order] = {}
        self._overdue: set[_Worker] = set()
        self._starting: set[asyncio.Task[None]] = set()

    @property
    def is_alive(self) -> bool:
        """Whether a job can still be done: False once all workers are past their deadlines and have not ended."""
        return len(self._overdue) < NUM_WORKERS

    async def start(self) -> None:
        for _ in range(NUM_WORKERS):
            await self._add_worker()

    async def stop(self) -> None:
        """Ends the workers and the fork server."""
        self._fork_server.close()
        for starting in self._starting:
            starting.cancel()
        workers, self._workers = self._workers, set()  # so that nobody replaces them
        for worker in workers:
            worker.close()

    async def prepare(self, job: Job) -> Prepared:
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
                raise too_costly(job)
            case Reply(Failure() as failure):
                raise failure.error()
            case Reply(Bug(what)):
                raise RuntimeError(f"a worker failed: {what}")
            case Reply(bytes() as encoded):
                prepared: Prepared = msgspec.msgpack.decode(encoded, type=find_kind(job).prepared)
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
        return not order.runs_template or sum(other.runs_template for other in running) < _NUM_TEMPLATE_WORKERS

    def _on_message(self, worker: _Worker, message: Started | Reply) -> None:
        self._overdue.discard(worker)  # it has started after all
        if isinstance(message, Reply):
            self._conclude(worker, message)
        if isinstance(message, Reply) and message.retires:
            self._workers.discard(worker)
            worker.close()
            self._replace()
        else:
            self._idle.add(worker)
        self._run_next()

    def _on_overdue(self, worker: _Worker) -> None:
        """Gives up its job, and the worker too: it is replaced once its process has ended."""
        _log.error("event=worker_overdue pid=%s", worker.pid)
        self._overdue.add(worker)
        order = self._running.pop(worker, None)
        if order is not None and not order.reply.done():
            order.reply.set_exception(Unavailable("the process that reads requests was stuck; send the request again"))
        worker.kill()

    def _on_end(self, worker: _Worker) -> None:
        """It was told to end, and is not one of the workers any more, or it has died."""
        if worker in self._workers:
            self._workers.discard(worker)
            self._idle.discard(worker)
            self._overdue.discard(worker)
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
        _, worker = await loop.create_connection(
            lambda: _Worker(self._on_message, self._on_overdue, self._on_end), sock=connection
        )
        self._workers.add(worker)
