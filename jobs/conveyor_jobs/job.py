"""Runs one job: checks the input, sends the requests that have no result yet, reports the progress.

Called by `__main__`. SIGTERM ends the job early: requests in flight have `grace_seconds` to end, and the job continues
when it is started again with the same output folder.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import aiohttp

from conveyor_jobs.concurrency import Concurrency
from conveyor_jobs.input_file import InputError, InputFile, InvalidInput, open_input
from conveyor_jobs.request import BatchRequest, InvalidLine
from conveyor_jobs.results import ERRORS, OUTPUT, Results, ResultsError, hold_lock, read_state, write_state
from conveyor_jobs.sending import JobRefused, Sender
from conveyor_jobs.settings import Settings
from conveyor_protocol.request_headers import CLASS_HEADER

logger = logging.getLogger(__name__)

_SYNC_SECONDS: Final = 1.0
_PROGRESS_SECONDS: Final = 10.0


class ExitCode(IntEnum):
    """0: every request has a result, good or not."""

    DONE = 0
    FAILED = 1  # the disk, the network or the key; another start may help
    INVALID = 2  # the settings, the input or the output folder; another start would end in the same way
    EXPIRED = 3  # the completion window ended; requests without a response have expired
    STOPPED = 128 + signal.SIGTERM  # another start continues


_ENDED: Final = {"completed": ExitCode.DONE, "expired": ExitCode.EXPIRED}  # the final states


def run_job(settings: Settings) -> ExitCode:
    """Run the job, or what is left of it, and return the exit code."""
    folder = settings.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder):
            return _run(settings)
    except InvalidInput as error:
        for mistake in error.mistakes:
            logger.error("event=invalid_line line=%d message=%s", mistake.line, mistake.message)
        return ExitCode.INVALID
    except (ResultsError, InvalidLine) as error:
        logger.error("event=failed message=%s", error)
        return ExitCode.INVALID
    except (InputError, JobRefused, OSError) as error:
        logger.error("event=failed message=%s", error)
        return ExitCode.FAILED


def _run(settings: Settings) -> ExitCode:
    earlier = read_state(settings.output)
    opened = open_input(settings.input, settings.output)
    if earlier is not None and earlier.get("input_sha256") != opened.sha256:
        raise ResultsError(
            f"{settings.output} has the results of another input, or the input has changed: use another folder"
        )
    with Results(settings.output, opened.num_requests) as results:
        status = earlier["status"] if earlier is not None else ""
        if status in _ENDED and results.counts.done == opened.num_requests:
            logger.info("event=ended_before status=%s output=%s", status, settings.output)
            return _ENDED[status]
        state = _begin(settings, opened) if earlier is None or status in _ENDED else earlier
        job = _Job(settings, opened, results, state)
        logger.info(
            "event=started requests=%d done=%d input=%s sha256=%s output=%s",
            opened.num_requests, results.counts.done, opened.path, opened.sha256, settings.output,
        )  # fmt: skip
        return asyncio.run(job.run())


def _begin(settings: Settings, opened: InputFile) -> dict[str, Any]:
    """Return the state of a job that starts, in the form of OpenAI's Batch object."""
    now = int(time.time())
    return {
        "id": f"batch_{opened.sha256[:24]}",
        "object": "batch",
        "endpoint": next(iter(opened.paths)) if len(opened.paths) == 1 else None,
        "errors": None,
        "input_file_id": opened.path.name,
        "input_sha256": opened.sha256,
        "output_file_id": OUTPUT,
        "error_file_id": ERRORS,
        "completion_window": f"{settings.completion_window_seconds:g}s",
        "status": "in_progress",
        "created_at": now,
        "in_progress_at": now,
        "expires_at": now + int(settings.completion_window_seconds),
        "completed_at": None,
        "expired_at": None,
    }


