"""Starts a system's server, waits until it answers correctly, and ends it. Used by `command`."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np

from conveyor_bench.batchers.client import Client
from conveyor_bench.batchers.systems import OURS, Settings, System
from conveyor_bench.processes import end, find_ports, start
from conveyor_engine.openmp import SPIN_COUNT

_START_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 0.25
_QUIET = {  # no system sends usage reports to its makers
    "BENTOML_DO_NOT_TRACK": "True",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Absent(Exception):
    """The system cannot be measured here; the message says why."""


def install(system: System, log: Path) -> None:
    """Install the system's environment. Raises Absent."""
    if not system.script:
        return
    done = subprocess.run(system.install(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log.write_text(done.stderr)
    if done.returncode:
        raise Absent(f"its packages cannot be installed, see {log}")


@asynccontextmanager
async def running(
    system: System, settings: Settings, threads: int, right: Sequence[tuple[str, Sequence[float]]], log: Path
) -> AsyncIterator[Client]:
    """Start the server, check its vectors for the texts in `right`, and yield its client. Raises Absent."""
    port = find_ports()
    command = system.command(settings, port) + ([f"--num-threads={threads}"] if system.name == OURS else [])
    environment = os.environ | _QUIET | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment.pop(SPIN_COUNT, None)  # `__main__` has set it only for this process
    process = await asyncio.to_thread(start, command, environment, log)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            client = Client(session, f"http://127.0.0.1:{port}", system)
            await wait_ready(client, process, right[0][0], log)
            for text, vector in right:
                found = await client.embed(text)
                if len(found) != len(vector) or np.abs(np.subtract(found, vector)).max() > 1e-3:
                    raise Absent("its vectors differ from sentence-transformers'")
            yield client
    finally:
        await asyncio.to_thread(end, process)


async def wait_ready(client: Client, process: "subprocess.Popen[bytes]", text: str, log: Path) -> None:
    """Wait until the server answers a text. Raises Absent."""
    begin, last = time.monotonic(), ""
    while time.monotonic() - begin < _START_SECONDS:
        if process.poll() is not None:
            raise Absent(f"it ended with code {process.returncode} before it answered, see {log}")
        try:
            await client.embed(text)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            last = f"{type(error).__name__}: {error}"[:200]
        else:
            return
        await asyncio.sleep(_LOOK_SECONDS)
    raise Absent(f"no answer within {_START_SECONDS:.0f} s ({last}), see {log}")
