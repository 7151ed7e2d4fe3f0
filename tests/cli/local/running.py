"""Runs `conveyor run` as a real process with real engines, for the tests of this folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.metrics.aggregation import free_port

from e2e.cluster.paths import REPOSITORY

Json = dict[str, Any]
WAIT_SECONDS = 240.0


def build_service(name: str = "chat", **spec: Any) -> Json:
    """Return a service whose engines are small and run on the CPU."""
    settings: Json = {
        "model": {"uri": "pvc://models/chat"},
        "engine": {"device": "Auto", "dtype": "Float32"},
        "kvCache": {"blockBudget": 1024},
        "batching": {"mode": "Continuous", "maxBatchSize": 4},
    }
    return {
        "apiVersion": "conveyor.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {**settings, **spec},
    }


class Running:
    """A run of the command. Use it in `with`; the end kills what is left."""

    def __init__(self, folder: Path, models: Path, *objects: Json, flags: tuple[str, ...] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.root = f"http://127.0.0.1:{self.port}"
        manifests = folder / "manifests.yaml"
        manifests.write_text(yaml.safe_dump_all(objects))
        arguments = ["run", str(manifests), "--port", str(self.port), "--cache", str(folder / "cache")]
        arguments += ["--volume", f"models={models}", *flags]
        self._output = (folder / "output").open("w+")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "conveyor_local", *arguments],
            stdout=self._output, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        self.http = httpx.Client(base_url=self.root, timeout=WAIT_SECONDS)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        left = self.descendants()
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.wait("the end of all processes", lambda: not any(map(lives, left)))
        self._output.close()

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait(self, what: str, is_true: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while not is_true():
            assert time.monotonic() < until, f"no {what}:\n{self.output}"
            time.sleep(0.05)

    def wait_for(self, text: str) -> None:
        """Wait until the output has the text."""

        def is_there() -> bool:
            assert text in self.output or self.process.poll() is None, self.output
            return text in self.output

        self.wait(text, is_there)

    def wait_ready(self) -> "Running":
        self.wait_for("ready; for example:")
        return self

    def wait_ended(self) -> int:
        return self.process.wait(WAIT_SECONDS)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def chat(self, path: str = "/default/chat/v1", tokens: int = 4, **more: Any) -> httpx.Response:
        """Send a chat whose answer has exactly this number of tokens."""
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": "chat", "messages": messages, "max_tokens": tokens, "ignore_eos": True, **more}
        return self.http.post(f"{path}/chat/completions", json=body)

    def descendants(self) -> list[int]:
        """Return the process ids of the run and of all that it has started."""
        return [self.process.pid, *list_descendants(self.process.pid)]

    def engines(self) -> list[int]:
        """Return the process ids of the engines' API processes."""
        return [pid for pid in children_of(self.process.pid) if b"serve" in command_of(pid)]


def children_of(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended
        return []


def list_descendants(pid: int) -> Iterator[int]:
    for child in children_of(pid):
        yield child
        yield from list_descendants(child)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def lives(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def read_page(word: str) -> str:
    """Return the block of the page docs/local.md that begins with a word."""
    page = (REPOSITORY / "docs/local.md").read_text()
    (block,) = re.findall(rf"^```sh\n({word} .*?)^```", page, re.DOTALL | re.MULTILINE)
    return block


def read_stream(text: str) -> list[Json]:
    """Return the events of a streamed answer, without the last one, [DONE]."""
    events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", text
    return [json.loads(event) for event in events[:-1]]
