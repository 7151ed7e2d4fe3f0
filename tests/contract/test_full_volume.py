"""Tests that a volume that becomes full during a download is in the status, and that the service starts when it has
room."""

import json
from pathlib import Path

from tests.engine.fetching.hubs import running_hub, start_fetch, unfinished_path, write_repository
from tests.operator.kubelet import Json, Kubelet, fetch_failed, ready
from tests.operator.stage import Stage

FULL = Path("/dev/full")  # no byte has room there


def test_a_download_that_fills_its_volume_is_reported_and_passes(stage: Stage, tmp_path: Path) -> None:
    root, target, is_full = tmp_path / "hub", tmp_path / "models" / "tiny", [True]
    write_repository(root / "org" / "tiny")
    with running_hub(root) as hub:

        def fetch(pod: Json) -> Json:
            """Run the pod's download, and return the status of its end."""
            if is_full:
                unfinished_path(root, target).symlink_to(FULL)
            process = start_fetch(hub.url, "hf://org/tiny", target)
            process.communicate(timeout=100)
            if process.returncode == 0:
                return ready(pod)
            return fetch_failed(pod, **json.loads((tmp_path / "termination").read_text()))

        with stage.operator(), Kubelet(stage.space, fetch):
            stage.space.make_service(model={"uri": "hf://org/tiny"})
            failed = stage.space.wait_condition("qwen", "Ready", "False", "ModelDownloadFailed")
            assert f"cannot write hf://org/tiny to {target}: No space left on device" in failed["message"]
            assert not stage.space.condition("qwen", "Stalled"), "it passes when there is room"
            is_full.clear()
            stage.space.wait_condition("qwen", "Ready", "True", "Ready")
            assert target.is_dir()