@dataclass(slots=True)
class _Job:
    """One start of a job."""

    settings: Settings
    input_file: InputFile
    results: Results
    state: dict[str, Any]
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)  # a request has ended, or the job must stop
    _stopping: bool = False
    _failure: BaseException | None = None

    async def run(self) -> ExitCode:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        settings = self.settings
        concurrency = Concurrency(settings.max_concurrency)
        timeout = aiohttp.ClientTimeout(total=settings.answer_timeout_seconds, sock_connect=10.0)
        self._save("in_progress")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            sender = Sender(session, settings.url, _build_headers(settings), settings.max_attempts, concurrency)
            reporting = asyncio.create_task(self._report(sender))
            syncing = asyncio.create_task(self._sync())
            expired = False
            try:
                async with asyncio.timeout(max(0.0, self.state["expires_at"] - time.time())):
                    await self._send_all(sender)
            except TimeoutError:
                expired = True
            finally:
                await self._end_requests(expired)
                for task in (reporting, syncing):
                    task.cancel()
        return self._finish(expired)

    async def _send_all(self, sender: Sender) -> None:
        for number, request in self._left():
            while len(self._running) >= sender.concurrency.limit and not self._stopping:
                self._changed.clear()
                await self._changed.wait()
            if self._stopping:
                return
            task = asyncio.create_task(self._send(sender, number, request))
            self._running.add(task)
            task.add_done_callback(self._note_end)
        while self._running and not self._stopping:
            self._changed.clear()
            await self._changed.wait()

    def _left(self) -> Iterator[tuple[int, BatchRequest]]:
        """Yield the requests without a result, each with its number."""
        return (each for each in self.input_file.read() if not self.results.is_done(each[0]))

    async def _send(self, sender: Sender, number: int, request: BatchRequest) -> None:
        self.results.add(number, request, await sender.send(request))

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stop()

    def _stop(self) -> None:
        if self._stopping:  # a second signal skips the wait
            for task in self._running:
                task.cancel()
        self._stopping = True
        self._changed.set()

    async def _end_requests(self, expired: bool) -> None:
        """Give requests in flight some time to end, unless the window has ended or the job has failed."""
        if self._running and not expired and self._failure is None:
            logger.info("event=stopping in_flight=%d grace_seconds=%g", len(self._running), self.settings.grace_seconds)
            await asyncio.wait(self._running, timeout=self.settings.grace_seconds)
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _finish(self, expired: bool) -> ExitCode:
        counts = self.results.counts
        if expired:
            for number, request in self._left():
                self.results.add_expired(number, request)
        self.results.flush()
        self.results.sync()
        if self._failure is not None:
            self._save("in_progress")
            raise self._failure
        is_done = counts.done == self.input_file.num_requests
        status = "expired" if expired else "completed" if is_done else "in_progress"
        self._save(status)
        logger.info(
            "event=ended status=%s requests=%d completed=%d failed=%d input_tokens=%d output_tokens=%d",
            status, self.input_file.num_requests, counts.completed, counts.failed, counts.input_tokens,
            counts.output_tokens,
        )  # fmt: skip
        return _ENDED.get(status, ExitCode.STOPPED)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_SECONDS)
            try:
                self.results.flush()
                await asyncio.to_thread(self.results.sync)
            except OSError as error:
                self._failure = self._failure or error
                self._stop()
                return

    async def _report(self, sender: Sender) -> None:
        """Log the progress and save the state from time to time."""
        done, at = self.results.counts.done, time.monotonic()
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            counts, now = self.results.counts, time.monotonic()
            rate = (counts.done - done) / (now - at)
            left = self.input_file.num_requests - counts.done
            logger.info(
                "event=progress requests=%d completed=%d failed=%d in_flight=%d limit=%d per_second=%.2f "
                "left_seconds=%s refused_by=%s",
                self.input_file.num_requests, counts.completed, counts.failed, len(self._running),
                sender.concurrency.limit, rate, f"{left / rate:.0f}" if rate else "-", sender.refused_by or "-",
            )  # fmt: skip
            done, at, sender.refused_by = counts.done, now, ""
            with contextlib.suppress(OSError):  # `_sync` reports a disk that cannot be written
                self._save("in_progress")

    def _save(self, status: str) -> None:
        counts = self.results.counts
        self.state["status"] = status
        if status in _ENDED:
            self.state[f"{status}_at"] = int(time.time())
        total = self.input_file.num_requests
        self.state["request_counts"] = {"total": total, "completed": counts.completed, "failed": counts.failed}
        self.state["usage"] = {
            "input_tokens": counts.input_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.output_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.input_tokens + counts.output_tokens,
        }
        write_state(self.settings.output, self.state)


def _build_headers(settings: Settings) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "User-Agent": "conveyor-jobs"}
    if settings.request_class:
        headers[CLASS_HEADER] = settings.request_class
    if settings.api_key_file is not None:
        headers["Authorization"] = f"Bearer {settings.api_key_file.read_text().strip()}"
    return headers
