"""The pool of worker processes that turn bodies into engine requests. Used by `engine_response`; created by `server`.

`lanes` decides which job a worker gets, so costly requests cannot occupy all workers. A body whose form was too costly
within the last minute is rejected without a worker.

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
import logging
import os
import signal
from collections.abc import Callable
from typing import cast

import msgspec

from conveyor_engine.errors import ErrorCode, Unavailable
from conveyor_engine.serving.preparing.costly_forms import CostlyForms, form_too_costly
from conveyor_engine.serving.preparing.jobs import FilesWanted, Lane, Prepared, find_kind
from conveyor_engine.serving.preparing.lanes import Lines, Order
from conveyor_engine.serving.preparing.process import (
    ForkServer,
    cpu_seconds,
    deadline_seconds,
    too_costly,
    used_cpu_seconds,
)
from conveyor_engine.wire.frames import FrameReader, encode_frame
from conveyor_engine.wire.worker import Bug, Failure, Job, Reply, Started, Wanted, from_worker_decoder

NUM_WORKERS = 3
START_SECONDS = 30.0  # the most that a new worker may take to send its first message
_AFTER_DEATH_SECONDS = 0.1  # wait before a dead worker is replaced, so that a loop of deaths does not use up a core
_FORM_REJECTED = Reply(Failure.of(form_too_costly()))
_log = logging.getLogger(__name__)


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
        self._lines = Lines(NUM_WORKERS)
        self._costly_forms = CostlyForms()
        self._workers: set[_Worker] = set()  # the workers to replace when they end
        self._idle: set[_Worker] = set()
        self._running: dict[_Worker, Order] = {}
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
        """Run the job in a worker and return the prepared request. Raises the error with which the job failed, or
        FilesWanted.

        If this call is cancelled, a job that a worker has begun still runs to its end.
        """
        order = Order(job, asyncio.get_running_loop().create_future())
        if not self._reject_known(order):
            self._lines.add(order)
            self._run_next()
        try:
            reply = await order.reply
        except asyncio.CancelledError:
            self._lines.discard(order)
            raise
        match reply:
            case None:
                raise too_costly(job)
            case Reply(Failure() as failure):
                raise failure.error()
            case Reply(Bug(what)):
                raise RuntimeError(f"a worker failed: {what}")
            case Reply(Wanted(names)):
                raise FilesWanted(names)
            case Reply(bytes() as encoded):
                prepared: Prepared = msgspec.msgpack.decode(encoded, type=find_kind(job).prepared)
                return prepared
        raise AssertionError(reply)

    def _run_next(self) -> None:
        """Send jobs to idle workers."""
        while self._idle and (order := self._lines.take_next(self._running.values())) is not None:
            if not self._reject_known(order):
                worker = self._idle.pop()
                self._running[worker] = order
                order.began = asyncio.get_running_loop().time()
                worker.run(order.job)

    def _reject_known(self, order: Order) -> bool:
        """Reject the order if its form is known to be too costly. Returns whether it was rejected."""
        is_known = Lane.FORMS in order.lanes and self._costly_forms.has(order.job.body)
        if is_known and not order.reply.done():
            order.reply.set_result(_FORM_REJECTED)
        return is_known

    def _is_form_too_costly(self, order: Order, reply: Reply | None) -> bool:
        """Return whether the order's form used up the job's CPU time. A worker that died sooner had another cause."""
        if reply is None:
            is_costly = asyncio.get_running_loop().time() - order.began >= cpu_seconds(order.job)
        else:
            is_costly = isinstance(reply.result, Failure) and reply.result.code == ErrorCode.PROMPT_TOO_COSTLY
        return is_costly and Lane.FORMS in order.lanes and self._costly_forms.note(order.job.body)

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
        _log.error("event=worker_overdue pid=%d", worker.pid or 0)  # 0: it has not started
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
        if (order := self._running.pop(worker, None)) is None:
            return
        is_rejected = self._is_form_too_costly(order, reply)
        if not order.reply.done():
            order.reply.set_result(_FORM_REJECTED if is_rejected else reply)

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
