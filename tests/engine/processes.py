"""Runs `python -m conveyor_engine ...` as a real process, for tests of processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ENGINE_FOLDER = Path(__file__).resolve().parents[2] / "engine"
READY_SECONDS_MAX = 240.0
REAL, IDLE = "conveyor_engine", "tests.engine.idle_engine"


def environment(**changes: str) -> dict[str, str]:
    """Return this environment, with the engine importable and one thread.

    On SIGABRT a process logs its threads' stacks.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CONVEYOR_ENGINE_", "HF_"))}
    return {**clean, "PYTHONPATH": str(ENGINE_FOLDER), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **changes}


class EngineServer:
    """A `serve` process on a free port of 127.0.0.1. Use it in `with`."""

    def __init__(
        self, folder: Path, model: Path, program: str = REAL, packages: Path | None = None, **fields: object
    ) -> None:
        """packages: a folder with further installed packages."""
        flags = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 1024, "host": "127.0.0.1", "port": 0, **fields}
        arguments = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "log"
        self.termination_path = folder / "termination"
        path = os.pathsep.join(map(str, filter(None, (ENGINE_FOLDER, packages))))
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, "serve", "--model", str(model), *arguments],
                env=environment(TERMINATION_LOG=str(self.termination_path), PYTHONPATH=path), stdout=log, stderr=log,
            )  # fmt: skip
        self.client = httpx.Client(timeout=150)

    def __enter__(self) -> "EngineServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._logged('event=listening .*port=')}"

    @property
    def engine_pid(self) -> int:
        return int(self._logged("event=engine_process_started pid="))

    def _logged(self, before: str) -> str:
        match = wait_until(lambda: re.search(before + r"(\d+)", self.log), f"{before} in the log", self)
        return str(match[1])

    def wait_ready(self) -> "EngineServer":
        wait_until(lambda: self.get("/readyz").status_code == 200, "ready", self)
        return self

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(self.url + path, content=content, headers=headers)

    def load(self) -> dict[str, Any]:
        content: dict[str, Any] = self.get("/load").json()
        return content

    def wait_load(self, **expected: object) -> None:
        wait_until(lambda: expected.items() <= self.load().items(), f"load {expected}", self)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sample of this name with exactly these labels and the model's name."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        (value,) = [s.value for s in samples if s.labels == {"model_name": s.labels["model_name"], **labels}]
        return value

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait_exit(self) -> int:
        try:
            return self.process.wait(timeout=READY_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.engine_pid, signal.SIGABRT)
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
            raise AssertionError(f"never: exit\n{self.log}") from None

    def termination(self) -> dict[str, str]:
        message: dict[str, str] = json.loads(self.termination_path.read_text())
        return message


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(check: Any, what: str, server: EngineServer | None = None) -> Any:
    """Wait for a true value of `check()` and return it."""
    end = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < end:
        if value := check():
            return value
        if server is not None and server.process.poll() is not None and not what.startswith("event="):
            break
        time.sleep(0.05)
    raise AssertionError(f"never: {what}\n{server.log if server else ''}")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return `message`, `code` and `param` of an error."""
    return details_of(answer.json())


def details_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return these details from a body in OpenAI's format, or in a format whose `error` is a sentence."""
    error = body["error"]
    return error if isinstance(error, dict) else body | {"message": error}
