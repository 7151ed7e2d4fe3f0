"""An engine process on this machine whose settings follow the candidates. Used by `command`."""

import asyncio
import re
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import aiohttp

from conveyor_insight.tuning.candidates import Candidate
from conveyor_insight.tuning.sweep import CannotRun
from conveyor_load.requests import Target

_KEPT_LINES: Final = 20
_LOOK_SECONDS: Final = 0.1
_END_SECONDS: Final = 30


class EngineProcess:
    """Runs one engine process at a time. Use it in `async with`; leaving the block stops the process."""

    def __init__(
        self, session: aiohttp.ClientSession, model: Path, task: str, flags: Sequence[str], start_seconds: float
    ) -> None:
        """flags: for `python -m conveyor_engine serve`, in addition to those of the candidates."""
        self._session, self._model, self._task = session, model, task
        self._flags, self._start_seconds = flags, start_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._log = deque[str](maxlen=_KEPT_LINES)
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def apply(self, candidate: Candidate) -> Target:
        """Start a new process with the candidate's settings. Raises CannotRun."""
        await self._stop()
        command = [sys.executable, "-m", "conveyor_engine", "serve", "--model", str(self._model), "--port=0"]
        command += ["--host=127.0.0.1", "--served-model-name=tuned", *self._flags, *_build_flags(candidate)]
        # A separate session, so that Ctrl-C reaches only this program, which then stops the engine.
        self._process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            async with asyncio.timeout(self._start_seconds):
                url = await self._read_url()
                self._reading = asyncio.create_task(self._read_log())
                await self._wait_ready(url)
        except TimeoutError:
            raise CannotRun(f"not ready after {self._start_seconds:.0f} s") from None
        return Target(url, "tuned", self._task)

    async def _read_url(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._log.append(line.decode(errors="replace").strip())
            if match := re.search(r"event=listening .*port=(\d+)", self._log[-1]):
                return f"http://127.0.0.1:{match[1]}"
        raise self._died()

    async def _read_log(self) -> None:
        """Read the log, so that a full pipe does not stop the process."""
        assert self._process is not None
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._log.append(line.decode(errors="replace").strip())

    async def _wait_ready(self, url: str) -> None:
        assert self._process is not None
        while True:
            if self._process.returncode is not None:
                assert self._reading is not None
                await self._reading
                raise self._died()
            with suppress(aiohttp.ClientError):
                async with self._session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_LOOK_SECONDS)

    def _died(self) -> CannotRun:
        told = next((line for line in reversed(self._log) if "message=" in line), self._log[-1] if self._log else "")
        return CannotRun(f"the engine ended: {told.partition('message=')[2] or told}"[:300])

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reading is not None:
            self._reading.cancel()


def _build_flags(candidate: Candidate) -> list[str]:
    window = candidate.window_seconds
    flags = [f"--max-num-seqs={candidate.max_batch_size}"]
    flags += [] if window is None else [f"--batching-window-seconds={window:g}"]
    tokens = candidate.max_batch_tokens
    return flags + ([] if tokens is None else [f"--max-num-batched-tokens={tokens}"])
