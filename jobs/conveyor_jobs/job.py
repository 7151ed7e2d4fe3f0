"""Runs one job: checks the input, sends the requests that have no result yet, reports the progress.

Called by `__main__`. SIGTERM ends the job early: requests in flight have `grace_seconds` to end, and the job continues
when it is started again with the same output folder.
"""

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from conveyor_jobs.dispatcher import Dispatcher, JobRefused
from conveyor_jobs.headers import Headers
from conveyor_jobs.input_file import InputError, InputFile, InvalidInput, open_input
from conveyor_jobs.outcome import COMPLETED, EXPIRED, FINAL, ExitCode, choose_exit_code
from conveyor_jobs.results import (
    ERRORS,
    OUTPUT,
    FolderHeld,
    Results,
    ResultsError,
    hold_lock,
    read_state,
    write_state,
)
from conveyor_jobs.sending import Sender
from conveyor_jobs.settings import Settings

logger = logging.getLogger(__name__)

_SYNC_SECONDS: Final = 1.0
_PROGRESS_SECONDS: Final = 10.0
# Requests are in flight without a response: the service starts, or the responses take long. A job cannot tell which.
_WAITING: Final = "waiting_for_responses"


def run_job(settings: Settings) -> ExitCode:
    """Run the job, or what is left of it, and return the exit code."""
    folder = settings.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder):
            return _run(settings)
    except InvalidInput as error:
        for mistake in error.mistakes:
            logger.error("event=invalid_input line=%d message=%s", mistake.line, mistake.message)
        return ExitCode.INVALID
    except ResultsError as error:
        logger.error("event=failed message=%s", error)
        return ExitCode.INVALID
    except JobRefused as error:
        logger.error("event=failed message=%s", error)
        return ExitCode.INVALID if error.lasts else ExitCode.FAILED
    except (FolderHeld, InputError, OSError) as error:
        logger.error("event=failed message=%s", error)
        return ExitCode.FAILED


def _run(settings: Settings) -> ExitCode:
    earlier = read_state(settings.output)
    opened = open_input(settings.input, settings.output)
    if earlier is not None and earlier["input_sha256"] != opened.sha256:
        raise ResultsError(
            f"{settings.output} has the results of another input, or the input has changed: use another folder"
        )
    with Results(settings.output, opened.num_requests) as results:
        status = earlier["status"] if earlier is not None else ""
        if status in FINAL and results.counts.done == opened.num_requests:
            return _end(status, results, opened.num_requests, settings)
        state = _begin(opened) if earlier is None or status in FINAL else earlier
        state["completion_window"] = f"{settings.completion_window_seconds:g}s"
        state["expires_at"] = state["created_at"] + int(settings.completion_window_seconds)
        logger.info(
            "event=started requests=%d done=%d input=%s sha256=%s output=%s",
            opened.num_requests, results.counts.done, opened.path, opened.sha256, settings.output,
        )  # fmt: skip
        return asyncio.run(_Job(settings, opened, results, state).run(Headers(settings)))


def _begin(opened: InputFile) -> dict[str, Any]:
    """Return the state of a job that starts, in the form of OpenAI's Batch object."""
    now = int(time.time())
    return {
        "id": f"batch_{opened.sha256[:24]}",
        "object": "batch",
        "endpoint": ",".join(sorted(opened.paths)),
        "errors": None,
        "input_file_id": opened.path.name,
        "input_sha256": opened.sha256,
        "output_file_id": OUTPUT,
        "error_file_id": ERRORS,
        "status": "in_progress",
        "created_at": now,
        "in_progress_at": now,
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
    dispatcher: Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.settings, self.input_file, self.results)

    async def run(self, headers: Headers) -> ExitCode:
        """Send what is left, until it is done, the window ends or the job must stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.dispatcher.stop)
        self._save("in_progress")
        timeout = aiohttp.ClientTimeout(total=self.settings.answer_timeout_seconds, sock_connect=10.0)
        window = asyncio.timeout(max(0.0, self.state["expires_at"] - time.time()))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            background = [asyncio.create_task(each) for each in (self._report(), self._sync(), headers.follow())]
            try:
                async with window:
                    await self.dispatcher.send_all(Sender(session, self.settings.url, headers.values))
            except TimeoutError:
                if not window.expired():
                    raise
            finally:
                await self.dispatcher.end_requests(window.expired())
                for task in background:
                    task.cancel()
        return self._finish(window.expired())

    def _finish(self, expired: bool) -> ExitCode:
        counts, total = self.results.counts, self.input_file.num_requests
        if expired:
            for number, request in self.input_file.read():
                if not self.results.is_done(number):
                    self.results.add_expired(number, request)
        self.results.flush()
        self.results.sync()
        if self.dispatcher.failure is not None:
            self._save("in_progress")
            raise self.dispatcher.failure
        status = "in_progress" if counts.done < total else EXPIRED if counts.expired else COMPLETED
        self._save(status)
        return _end(status, self.results, total, self.settings)

    async def _sync(self) -> None:
        """Bring the results to the disk, again and again."""
        while True:
            await asyncio.sleep(_SYNC_SECONDS)
            try:
                self.results.flush()
                await asyncio.to_thread(self.results.sync)
            except OSError as error:
                self.dispatcher.fail(error)
                return

    async def _report(self) -> None:
        """Log the progress and save the state from time to time."""
        done, at, held_by = self.results.counts.done, time.monotonic(), ""
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            counts, now = self.results.counts, time.monotonic()
            rate, left = (counts.done - done) / (now - at), self.input_file.num_requests - counts.done
            held_by = self._find_holder(held_by, is_moving=counts.done > done)
            logger.info(
                "event=progress requests=%d completed=%d failed=%d in_flight=%d limit=%d per_second=%.2f "
                "left_seconds=%.0f held_by=%s",
                self.input_file.num_requests, counts.completed, counts.failed, self.dispatcher.in_flight,
                self.dispatcher.concurrency.limit, rate, left / rate if rate else None, held_by or "-",
            )  # fmt: skip
            done, at, self.dispatcher.held_by = counts.done, now, ""
            with contextlib.suppress(OSError):  # `_sync` reports a disk that cannot be written
                self._save("in_progress")

    def _find_holder(self, last: str, *, is_moving: bool) -> str:
        """Return why requests had to wait since the last report, which was held by `last`."""
        if self.dispatcher.held_by or is_moving:
            return self.dispatcher.held_by
        return _WAITING if self.dispatcher.in_flight else last  # no request is in flight during a pause

    def _save(self, status: str) -> None:
        counts = self.results.counts
        self.state["status"] = status
        if status in FINAL:
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


def _end(status: str, results: Results, num_requests: int, settings: Settings) -> ExitCode:
    """Log the end of this start, and return its exit code."""
    counts = results.counts
    logger.info(
        "event=ended outcome=%s requests=%d completed=%d failed=%d input_tokens=%d output_tokens=%d",
        status, num_requests, counts.completed, counts.failed, counts.input_tokens, counts.output_tokens,
    )  # fmt: skip
    code = choose_exit_code(status, counts.failed, num_requests, settings.max_failed)
    if code is ExitCode.TOO_MANY_FAILED:
        message = f"{counts.failed} of {num_requests} requests failed, more than --max-failed allows: see {ERRORS}"
        logger.error("event=failed message=%s", message)
    return code
