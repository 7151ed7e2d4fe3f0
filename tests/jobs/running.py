"""Runs `python -m conveyor_jobs` as users do, against servers whose answers the test chooses."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from conveyor_http.server import open_port
from conveyor_process.listening import close_port

Json = dict[str, Any]
Handle = Callable[[Json], Awaitable[web.Response]]
PATH = "/v1/completions"
STARTED: list[asyncio.subprocess.Process] = []  # by the running test


def make_line(custom_id: str, url: str = PATH, **body: Any) -> Json:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", "prompt": "x", **body}}


def write_input(path: Path, num_requests: int) -> list[str]:
    """Write an input of that many requests. Returns their custom_ids, which are also their prompts."""
    ids = [f"request-{number}" for number in range(num_requests)]
    path.write_text("".join(json.dumps(make_line(each, prompt=each)) + "\n" for each in ids))
    return ids


def read_lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Service:
    """A server of a model, and of `files`. `requests` counts the requests by prompt and the fetched files by path.

    most: the most requests that it had at a time.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.requests = Counter[str]()
        self.headers: list[dict[str, str]] = []
        self.running = self.most = 0
        self.url = ""
        self.files: dict[str, bytes] = {}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            self.requests[request.path] += 1
            return web.Response(body=self.files[request.path])
        body = json.loads(await request.content.read())
        self.requests[body["prompt"]] += 1
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._handle(body)
        finally:
            self.running -= 1

    async def wait_requests(self, number: int) -> None:
        """Wait until it has got this many requests."""
        while sum(self.requests.values()) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Service"]:
        runner = web.ServerRunner(web.Server(self.answer, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        accepting = open_port(runner, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{accepting.port}"
        try:
            yield self
        finally:
            await close_port(accepting)
            await runner.cleanup()


def answer_prompt(body: Json) -> web.Response:
    """The response of a model that says its prompt."""
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    return web.json_response({"choices": [{"text": body["prompt"]}], "usage": usage})


def answering(seconds: float = 0.0) -> Handle:
    """Return a handler that says every prompt after some time."""

    async def handle(body: Json) -> web.Response:
        await asyncio.sleep(seconds)
        return answer_prompt(body)

    return handle


def refuse(status: int, code: str, **headers: str) -> web.Response:
    error = {"message": "no", "type": "server_error", "param": None, "code": code}
    return web.json_response(
        {"error": error}, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


async def start_job(
    folder: Path, url: str, *flags: str, given: str = "", max_file_bytes: int | None = None
) -> asyncio.subprocess.Process:
    """Start a job whose input is `folder/in.jsonl`, or `given`, and whose output folder is `folder/out`.

    max_file_bytes: the longest file that the job may write. A write beyond it fails, as on a full disk.
    """
    limit = () if max_file_bytes is None else ("prlimit", f"--fsize={max_file_bytes}")
    job = await asyncio.create_subprocess_exec(
        *limit,
        *(sys.executable, "-m", "conveyor_jobs", "--input", given or str(folder / "in.jsonl")),
        *("--output", str(folder / "out"), "--url", url, *flags),
        stderr=subprocess.PIPE,
    )
    STARTED.append(job)
    return job


async def wait_job(job: asyncio.subprocess.Process) -> tuple[int, str]:
    """Return the exit code and the log."""
    _, log = await job.communicate()
    assert job.returncode is not None
    return job.returncode, log.decode()


async def run_job(
    folder: Path, url: str, *flags: str, given: str = "", max_file_bytes: int | None = None
) -> tuple[int, str]:
    return await wait_job(await start_job(folder, url, *flags, given=given, max_file_bytes=max_file_bytes))
