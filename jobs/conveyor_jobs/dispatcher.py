"""Sends the requests of a job that have no result yet, and decides what becomes of each one. Called by `job`.

Requests are sent by tasks, at most as many as `concurrency` permits. Requests that have to be sent again go first.
"""

import asyncio
import contextlib
import heapq
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from conveyor_jobs.concurrency import Concurrency, choose_pause
from conveyor_jobs.input_file import InputFile
from conveyor_jobs.request import BatchRequest
from conveyor_jobs.results import Results
from conveyor_jobs.sending import Response, Sender, Verdict
from conveyor_jobs.settings import Settings

logger = logging.getLogger(__name__)

MAX_BODIES_BYTES: Final = 64 << 20  # of the requests that were sent and have no result
_OUTAGE_SECONDS: Final = 300.0


class JobRefused(Exception):
    """The service, or a proxy before it, accepts no request of this job, or there is no service.

    lasts: another start would get the same.
    """

    def __init__(self, message: str, *, lasts: bool) -> None:
        super().__init__(message)
        self.lasts = lasts


@dataclass(slots=True)
class _Pending:
    """A request without a result, and what its attempts have met."""

    number: int
    request: BatchRequest
    num_failures: int = 0
    failed_at: float = float("-inf")  # the last failure that counted
    num_answers: int = 0  # of the whole job, at that time


@dataclass(slots=True)
class Dispatcher:
    """The requests of one start of a job."""

    settings: Settings
    input_file: InputFile
    results: Results
    concurrency: Concurrency = field(init=False)
    held_by: str = ""  # why the last request has to wait, for the log
    failure: BaseException | None = None
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _again: list[tuple[float, int, _Pending]] = field(default_factory=list)  # a heap: from when each may be sent again
    _bodies_bytes: int = 0  # of the requests that were sent and have no result
    _num_answers: int = 0  # good ones, of this start
    _changed: asyncio.Event = field(default_factory=asyncio.Event)  # a request has ended, or the job must stop
    _stopping: bool = False
    _began_at: float = field(default_factory=time.monotonic)
    _is_found: bool = field(init=False)  # the service has responded, now or in an earlier start of the job

    def __post_init__(self) -> None:
        self.concurrency = Concurrency(self.settings.max_concurrency)
        self._is_found = self.results.counts.done > 0

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def send_all(self, sender: Sender) -> None:
        """Return when all requests have results, or when the job must stop."""
        with contextlib.closing(self.input_file.read()) as requests:
            left = (_Pending(*each) for each in requests if not self.results.is_done(each[0]))
            new = next(left, None)
            while not self._stopping and (new or self._again or self._running):
                now = time.monotonic()
                pending = self._find_next(new, now)
                if pending is None:
                    await self._wait_for_change(now)
                    continue
                if pending is new:
                    self._bodies_bytes += len(pending.request.body)
                    new = next(left, None)
                else:
                    heapq.heappop(self._again)
                task = asyncio.create_task(self._send(sender, pending))
                self._running.add(task)
                task.add_done_callback(self._note_end)

    def _find_next(self, new: _Pending | None, now: float) -> _Pending | None:
        """Return the request to send now, if the limits permit one: first those that were sent before."""
        if len(self._running) >= self.concurrency.limit or now < self.concurrency.open_at:
            return None
        if self._again and self._again[0][0] <= now:
            return self._again[0][-1]
        if new is None or len(self._again) >= self.settings.max_concurrency:
            return None
        fits = not self._bodies_bytes or self._bodies_bytes + len(new.request.body) <= MAX_BODIES_BYTES
        return new if fits else None

    async def _wait_for_change(self, now: float) -> None:
        """Wait until a request ends, a pause is over or the job must stop."""
        at = self.concurrency.open_at
        if at <= now and self._again and len(self._running) < self.concurrency.limit:
            at = self._again[0][0]
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at - now if at > now else None):
                await self._changed.wait()

    async def _send(self, sender: Sender, pending: _Pending) -> None:
        sent_at, num_answers = time.monotonic(), self._num_answers
        response = await sender.send(pending.request)
        self._note(pending, response, sent_at, others_work=self._num_answers > num_answers)

    def _note(self, pending: _Pending, response: Response, sent_at: float, *, others_work: bool) -> None:
        """Write the result, or plan the next attempt. Raises JobRefused.

        others_work: whether other requests got good responses meanwhile.
        """
        again_at = now = time.monotonic()
        self._require_service(response, now)
        match response.verdict:
            case Verdict.FULL:
                self.concurrency.note_full(sent_at, now, response.retry_after)
            case Verdict.ABSENT:
                self.concurrency.note_absent(sent_at, now, response.retry_after)
            case Verdict.BROKEN if not self._is_last_failure(pending, response, now):
                again_at += choose_pause(pending.num_failures, response.retry_after)
                if not others_work:
                    self.concurrency.note_absent(sent_at, now, response.retry_after)
            case Verdict.REFUSED if response.status != 403 or not self.results.counts.completed:
                problem = f"{pending.request.path} got {response.status}: {response.body[:300]!r}"
                raise JobRefused(problem, lasts=response.status not in (401, 403))
            case _:
                if response.is_good:
                    self._num_answers += 1
                    self.concurrency.note_answer()
                self.results.add(pending.number, pending.request, response)
                self._bodies_bytes -= len(pending.request.body)
                return
        self.held_by = response.describe()
        heapq.heappush(self._again, (again_at, pending.number, pending))

    def _require_service(self, response: Response, now: float) -> None:
        """Raise JobRefused if there has been no service at the job's address for the whole time that it may take."""
        self._is_found = self._is_found or not response.is_of_no_service
        seconds = self.settings.service_timeout_seconds
        if not self._is_found and now - self._began_at >= seconds:
            raise JobRefused(
                f"there is no service at {self.settings.url}, after {seconds:g} s ({response.describe()}): "
                "correct --url, or create the service first",
                lasts=response.status != 0,
            )

    def _is_last_failure(self, pending: _Pending, response: Response, now: float) -> bool:
        """Count the failure, and return whether the request has no attempts left.

        An error with a code comes from a service that works. Without a code, something between may be broken. So such
        a failure counts only if other requests got responses since the last failure, or after _OUTAGE_SECONDS.
        """
        others_work = self._num_answers > pending.num_answers or now >= pending.failed_at + _OUTAGE_SECONDS
        if response.code or others_work:
            pending.num_failures += 1
            pending.failed_at, pending.num_answers = now, self._num_answers
        return pending.num_failures >= self.settings.max_attempts

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._stopping = True
        self._changed.set()

    def stop(self) -> None:
        if self._stopping:  # a second signal skips the wait
            for task in self._running:
                task.cancel()
        self._stopping = True
        self._changed.set()

    async def end_requests(self, expired: bool) -> None:
        """Give requests in flight some time to end, unless the window has ended or nothing can be written."""
        if self._running and not expired and not isinstance(self.failure, OSError):
            logger.info("event=stopping in_flight=%d grace_seconds=%g", len(self._running), self.settings.grace_seconds)
            await asyncio.wait(self._running, timeout=self.settings.grace_seconds)
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
