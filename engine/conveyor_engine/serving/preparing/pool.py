"""The pool of worker processes that turn bodies into engine requests. Used by `engine_response`; created by `server`.

Large or slow requests cannot occupy all workers. At most one worker runs long bodies, and chats leave one worker for
completions, because a chat template may be slow.

If a worker dies, the pool replaces it and rejects its job as too costly. If a worker sends nothing and uses no CPU time
until its deadline (it was stopped, or is stuck in the kernel), the pool kills and replaces it, and the client may
retry. A worker that used CPU time is only slow, because others use the CPUs. It gets a further deadline, and its limit
on CPU time ends its job. A worker that cannot be killed is not replaced, so the number of processes is bounded.
`is_alive` is false once all workers are past their deadlines and have not ended.

A worker gets its next job in the same iteration of the event loop in which its reply arrives. Requests arrive in
bursts, and while many answers stream, each iteration takes milliseconds.
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
from conveyor_engine.serving.preparing.process import ForkServer, deadline_seconds, too_costly, used_cpu_seconds
from conveyor_engine.wire.frames import FrameReader, encode_frame
from conveyor_engine.wire.worker import Bug, Failure, Job, Reply, Started, from_worker_decoder

NUM_WORKERS = 3
_NUM_TEMPLATE_WORKERS = 2
_LONG_BYTES = 256 * 2**10
_LONG = "long"
START_SECONDS = 30.0  # the most that a new worker may take to send its first message
_AFTER_DEATH_SECONDS = 0.1  # wait before a dead worker is replaced, so that a loop of deaths does not use up a core
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
        self.pid: int | None = None  # from the worker's first message
        self._was_killed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._expect_message(START_SECONDS)

    def run(self, job: Job) -> None:
        self._expect_message(deadline_seconds(job))
        self._transport.write(encode_frame(job))

    def _expect_message(self, seconds: float) -> None:
        used = used_cpu_seconds(self.pid)
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._on_deadline, seconds, used)

    def _on_deadline(self, seconds: float, used_before: float) -> None:
        if used_cpu_seconds(self.pid) > used_before:
            self._expect_message(seconds)
        else:
            self._on_overdue(self)

    def kill(self) -> None:
        """Kill the process. Its socket closes when the process has ended.

        A worker without a pid has not started yet and is not killed.
        """
        if self.pid is not None:
            self._was_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the socket, whereupon the process exits."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            if self._was_killed:
                return  # its job has already failed
            self._deadline.cancel()
            message = from_worker_decoder.decode(payload)
            if isinstance(message, Started):
                self.pid = message.pid
            self._on_message(self, message)

    def connection_lost(self, _: Exception | None) -> None:
        self._deadline.cancel()
        self._on_end(self)


class WorkerPool:
    """The workers and the queues of jobs for them. `EngineClient.hold_place` limits the number of queued jobs."""

    def __init__(self, fork_server: ForkServer, on_broken: Callable[[], None]) -> None:
        """on_broken: called when the fork server has ended, so that no worker can be started any more."""
        self._fork_server = fork_server
        self._on_broken = on_broken
        self._numbers = itertools.count()
        self._lines: dict[str, deque[_Order]] = {}  # one queue of long bodies, and one of short bodies for each kind
        self._workers: set[_Worker] = set()  # the workers to replace when they end
        self._idle: set[_Worker] = set()
        self._running: dict[_Worker, _Order] = {}
        self._overdue: set[_Worker] = set()
        self._starting: set[asyncio.Task[None]] = set()

    @property
    def is_alive(self) -> bool:
        """False once all workers are past their deadlines and have not ended, so that no job can run."""
        return len(self._overdue) < NUM_WORKERS

    async def start(self) -> None:
        for _ in range(NUM_WORKERS):
            await self._add_worker()

    async def stop(self) -> None:
        """End the workers and the fork server."""
        self._fork_server.close()
        for starting in self._starting:
            starting.cancel()
        workers, self._workers = self._workers, set()  # so that `_on_end` does not replace them
        for worker in workers:
            worker.close()

    async def prepare(self, job: Job) -> Prepared:
        """Run the job in a worker and return the prepared request. Raises the error with which the job failed.

        If this call is cancelled, a job that a worker has begun still runs to its end.
        """
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
        """Send jobs to idle workers. The next job is the earliest that is first in its queue and may run now."""
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
        """Fail the worker's job and kill the worker, which is replaced once its process has ended."""
        _log.error("event=worker_overdue pid=%s", worker.pid)
        self._overdue.add(worker)
        order = self._running.pop(worker, None)
        if order is not None and not order.reply.done():
            order.reply.set_exception(Unavailable("the process that reads requests was stuck; send the request again"))
        worker.kill()

    def _on_end(self, worker: _Worker) -> None:
        """Replace the worker if it died. A worker that the pool closed is no longer in `_workers`."""
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
            _log.critical('event=fork_server_ended message="this server drains and exits; it must be restarted"')
            self._on_broken()
            return
        loop = asyncio.get_running_loop()
        _, worker = await loop.create_connection(
            lambda: _Worker(self._on_message, self._on_overdue, self._on_end), sock=connection
        )
        self._workers.add(worker)
