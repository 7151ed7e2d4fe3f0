"""What the tests of `fetch` share: a repository, a hub that speaks the real protocol, and fetches as processes."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.processes import environment

from e2e.hub.server import Faults, Hub

NOWHERE = "http://127.0.0.1:9"
WEIGHTS = "model.safetensors"
Fetch = Callable[..., None]


def write_repository(folder: Path, weights_bytes: int = 300_000) -> None:
    """Files as of a model; their content does not matter here."""
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
    """Served from a thread; `requests` on it are its log."""
    hub = Hub(("127.0.0.1", 0), root, token, Faults(**faults))
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


def start_fetch(hub_url: str, uri: str, target: Path) -> subprocess.Popen[str]:
    """`python -m conveyor_engine fetch`, its termination message beside the models."""
    command = [sys.executable, "-m", "conveyor_engine", "fetch", "--uri", uri, "--target", str(target)]
    variables = {"HF_ENDPOINT": hub_url, "TERMINATION_LOG": str(target.parent.parent / "termination")}
    return subprocess.Popen(command, env=environment(**variables), stderr=subprocess.PIPE, text=True)
