"""Tests which job a worker gets next, in a pool with fake workers."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from tests.engine.builders import make_facts

from conveyor_engine.errors import InvalidRequest, Unavailable, UnknownModel
from conveyor_engine.serving.preparing import pool as pool_module
from conveyor_engine.serving.preparing.pool import NUM_WORKERS, WorkerPool
from conveyor_engine.serving.preparing.process import ForkServer, used_cpu_seconds
from conveyor_engine.wire.frames import FrameReader, encode_frame
from conveyor_engine.wire.worker import Failure, Job, Reply, Started

LONG = 300 * 2**10
NO_PROCESS = 2**22 + 1  # more than any pid


class Workers(asyncio.Protocol):
    """A fork server whose workers' jobs, by name, wait for `answer`."""

    def __init__(self) -> None:
        self.jobs: dict[str, asyncio.WriteTransport] = {}  # that were given to a worker and are not answered
        self.num_started = 0
        self.is_gone = False
        self.pid = 0  # that the next workers say they have; 0: they say nothing, as if they never ran
        self.silent: list[asyncio.WriteTransport] = []  # those

    def start_worker(self) -> socket.socket:
        if self.is_gone:
            raise BrokenPipeError
        self.num_started += 1
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        self._opening = loop.create_task(loop.create_connection(lambda: _Process(self), sock=theirs))
        return ours

    def close(self) -> None:
        pass

    def answer(self, name: str, *, retires: bool = False, error: InvalidRequest | None = None) -> None:
        reply = Reply(Failure.of(error or UnknownModel(name)), retires)
        self.jobs.pop(name).write(encode_frame(reply))

    def start(self, transport: asyncio.WriteTransport) -> None:
        transport.write(encode_frame(Started(self.pid)))

    def kill(self, name: str) -> None:
        self.jobs.pop(name).close()


