"""A fetch that was killed, failed or began twice: what is there is used, and nothing else stays."""

import os
import time
from pathlib import Path

from tests.engine.fetch.hubs import WEIGHTS, Fetch, running_hub, start_fetch


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
