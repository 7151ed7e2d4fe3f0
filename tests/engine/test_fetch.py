"""`fetch` against a hub that speaks the real protocol."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.processes import environment

from conveyor_engine.errors import ModelError, StartError
from conveyor_engine.fetch import MARKER, fetch
from e2e.hub.repository import Repository
from e2e.hub.server import Faults, Hub

NOWHERE = "http://127.0.0.1:9"
WEIGHTS = "model.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The hub's folder, with the repository `org/tiny` in it."""
    folder = tmp_path / "hub"
    write_repository(folder / "org" / "tiny")
    return folder


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
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


@pytest.fixture
def hub(root: Path) -> Iterator[Hub]:
    with running_hub(root) as started:
        yield started


@pytest.fixture
def fetch_from(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`fetch` in this process, from this hub, with this token."""

    def run(hub_url: str, uri: str, target: Path, token: str = "") -> None:
        monkeypatch.setenv("HF_ENDPOINT", hub_url)
        monkeypatch.setenv("HF_TOKEN", token)
        fetch(uri, str(target))

    return run


def start_fetch(hub_url: str, uri: str, target: Path) -> subprocess.Popen[str]:
    """`python -m conveyor_engine fetch`, its termination message beside the models."""
    command = [sys.executable, "-m", "conveyor_engine", "fetch", "--uri", uri, "--target", str(target)]
    variables = {"HF_ENDPOINT": hub_url, "TERMINATION_LOG": str(target.parent.parent / "termination")}
    return subprocess.Popen(command, env=environment(**variables), stderr=subprocess.PIPE, text=True)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


Fetch = Callable[..., None]


def test_only_what_the_engine_loads_is_fetched_and_marked(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    fetch_from(hub.url, "hf://org/tiny", target)
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", WEIGHTS}
    assert {path.name for path in target.iterdir()} == wanted | {MARKER}
    for name in wanted:
        assert (target / name).read_bytes() == (root / "org/tiny" / name).read_bytes()
    revision = Repository(root, "org/tiny").find("main")
    assert revision is not None
    assert json.loads((target / MARKER).read_text())["commit"] == revision.commit
    assert [path.name for path in target.parent.iterdir() if path.name.endswith(".partial")] == []


def test_a_complete_model_needs_no_hub(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    fetch_from(hub.url, "hf://org/tiny", target)
    fetch_from(NOWHERE, "hf://org/tiny", target)


def test_a_model_that_lost_a_byte_is_fetched_again(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    fetch_from(hub.url, "hf://org/tiny", target)
    (target / WEIGHTS).write_bytes(b"short")
    fetch_from(hub.url, "hf://org/tiny", target)
    assert (target / WEIGHTS).read_bytes() == (root / "org/tiny" / WEIGHTS).read_bytes()


def test_a_revision_pins_the_commit(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    write_repository(root / "org/tiny/.revisions/v1", weights_bytes=1024)
    found = Repository(root, "org/tiny").find("v1")
    assert found is not None
    for name, revision in (("by-tag", "v1"), ("by-commit", found.commit)):
        fetch_from(hub.url, f"hf://org/tiny@{revision}", target / name)
        assert (target / name / WEIGHTS).stat().st_size == 1024
        assert json.loads((target / name / MARKER).read_text())["commit"] == found.commit
    assert all(f"/resolve/{found.commit}/" in r.path for r in hub.requests if "/resolve/" in r.path)


def test_weights_in_pieces_are_those_of_the_index(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    folder = root / "org/tiny"
    (folder / WEIGHTS).rename(folder / "model-1-of-2.safetensors")
    (folder / "model-2-of-2.safetensors").write_bytes(b"second")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    pieces = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": pieces}))
    fetch_from(hub.url, "hf://org/tiny", target)
    assert {path.name for path in target.glob("*.safetensors")} == set(pieces.values())


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_wrong_checksum_is_refused_and_the_file_deleted(
    fetch_from: Fetch, root: Path, target: Path, name: str
) -> None:
    with running_hub(root, corrupt=frozenset([name])) as hub:
        with pytest.raises(ModelError, match=name) as caught:
            fetch_from(hub.url, "hf://org/tiny", target)
        assert caught.value.reason == "ChecksumMismatch"
    assert not target.exists()
    assert not list(target.parent.rglob(f"{name}*"))
    with running_hub(root) as hub:
        fetch_from(hub.url, "hf://org/tiny", target)


def test_a_killed_fetch_is_resumed_where_it_ended(fetch_from: Fetch, root: Path, target: Path) -> None:
    content = os.urandom(24_000_000)  # huggingface_hub writes 10 MiB at a time
    (root / "org/tiny" / WEIGHTS).write_bytes(content)
    partial = target.with_name(f".{target.name}.partial")
    with running_hub(root, bytes_per_second=20e6) as hub:
        process = start_fetch(hub.url, "hf://org/tiny", target)
        while not any(path.stat().st_size for path in partial.glob(f"{WEIGHTS}*.unfinished")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.kill()
        process.communicate()
    (present,) = (path.stat().st_size for path in partial.glob("*.unfinished"))
    assert 0 < present < len(content)
    with running_hub(root) as hub:
        fetch_from(hub.url, "hf://org/tiny", target)
        gets = [request for request in hub.requests if request.method == "GET" and "/resolve/" in request.path]
        assert [request.range for request in gets] == [f"bytes={present}-"]  # and what was complete, not at all
    assert (target / WEIGHTS).read_bytes() == content


def test_two_fetches_at_once_share_the_work(root: Path, target: Path) -> None:
    with running_hub(root, bytes_per_second=200_000) as hub:
        both = [start_fetch(hub.url, "hf://org/tiny", target) for _ in "ab"]
        logs = [process.communicate(timeout=200)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], logs
        assert len([r for r in hub.requests if r.method == "GET" and "/resolve/" in r.path]) == 5
    assert sum("event=model_complete_already" in log for log in logs) == 1
    assert sum("event=model_fetched" in log for log in logs) == 1


@pytest.mark.parametrize(
    ("uri", "reason", "words"),
    [
        ("hf://org/none", "ModelNotFound", "org/none does not exist at http://127.0.0.1"),
        ("hf://org/tiny@v9", "ModelNotFound", "has no revision v9"),
        ("hf://org", "InvalidConfig", "neither hf://"),
        ("hf://org/../tiny", "InvalidConfig", "neither hf://"),
        ("s3://bucket/key", "InvalidConfig", "neither hf://"),
    ],
)
def test_what_cannot_be_found_is_said(
    fetch_from: Fetch, hub: Hub, target: Path, uri: str, reason: str, words: str
) -> None:
    with pytest.raises(StartError, match=re.escape(words)) as caught:
        fetch_from(hub.url, uri, target)
    assert caught.value.reason == reason


def test_a_hub_that_is_not_there_is_a_failed_download_in_the_termination_message(target: Path) -> None:
    process = start_fetch(NOWHERE, "hf://org/tiny", target)
    process.communicate(timeout=200)
    assert process.returncode == 1
    message = json.loads((target.parent.parent / "termination").read_text())
    assert message["reason"] == "ModelDownloadFailed"
    assert NOWHERE in message["message"]


def test_a_token_opens_a_private_repository(fetch_from: Fetch, root: Path, target: Path) -> None:
    with running_hub(root, token="secret") as hub:
        for wrong in ("", "wrong"):
            with pytest.raises(ModelError, match="token") as caught:
                fetch_from(hub.url, "hf://org/tiny", target, token=wrong)
            assert caught.value.reason == "ModelNotFound"
        fetch_from(hub.url, "hf://org/tiny", target, token="secret")
    assert (target / MARKER).exists()


def test_a_gated_repository_says_what_to_do(fetch_from: Fetch, root: Path, target: Path) -> None:
    with (
        running_hub(root, gated=frozenset(["org/tiny"])) as hub,
        pytest.raises(ModelError, match="accept its terms") as caught,
    ):
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"


def test_pickled_weights_are_refused(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    (root / "org/tiny" / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin, and pickles can run code") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "UnsupportedModel"


def test_a_claim_is_only_looked_at(fetch_from: Fetch, tmp_path: Path, target: Path) -> None:
    with pytest.raises(ModelError, match="no directory"):
        fetch_from(NOWHERE, "pvc://models/tiny", target)
    target.mkdir(parents=True)
    (target / "readme").touch()
    with pytest.raises(ModelError, match="it holds readme") as caught:
        fetch_from(NOWHERE, "pvc://models/tiny", target)
    assert caught.value.reason == "ModelNotFound"
    write_repository(tmp_path / "good")
    shutil.copy(tmp_path / "good" / "config.json", target)
    fetch_from(NOWHERE, "pvc://models/tiny", target)


def test_a_target_that_cannot_be_written_is_said(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    target.parent.mkdir()
    target.with_name(".tiny.partial").write_text("a file in the way")
    with pytest.raises(ModelError, match="cannot write") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"


def test_the_hub_runs_as_a_process(fetch_from: Fetch, root: Path, target: Path) -> None:
    command = [sys.executable, "-m", "e2e.hub", "--root", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        fetch_from(first.strip().partition("url=")[2], "hf://org/tiny", target)
        process.terminate()
        assert process.wait(timeout=30) == 0