class _Process(asyncio.Protocol):
    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._frames = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        if self._workers.pid:
            self._workers.start(self._transport)
        else:
            self._workers.silent.append(self._transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            job = msgspec.msgpack.decode(payload, type=Job)
            self._workers.jobs[job.body.strip().decode()] = self._transport


class Pool:
    def __init__(self) -> None:
        self.workers = Workers()
        self.workers.pid = NO_PROCESS
        self.broken = 0
        self.pool = WorkerPool(cast(ForkServer, self.workers), self._break)
        self.prepared: dict[str, asyncio.Task[Any]] = {}

    def _break(self) -> None:
        self.broken += 1

    def send(self, *names: str, kind: str = "completion", task: str = "generate", size: int = 0) -> None:
        for name in names:
            job = Job(kind, make_facts(task=task), 1, 0.0, name.encode().ljust(size))
            self.prepared[name] = asyncio.create_task(self.pool.prepare(job))

    async def given(self, *names: str) -> None:
        """Wait until exactly these jobs are at workers."""
        await self.until(lambda: set(self.workers.jobs) == set(names))
        await asyncio.sleep(0.01)
        assert set(self.workers.jobs) == set(names)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  what is looked at has no event
                await asyncio.sleep(0.001)


@asynccontextmanager
async def started() -> AsyncIterator[Pool]:
    pool = Pool()
    await pool.pool.start()
    try:
        yield pool
    finally:
        await pool.pool.stop()
        for task in pool.prepared.values():
            task.cancel()
        await asyncio.gather(*pool.prepared.values(), return_exceptions=True)


async def test_who_came_first_goes_first() -> None:
    async with started() as pool:
        pool.send(*"abcdef")
        await pool.given("a", "b", "c")
        pool.workers.answer("b")
        await pool.given("a", "c", "d")
        with pytest.raises(UnknownModel, match="b"):
            await pool.prepared["b"]


async def test_chats_leave_a_worker_to_completions() -> None:
    async with started() as pool:
        pool.send("chat 1", "chat 2", "chat 3", kind="chat")
        await pool.given("chat 1", "chat 2")
        pool.send("completion")
        await pool.given("chat 1", "chat 2", "completion")
        pool.workers.answer("chat 1")
        await pool.given("chat 2", "chat 3", "completion")


async def test_a_long_chat_waits_for_no_younger_one() -> None:
    """Neither a long completion nor a short chat that came later takes the place that it lacks."""
    async with started() as pool:
        pool.send("chat", kind="chat")
        pool.send("long", size=LONG)
        await pool.given("chat", "long")
        pool.send("long chat", kind="chat", size=LONG)
        pool.send("later long", size=LONG)
        pool.send("later chat", kind="chat")
        pool.workers.answer("long")
        await pool.given("chat", "long chat")
        pool.workers.answer("chat")
        await pool.given("later chat", "long chat")
        pool.workers.answer("long chat")
        await pool.given("later chat", "later long")


async def test_long_bodies_and_chats_leave_a_worker_to_plain_bodies() -> None:
    async with started() as pool:
        pool.send("chat 1", "chat 2", kind="chat")
        pool.send("long", size=LONG)
        pool.send("plain")
        await pool.given("chat 1", "chat 2", "plain")
        pool.workers.answer("chat 1")
        await pool.given("chat 2", "plain", "long")


async def test_who_leaves_the_line_is_not_prepared_and_who_is_at_a_worker_keeps_it_busy() -> None:
    async with started() as pool:
        pool.send(*"abcde")
        await pool.given("a", "b", "c")
        for name in "ad":
            pool.prepared[name].cancel()
        pool.workers.answer("b")
        await pool.given("a", "c", "e")
        pool.workers.answer("a")
        pool.send("f")
        await pool.given("c", "e", "f")


@pytest.mark.parametrize("dies", [True, False])
async def test_a_worker_that_dies_or_retires_is_replaced_and_costs_at_most_its_own_job(dies: bool) -> None:
    async with started() as pool:
        pool.send(*"abcd")
        await pool.given("a", "b", "c")
        if dies:
            pool.workers.kill("a")
        else:
            pool.workers.answer("a", retires=True)
        refusal = (InvalidRequest, "could not be rendered") if dies else (UnknownModel, "a")
        with pytest.raises(refusal[0], match=refusal[1]):
            await pool.prepared["a"]
        await pool.given("b", "c", "d")
        assert pool.workers.num_started == NUM_WORKERS + 1


async def test_without_a_fork_server_the_pool_says_so_and_goes_on_with_what_it_has() -> None:
    async with started() as pool:
        pool.send(*"abcd")
        await pool.given("a", "b", "c")
        pool.workers.is_gone = True
        pool.workers.kill("a")
        await pool.until(lambda: pool.broken)
        await pool.given("b", "c")
        pool.workers.answer("b")
        await pool.given("c", "d")


async def test_a_pool_that_is_stopped_starts_no_workers() -> None:
    async with started() as pool:
        pool.send("a")
        await pool.given("a")
        await pool.pool.stop()
        await asyncio.sleep(0.2)
        assert (pool.workers.num_started, pool.broken) == (NUM_WORKERS, 0)


async def test_a_worker_that_is_silent_is_killed_and_its_job_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    async with started() as pool:
        await pool.until(lambda: all(worker.pid for worker in pool.pool._workers))
        for worker in pool.pool._workers:
            worker.pid = process.pid
        with monkeypatch.context() as patch:
            patch.setattr(pool_module, "deadline_seconds", lambda _: 0.0)
            pool.send("a")
            with pytest.raises(Unavailable, match="send the request again"):
                await pool.prepared["a"]
        assert await process.wait() == -signal.SIGKILL
        assert pool.pool.is_alive, "two workers are left"
        pool.workers.answer("a")  # a reply that was on its way makes no idle worker of a dead one
        pool.send(*"bcd")
        await pool.given("b", "c")


async def test_a_worker_that_uses_cpu_time_is_slow_and_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    async with started() as pool:
        await pool.until(lambda: all(worker.pid for worker in pool.pool._workers))
        for worker in pool.pool._workers:
            worker.pid = busy.pid
        looks: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr(pool_module, "deadline_seconds", lambda _: 0.05)
            patch.setattr(pool_module, "used_cpu_seconds", lambda pid: looks.append(used_cpu_seconds(pid)) or looks[-1])
            pool.send("a")
            await pool.until(lambda: looks and looks[-1] > looks[0] + 0.2)
            assert not pool.prepared["a"].done()
            busy.send_signal(signal.SIGSTOP)
            with pytest.raises(Unavailable, match="send the request again"):
                await pool.prepared["a"]
        assert await busy.wait() == -signal.SIGKILL


async def test_while_no_worker_can_be_killed_or_started_the_pool_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "START_SECONDS", 0.0)
    pool = Pool()
    pool.workers.pid = 0
    await pool.pool.start()
    await pool.until(lambda: not pool.pool.is_alive)
    assert pool.workers.num_started == NUM_WORKERS, "processes do not pile up"
    pool.send("a")
    await pool.until(lambda: len(pool.workers.silent) == NUM_WORKERS)
    pool.workers.start(pool.workers.silent[0])
    await pool.given("a")
    assert pool.pool.is_alive
    await pool.pool.stop()
    pool.prepared["a"].cancel()
