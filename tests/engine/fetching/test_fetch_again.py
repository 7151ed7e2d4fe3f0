"""Tests a fetch that was killed, failed or began twice. Existing files are used, and other files are removed."""

import json
import os
import time
from pathlib import Path

import pytest
from tests.engine.fetching.hubs import (
    INDEX,
    NOWHERE,
    WEIGHTS,
    Fetch,
    bytes_of_model,
    files_no_larger_than,
    limit_volume,
    partial_of,
    running_hub,
    start_fetch,
    unfinished_path,
)

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching import fetch as fetch_module
from conveyor_engine.fetching.fetch import MARKER
from conveyor_engine.fetching.source import RemoteFile
from e2e.hub.server import Hub


@pytest.mark.slow
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


def test_a_cut_connection_is_gone_on_with_where_it_ended(fetch_from: Fetch, root: Path, target: Path) -> None:
    content = os.urandom(24_000_000)
    (root / "org/tiny" / WEIGHTS).write_bytes(content)
    with running_hub(root, cut={WEIGHTS}) as hub:
        fetch_from(hub.url, "hf://org/tiny", target)
        gets = [r.range for r in hub.requests if r.method == "GET" and r.path.endswith(WEIGHTS)]
    assert gets == [None, f"bytes={10 * 2**20}-"]
    assert (target / WEIGHTS).read_bytes() == content


def test_two_fetches_at_once_share_the_work(root: Path, target: Path) -> None:
    with running_hub(root, bytes_per_second=200_000) as hub:
        both = [start_fetch(hub.url, "hf://org/tiny", target) for _ in "ab"]
        logs = [process.communicate(timeout=200)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], logs
        assert len([r for r in hub.requests if r.method == "GET" and "/resolve/" in r.path]) == 5
    assert sum("event=model_complete_already" in log for log in logs) == 1
    assert sum("event=model_fetched" in log for log in logs) == 1


def test_a_second_pod_sends_no_request_to_the_hub(hub: Hub, target: Path) -> None:
    start_fetch(hub.url, "hf://org/tiny", target).communicate(timeout=200)
    assert len([r for r in hub.requests if "org/tiny" in r.path]) == 11, "its description, and two for each file"
    hub.requests.clear()
    _, log = start_fetch(hub.url, "hf://org/tiny", target).communicate(timeout=200)
    assert "event=model_complete_already" in log
    assert hub.requests == []


def test_a_volume_with_room_for_one_copy_is_enough_to_resume(
    monkeypatch: pytest.MonkeyPatch, fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    unfinished_path(root, target).write_bytes((root / "org/tiny" / WEIGHTS).read_bytes()[:200_000])
    limit_volume(monkeypatch, target.parent, bytes_of_model(root))
    fetch_from(hub.url, "hf://org/tiny", target)
    assert "bytes=200000-" in [request.range for request in hub.requests]


@pytest.mark.parametrize("with_index", [False, True])
def test_what_is_left_of_an_older_commit_makes_room(
    monkeypatch: pytest.MonkeyPatch, fetch_from: Fetch, hub: Hub, root: Path, target: Path, with_index: bool
) -> None:
    if with_index:
        (root / "org/tiny" / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS}}))
    partial = partial_of(target)
    (partial / f"{WEIGHTS}.{'0' * 16}.unfinished").write_bytes(bytes(200_000))
    (partial / WEIGHTS).write_bytes(bytes(100_000))
    (partial / "model-1-of-2.safetensors").write_bytes(bytes(300_000))
    limit_volume(monkeypatch, target.parent, 600_000)
    fetch_from(hub.url, "hf://org/tiny", target)
    assert (target / WEIGHTS).read_bytes() == (root / "org/tiny" / WEIGHTS).read_bytes()


def test_a_volume_that_is_too_small_is_said_before_the_first_byte(
    monkeypatch: pytest.MonkeyPatch, fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    limit_volume(monkeypatch, partial_of(target), bytes_of_model(root) - 1)
    with pytest.raises(ModelError, match="GiB free") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"
    assert not any("/resolve/" in request.path for request in hub.requests)


def test_a_disk_that_is_full_within_the_last_write_is_no_wrong_checksum(
    fetch_from: Fetch, hub: Hub, target: Path
) -> None:
    with files_no_larger_than(200_000), pytest.raises(ModelError, match="cannot write") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"
    fetch_from(hub.url, "hf://org/tiny", target)
    assert "bytes=200000-" in [request.range for request in hub.requests]


def test_what_is_complete_already_is_hashed_once(
    monkeypatch: pytest.MonkeyPatch, fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    (partial_of(target) / WEIGHTS).write_bytes((root / "org/tiny" / WEIGHTS).read_bytes())
    compute_digest, hashed = fetch_module.compute_digest, []

    def compute_and_note(path: Path, file: RemoteFile) -> str:
        hashed.append(path.name)
        return compute_digest(path, file)

    monkeypatch.setattr(fetch_module, "compute_digest", compute_and_note)
    fetch_from(hub.url, "hf://org/tiny", target)
    assert hashed.count(WEIGHTS) == 1
    assert not any(WEIGHTS in request.path for request in hub.requests)


def test_main_is_the_same_model_whether_named_or_not(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    fetch_from(hub.url, "hf://org/tiny", target)
    fetch_from(NOWHERE, "hf://org/tiny@main", target)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"uri": 7}', '{"uri": "hf://org/tiny", "files": []}'])
def test_a_marker_that_is_none_of_ours_is_no_marker(fetch_from: Fetch, hub: Hub, target: Path, content: str) -> None:
    target.mkdir(parents=True)
    (target / MARKER).write_text(content)
    fetch_from(hub.url, "hf://org/tiny", target)
    assert (target / WEIGHTS).exists()
