"""Tools for tests of `fetch`: a repository, a hub with the real protocol, and fetches as processes."""

import hashlib
import json
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.engine.processes import environment

from e2e.hub.server import Faults, Hub

NOWHERE = "http://127.0.0.1:9"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
Fetch = Callable[..., None]


def write_repository(folder: Path, weights_bytes: int = 300_000) -> None:
    """Write files like a model's. Their content does not matter here."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"name": name}))
    (folder / WEIGHTS).write_bytes(bytes(range(256)) * (weights_bytes // 256))
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of a model is never fetched')")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / WEIGHTS).write_bytes(b"other")


@contextmanager
def running_hub(root: Path, token: str | None = None, **faults: Any) -> Iterator[Hub]:
    """Run a hub in a thread. Its `requests` are a log."""
    hub = Hub(("127.0.0.1", 0), root, token, Faults(**faults))
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def start_fetch(hub_url: str, uri: str, target: Path, **variables: str) -> subprocess.Popen[str]:
    """Start `python -m conveyor_engine fetch`. Its termination message is beside the models."""
    command = [sys.executable, "-m", "conveyor_engine", "fetch", "--uri", uri, "--target", str(target)]
    command += ["--task", "none"]
    variables |= {"HF_ENDPOINT": hub_url, "TERMINATION_LOG": str(target.parent.parent / "termination")}
    return subprocess.Popen(command, env=environment(**variables), stderr=subprocess.PIPE, text=True)


def partial_of(target: Path) -> Path:
    """Make and return the folder that becomes `target`."""
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True)
    return partial


def unfinished_path(root: Path, target: Path) -> Path:
    """Return the path of the unfinished weights of `org/tiny`. Makes its folder."""
    digest = hashlib.sha256((root / "org/tiny" / WEIGHTS).read_bytes()).hexdigest()
    return partial_of(target) / f"{WEIGHTS}.{digest[:16]}.unfinished"


def bytes_of_model(root: Path) -> int:
    """Return the number of bytes that `fetch` downloads from `org/tiny`."""
    files = [path for path in (root / "org/tiny").iterdir() if path.suffix in (".json", ".safetensors")]
    return sum(path.stat().st_size for path in files)


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def limit_volume(monkeypatch: pytest.MonkeyPatch, folder: Path, size: int) -> None:
    """Let `folder` seem to be a volume of this many bytes."""

    def disk_usage(_: Path) -> _Usage:
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return _Usage(size, used, size - used)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Let the kernel limit files that this process writes to `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
