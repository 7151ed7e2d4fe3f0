"""Downloads adapters in processes of their own (`fetching.adapter_worker`), a few at a time. Used by `adapter_file`.

A process needs half a second or more to start. So it goes on with the next adapter, and ends when no adapter waits.
"""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any, Final

from conveyor_engine.errors import ModelError
from conveyor_protocol.failure_reasons import FailureReason

_PROCESSES_MAX: Final = 2
_PROGRAM: Final = "conveyor_engine.fetching.adapter_worker"


class AdapterDownloads:
    """The processes, each of which downloads one adapter at a time."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_PROCESSES_MAX)
        self._idle: list[Process] = []
        self._num_open = 0  # calls of `fetch`

    async def fetch(self, name: str, uri: str, directory: str) -> None:
        """Download the adapter, or check that it is mounted. Raises ModelError. A cancelled download ends at once."""
        self._num_open += 1
        try:
            async with self._places:
                self._idle = [each for each in self._idle if each.returncode is None]
                process = self._idle.pop() if self._idle else await _start()
                try:
                    answer = await _ask(process, uri=uri, target=directory, adapter=name)
                except BaseException:
                    await _end(process)
                    raise
                self._idle.append(process)
        finally:
            self._num_open -= 1
            while self._idle and not self._num_open:
                await _end(self._idle.pop())
        if answer:
            raise ModelError(answer["message"], reason=FailureReason(answer["reason"]))


async def _start() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", _PROGRAM, env={**os.environ, "HF_HUB_OFFLINE": "0"}, stdin=PIPE, stdout=PIPE
    )


async def _ask(process: Process, *, adapter: str, **request: str) -> dict[str, Any]:
    """Send a request to the process. Returns its answer. Raises ModelError if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"adapter": adapter, **request}).encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        message = f"adapter {adapter}: its download ended with exit code {await process.wait()}"
        raise ModelError(message, reason=FailureReason.MODEL_DOWNLOAD_FAILED)
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
