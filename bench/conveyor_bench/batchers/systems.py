"""The systems that `batchers` compares, with their commands, requests and answers. Used by `command`."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor_bench.peers.process import cached, find_uv

OURS = "conveyor"
ALONE = "sentence-transformers"
_HERE = Path(__file__).parent
_DEBIANS_PYTHON = "/usr/bin/python3"

Build = Callable[[str], tuple[str, Any]]  # returns the path and the body of the request for a text
Read = Callable[[Any], list[float]]  # returns the vector in an answer


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that all systems share. A system that chooses its own window ignores `window_seconds`."""

    model: Path
    batch: int
    window_seconds: float


@dataclass(frozen=True, slots=True)
class System:
    """A system with a server. It has its own environment unless `script` is empty."""

    name: str
    script: str
    build: Build
    read: Read
    python: str = sys.executable

    def command(self, settings: Settings, port: int) -> list[str]:
        """Return the command that runs the server in the foreground."""
        batch, window = str(settings.batch), f"{settings.window_seconds:g}"
        if self.script:
            script = str(cached(_HERE / self.script))
            find = [find_uv(), "python", "find", "--offline", "--script", script]
            python = subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()
            return [python, script, str(settings.model), str(port), batch, window]
        command = [sys.executable, "-m", "conveyor_engine", "serve", "--model", str(settings.model)]
        command += ["--served-model-name=model", "--host=127.0.0.1", f"--port={port}"]
        command += ["--device=cpu", "--dtype=float32"]
        return [*command, "--batching-mode=dynamic", f"--max-num-seqs={batch}", f"--batching-window-seconds={window}"]

    def install(self) -> list[str]:
        """Return the command that installs the environment if necessary."""
        return [find_uv(), "sync", "--quiet", "--python", self.python, "--script", str(cached(_HERE / self.script))]


def _build_openai(text: str) -> tuple[str, Any]:
    return "/v1/embeddings", {"model": "model", "input": text}


def _read_openai(answer: Any) -> list[float]:
    vector: list[float] = answer["data"][0]["embedding"]
    return vector


def _build_triton(text: str) -> tuple[str, Any]:
    return "/v2/models/embed/infer", {
        "inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}]
    }


def _read_triton(answer: Any) -> list[float]:
    vector: list[float] = answer["outputs"][0]["data"]
    return vector


def _build_at(path: str) -> Build:
    return lambda text: (path, {"text": text})


def _as_it_is(answer: Any) -> list[float]:
    vector: list[float] = answer
    return vector


SYSTEMS = (
    System(OURS, "", _build_openai, _read_openai),
    System("triton", "serve_triton.py", _build_triton, _read_triton, _DEBIANS_PYTHON),
    System("litserve", "serve_litserve.py", _build_at("/predict"), _as_it_is),
    System("ray-serve", "serve_ray.py", _build_at("/"), _as_it_is),
    System("bentoml", "serve_bentoml.py", lambda text: ("/embed", {"texts": [text]}), lambda answer: list(answer[0])),
    System("infinity", "serve_infinity.py", lambda text: ("/embeddings", _build_openai(text)[1]), _read_openai),
    System(ALONE, "serve_sentence_transformers.py", _build_at("/embed"), _as_it_is),
)


def body(system: System, text: str) -> tuple[str, bytes]:
    """Return the path and the JSON body of a request for a text."""
    path, fields = system.build(text)
    return path, json.dumps(fields).encode()
