"""One worker per dirty key, at most so many at once, with exponential backoff and jitter.

`handlers` marks keys, `reconcile` does the work. A key is worked on by one task at a time; what marks it meanwhile
leads to one more round. A key that is clean costs nothing. Knows nothing of Kubernetes.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from conveyor_operator.errors import ApiError, Unavailable
from conveyor_operator.metrics import Metrics

Key = tuple[str, str]
"""(namespace, name)"""

logger = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 0.2
_MAX_DELAY_SECONDS = 60.0


@dataclass(slots=True)
class _Worker:
    task: asyncio.Task[None] | None = None
    dirty: bool = True
    generation: int | None = None
    hurry: asyncio.Event | None = None
    failures: int = 0
    started: float | None = None


class Workers:
    """Runs `reconcile(key)` until it returns True; False or an exception means: again, after a while."""

    def __init__(self, reconcile: Callable[[Key], Awaitable[bool]], metrics: Metrics, limit: int) -> None:
        self._reconcile = reconcile
        self._metrics = metrics
        self._slots = asyncio.Semaphore(limit)
        self._workers: dict[Key, _Worker] = {}
        self._stopped = False

    def mark(self, key: Key, *, generation: int | None = None) -> None:
        """This key may need work. A new `generation` means that its spec changed: that cuts a backoff short."""
        if self._stopped:
            return
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = _Worker(generation=generation)
            worker.task = asyncio.create_task(self._work(key, worker), name=f"reconcile {key[0]}/{key[1]}")
            return
        worker.dirty = True
        if generation is not None and generation != worker.generation:
            worker.generation = generation
            if worker.hurry is not None:
                worker.hurry.set()

    def cancel(self, key: Key) -> None:
        """The object is gone: stop at once, wherever the work is."""
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
        """How long the slowest reconcile of this moment has been running; 0 if none runs."""
        now = time.monotonic()
        return max((now - w.started for w in self._workers.values() if w.started is not None), default=0.0)

    async def _work(self, key: Key, worker: _Worker) -> None:
        try:
            while worker.dirty:
                with self._metrics.queue_depth.track_inprogress():
                    await self._slots.acquire()
                try:
                    worker.dirty = False
                    delay = await self._run(key, worker)
                finally:
                    self._slots.release()
                if delay is not None:
                    worker.dirty = True
                    await self._back_off(worker, delay)
        finally:
            if self._workers.get(key) is worker:
                del self._workers[key]

    async def _run(self, key: Key, worker: _Worker) -> float | None:
        """One reconcile; returns the delay before the next one, None if none is needed."""
        worker.started = time.monotonic()
        asked_delay: float | None = None
        try:
            with self._metrics.busy_workers.track_inprogress(), self._metrics.reconcile_seconds.time():
                done = await self._reconcile(key)
            self._metrics.reconciles.labels("done" if done else "retry").inc()
            if done:
                worker.failures = 0
                return None
        except ApiError as error:
            self._metrics.reconciles.labels("error").inc()
            asked_delay = error.retry_after_seconds if isinstance(error, Unavailable) else None
            logger.warning("reconcile failed key=%s/%s status=%s error=%r", *key, error.status, error.message)
        except Exception:  # the one broad one: a bug with one service must not stop the others
            self._metrics.reconciles.labels("error").inc()
            logger.exception("reconcile crashed key=%s/%s", *key)
        finally:
            worker.started = None
        worker.failures += 1
        return max(backoff_seconds(worker.failures), asked_delay or 0.0)

    async def _back_off(self, worker: _Worker, delay_seconds: float) -> None:
        worker.hurry = asyncio.Event()
        try:
            async with asyncio.timeout(delay_seconds):
                await worker.hurry.wait()
            worker.failures = 0
        except TimeoutError:
            pass
        finally:
            worker.hurry = None


def backoff_seconds(failures: int) -> float:
    """Delay after that many failures in a row: doubled each time up to a minute, less up to a quarter by chance."""
    full = min(_MAX_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2.0 ** min(failures - 1, 16))
    return full * random.uniform(0.75, 1.0)
