"""Tests a volume that becomes full during a fetch, and a termination message that cannot be written.

/dev/full is a disk on which no byte has room.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.fetching.buckets import URI, Server
from tests.engine.fetching.hubs import WEIGHTS, Fetch, partial_of, start_fetch, unfinished_path
from tests.engine.fetching.test_fetch import POOLING_FILES
from tests.engine.processes import environment

from conveyor_engine.__main__ import main
from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.fetch import MARKER, fetch
from e2e.hub.server import Hub

FULL = Path("/dev/full")


def test_a_full_volume_is_left_empty_and_the_next_start_works(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    unfinished_path(root, target).symlink_to(FULL)
    with pytest.raises(ModelError, match=f"cannot write hf://org/tiny to {target}: No space left on device") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"
    assert [path.name for path in target.parent.iterdir()] == [f".{target.name}.lock"]
    fetch_from(hub.url, "hf://org/tiny", target)
    assert (target / WEIGHTS).read_bytes() == (root / "org/tiny" / WEIGHTS).read_bytes()


def test_a_volume_that_a_bucket_s_model_fills_is_left_empty(server: Server, target: Path) -> None:
    fetch(URI, str(target))
    etag = json.loads((target / MARKER).read_text())["files"][WEIGHTS]["digest"]
    (target / MARKER).unlink()
    (partial_of(target) / f"{WEIGHTS}.{etag[:16]}.unfinished").symlink_to(FULL)
    with pytest.raises(ModelError, match="No space left on device"):
        fetch(URI, str(target))
    assert not target.with_name(f".{target.name}.partial").exists()
    fetch(URI, str(target))
    assert (target / MARKER).exists()


def test_a_full_volume_is_reported_in_the_container_s_status(hub: Hub, root: Path, target: Path) -> None:
    unfinished_path(root, target).symlink_to(FULL)
    process = start_fetch(hub.url, "hf://org/tiny", target)
    process.communicate(timeout=200)
    assert process.returncode == 1
    termination = json.loads((target.parent.parent / "termination").read_text())
    assert termination["reason"] == "ModelDownloadFailed"
    assert "No space left on device" in termination["message"]


def test_files_that_an_older_engine_ran_without_need_no_room(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "org/tiny/1_Pooling").mkdir()
    for name in POOLING_FILES:
        (root / "org/tiny" / name).write_text(json.dumps({"name": name}))
    fetch_from(hub.url, "hf://org/tiny", target)
    marker = json.loads((target / MARKER).read_text())
    del marker["wanted"]
    digest = marker["files"].pop("modules.json")["digest"]
    (target / "modules.json").unlink()
    (target / f"modules.json.{digest[:16]}.unfinished").symlink_to(FULL)
    (target / MARKER).write_text(json.dumps(marker))
    fetch_from(hub.url, "hf://org/tiny", target)
    assert "event=missing_files_not_fetched" in caplog.text
    assert (target / WEIGHTS).exists()


@pytest.mark.slow
def test_a_fetch_needs_no_log(hub: Hub, target: Path) -> None:
    command = [sys.executable, "-m", "conveyor_engine", "fetch", "--uri", "hf://org/tiny", "--target", str(target)]
    command += ["--task", "none"]
    with FULL.open("w") as full:
        found = subprocess.run(
            command, env=environment(HF_ENDPOINT=hub.url, PYTHONUNBUFFERED=""), stdout=full, stderr=full, check=False
        )
    assert found.returncode == 0
    assert (target / MARKER).exists()


@pytest.mark.parametrize("path", ["/dev/full", "/", "/no/such/folder/termination-log", "/proc/self/mem\udc80"])
def test_a_termination_message_that_cannot_be_written_changes_no_exit_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, path: str
) -> None:
    monkeypatch.setenv("TERMINATION_LOG", path)
    assert main(["fetch", "--uri", "pvc://models/tiny", "--target", str(tmp_path / "none")]) == 1
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    assert main(["fetch", "--uri", "pvc://models/tiny", "--target", str(tmp_path)]) == 0
