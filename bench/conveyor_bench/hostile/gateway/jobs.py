"""Attacks of the command `hostile` by offline jobs of one tenant, with hostile rows and answers."""

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.gateway.cluster import own_address

from conveyor_bench.hostile.gateway.attacks import OF_TENANT, TENANT, Attack, Stage
from conveyor_bench.hostile.gateway.engines import MIB, ROWS
from conveyor_bench.processes import peak_mib
from conveyor_jobs.results import STATE

START_SECONDS = 60
SERVICE, SECOND_SERVICE = (f"{TENANT}/{name}" for name in OF_TENANT)


async def jobs_of_one_namespace(stage: Stage) -> None:
    """Run eight jobs of small rows, 256 rows a second."""
    await run_jobs(stage, 8, SERVICE, ({"row": "x"} for _ in range(20_000)), 64)


async def jobs_of_large_rows(stage: Stage) -> None:
    """Run four jobs of rows of 7 MiB, 8 rows a second."""
    await run_jobs(stage, 4, SERVICE, ({"row": "x" * (7 * MIB)} for _ in range(24)), 4)


async def jobs_of_hostile_rows(stage: Stage) -> None:
    """Run four jobs of rows that cost the most to parse, 8 a second. The gateway finds their models in the bodies."""
    bodies: list[dict[str, Any]] = [
        {"row": "", "messages": [{"role": "system"}] * (MIB // 20), "model": SERVICE},
        {"row": [[[[[[]]]]]] * (MIB // 16), "model": SERVICE},
        {"row": list(range(MIB // 8)), "model": SECOND_SERVICE},
        {"row": "\0" * 1000, "model": "\u2028" * 100_000},
        {"row": "", "structured_outputs": {"grammar": "a: a\n" * 10_000}, "model": SECOND_SERVICE},
        {"row": ""},
    ]
    await run_jobs(stage, 4, "", bodies * 10, 4)


async def jobs_of_output_bombs(stage: Stage) -> None:
    """Run four jobs whose answers are long, endless, deep or torn, or have numbers of 4,000 digits, 4 a second."""
    await run_jobs(stage, 4, SERVICE, [{kind.decode(): 1} for kind in ROWS] * 20, 2)


async def run_jobs(stage: Stage, count: int, service: str, bodies: Iterable[dict[str, Any]], concurrency: int) -> None:
    """Start jobs, each again after its end, and return when all send requests. The end of the stage kills them."""
    stage.job_mib = 0.0
    folder = Path(stage.clients.enter_context(tempfile.TemporaryDirectory()))
    with (folder / "input").open("w") as file:
        file.writelines(make_lines(bodies))
    url = f"--url=http://{own_address()}:{stage.gateway.port}/{service}"  # another client address than the others'
    for number in range(count):
        task = asyncio.create_task(_repeat_job(stage, folder / str(number), url, concurrency))
        stage.clients.push_async_callback(asyncio.wait, [task])
        stage.clients.callback(task.cancel)
    async with asyncio.timeout(START_SECONDS):
        while not all((folder / str(number) / STATE).exists() for number in range(count)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def make_lines(bodies: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of an input with these bodies."""
    for number, body in enumerate(bodies):
        yield json.dumps({"custom_id": str(number), "url": "/v1/chat/completions", "body": body}) + "\n"


async def _repeat_job(stage: Stage, folder: Path, url: str, concurrency: int) -> None:
    command = [sys.executable, "-m", "conveyor_jobs", f"--input={folder.parent / 'input'}", f"--output={folder}", url]
    command += [f"--max-concurrency={concurrency}", "--max-attempts=1", "--max-failed=100%", "--log-level=ERROR"]
    while True:
        process = await asyncio.create_subprocess_exec(*command)
        try:
            while process.returncode is None:
                stage.job_mib = max(stage.job_mib, peak_mib(process.pid))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 0.1)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        shutil.rmtree(folder)


JOBS: dict[str, Attack] = {
    each.__name__.replace("_", " "): each
    for each in (jobs_of_one_namespace, jobs_of_large_rows, jobs_of_hostile_rows, jobs_of_output_bombs)
}
