"""Runs a worker for each dirty key, with a limit on concurrent reconciles. Repeats failed reconciles with backoff.

`handlers` marks keys. `reconcile` does the work, and may return a time for the next reconcile. One task at a time works
on a key. If the key is marked meanwhile, one more reconcile follows. A key that is clean and has no scheduled time
costs nothing. This module does not depend on Kubernetes.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from conveyor_operator.errors import ApiError, Unavailable
from conveyor_operator.kinds import Key
from conveyor_operator.loop.slots import Slots, Turn
from conveyor_operator.metrics import Metrics
from conveyor_process.tracing import enter_trace

if TYPE_CHECKING:
    from conveyor_process.otlp import OpenSpan, Tracer

logger = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 0.2
_MAX_DELAY_SECONDS = 60.0
_LONGEST_WAIT_SECONDS = 300.0  # a limit on waits for a time of day, in case the clock is set back


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a reconcile. By default nothing is left to do."""

    refused: bool = False
    """A call was refused: the reconcile is repeated with the backoff of an error."""
    requeue_at: datetime | None = None
    """The reconcile is repeated at this time, or earlier if the key is marked."""


class _Worker:
    """The work on one key. `dirty`: marked since its last reconcile began. `urgent`: one of these marks was urgent."""

    def __init__(self, generation: int | None, urgent: bool) -> None:
        self.task: asyncio.Task[None] | None = None
        self.dirty = True
        self.urgent = urgent
        self.turn: Turn | None = None
        self.marked = asyncio.Event()
        self.generation = generation
        self.respecified = asyncio.Event()
        self.failures = 0
        self.started: float | None = None


class Workers:
    """Runs `reconcile(key)` for marked keys, and repeats it after an exception or if the outcome asks for it."""

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[Outcome]],
        metrics: Metrics,
        limit: int,
        tracer: "Tracer | None" = None,
    ) -> None:
        """tracer: None if traces are not exported."""
        self._reconcile = reconcile
        self._metrics = metrics
        self._tracer = tracer
        self._slots = Slots(limit, max(1, limit // 2))
        self._workers: dict[Key, _Worker] = {}
        self._started = self._stopped = False

    def start(self) -> None:
        """Start to reconcile. Until then keys are only marked, as in an operator on standby."""
        self._started = True
        self._slots.open()

    def mark(self, key: Key, *, generation: int | None = None, urgent: bool = True) -> None:
        """Queue a reconcile for this key. A new `generation` means that the spec changed, and ends a backoff early.

        Keys that are not urgent wait for urgent ones. A full resync marks keys without a known change as not urgent.
        """
        if self._stopped:
            return
        urgent = urgent and self._started
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = _Worker(generation, urgent)
            worker.task = asyncio.create_task(self._work(key, worker), name=f"reconcile {key.kind.kind} {key}")
            return
        worker.dirty = True
        worker.marked.set()
        if urgent:
            worker.urgent = True
            if worker.turn is not None:
                self._slots.make_urgent(worker.turn)
        if generation is not None and generation != worker.generation:
            worker.generation = generation
            worker.respecified.set()

    def cancel(self, key: Key) -> None:
        """Stop the work on a key at once, because its object no longer exists."""
        worker = self._workers.pop(key, None)
        if worker is not None and worker.task is not None:
            worker.task.cancel()

    async def stop(self) -> None:
        """Cancel everything and wait until it has ended."""
        self._stopped = True
        tasks = [worker.task for worker in self._workers.values() if worker.task is not None]
        self._workers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def longest_run_seconds(self) -> float:
        """Return how long the longest of the current reconciles has been running; 0 if none runs."""
        now = time.monotonic()
        return max((now - w.started for w in self._workers.values() if w.started is not None), default=0.0)

    async def _work(self, key: Key, worker: _Worker) -> None:
        try:
            while worker.dirty:
                worker.turn = self._slots.request(key.namespace, worker.urgent)
                with self._metrics.queue_depth.track_inprogress():
                    await self._slots.take(worker.turn)
                try:
                    worker.dirty = worker.urgent = False
                    worker.marked.clear()
                    worker.respecified.clear()
                    again = await self._run(key, worker)
                finally:
                    self._slots.release(key.namespace)
                if isinstance(again, datetime):
                    seconds = (again - datetime.now(UTC)).total_seconds()
                    await _wait(worker.marked, min(seconds, _LONGEST_WAIT_SECONDS))
                    worker.dirty = True
                elif again is not None:
                    if await _wait(worker.respecified, again):
                        worker.failures = 0
                    worker.dirty = True
        finally:
            if self._workers.get(key) is worker:
                del self._workers[key]

    async def _run(self, key: Key, worker: _Worker) -> float | datetime | None:
        """Run one reconcile. Return the delay before the next one, or its time; None if no other has to follow."""
        worker.started = time.monotonic()
        span = None if self._tracer is None else _begin_span(self._tracer, key, worker.started)
        result = "cancelled"
        requested_delay: float | None = None
        try:
            with self._metrics.busy_workers.track_inprogress(), self._metrics.reconcile_seconds.time():
                outcome = await self._reconcile(key)
            result = "retry" if outcome.refused else "done"
            self._metrics.reconciles.labels(result).inc()
            if not outcome.refused:
                worker.failures = 0
                return outcome.requeue_at
        except ApiError as error:
            result = "error"
            self._metrics.reconciles.labels(result).inc()
            requested_delay = error.retry_after_seconds if isinstance(error, Unavailable) else None
            logger.warning(
                "event=reconcile_failed kind=%s key=%s status=%d error=%s",
                key.kind.kind,
                key,
                error.status,
                error.message,
            )
        except Exception:  # the one broad except: a bug with one resource must not stop the others
            result = "error"
            self._metrics.reconciles.labels(result).inc()
            logger.exception("event=reconcile_crashed kind=%s key=%s", key.kind.kind, key)
        finally:
            worker.started = None
            if span is not None:
                span.end(time.monotonic(), _describe(key, result), result if result == "error" else "")
        worker.failures += 1
        return max(backoff_seconds(worker.failures), requested_delay or 0.0)


def _begin_span(tracer: "Tracer", key: Key, began: float) -> "OpenSpan":
    """Begin the span of a reconcile, whose id its log lines have."""
    span = tracer.start(f"reconcile {key.kind.kind}", began)
    enter_trace(span.header if span.is_recording else "")
    return span


def _describe(key: Key, result: str) -> dict[str, str]:
    """Return the attributes of a reconcile's span."""
    return {
        "k8s.namespace.name": key.namespace,
        "conveyor.kind": key.kind.kind,
        "conveyor.name": key.name,
        "conveyor.result": result,
    }


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event. Return whether it came within that time."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return False
    return True


def backoff_seconds(failures: int) -> float:
    """Return the delay after that many failures in a row: doubled each time up to a minute, minus up to 25 % jitter."""
    full = min(_MAX_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2.0 ** min(failures - 1, 16))
    return full * random.uniform(0.75, 1.0)
