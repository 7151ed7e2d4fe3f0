"""`hf://` models, from a hub that speaks the real protocol: served when they are right, explained when they are not."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import kube
from e2e.cluster import programs
from e2e.cluster.volumes import host_path_claim
from e2e.demo_model import demo_model_directory
from e2e.hub.repository import Repository
from e2e.hub.server import Faults
from e2e.hub_of_demo import REPOSITORY, from_hub, running_hub
from e2e.test_modes import chat


def manifest(**model: Any) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((kube.MANIFESTS / "qwen.yaml").read_text())
    body["spec"]["model"].update(model)
    return body


def test_the_documentation_s_manifest_is_fetched_and_answers(namespace: str, tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub:
        kube.apply(from_hub(hub, manifest()), namespace)
        kube.wait_ready("qwen", namespace)
        assert chat("qwen", namespace)
        assert any("safetensors" in request.path for request in hub.requests)


def test_a_commit_that_the_uri_names_is_fetched_and_no_other(namespace: str, tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub:
        revision = Repository(tmp_path, REPOSITORY).find("main")
        assert revision is not None
        kube.apply(from_hub(hub, manifest(uri=f"hf://{REPOSITORY}@{revision.commit}")), namespace)
        kube.wait_ready("qwen", namespace)
        assert chat("qwen", namespace)
        fetched = {request.path for request in hub.requests if "/resolve/" in request.path}
        assert fetched
        assert all(f"/resolve/{revision.commit}/" in path for path in fetched), fetched


def test_a_job_fetches_into_the_claim_and_no_pod_fetches_again(namespace: str, tmp_path: Path) -> None:
    folder = tmp_path / "claim"
    folder.mkdir()
    folder.chmod(0o777)  # Kubernetes does not make a hostPath folder writable for the pod's user
    with running_hub(tmp_path) as hub:
        kube.apply(host_path_claim(namespace, "warm", str(folder)), namespace)
        body = from_hub(hub, manifest(cache={"strategy": "PVC", "claimName": "warm", "prewarm": True}))
        kube.apply(body, namespace)
        kube.wait_ready("qwen", namespace)
        (job,) = kube.list_("jobs", namespace)
        assert job["status"]["succeeded"] == 1
        assert chat("qwen", namespace)
        weights = [each for each in hub.requests if (each.method, each.path[-12:]) == ("GET", ".safetensors")]
        assert len(weights) == 1, "the pod has found what the Job has fetched"


def test_a_missing_model_and_a_wrong_checksum_are_conditions(namespace: str, tmp_path: Path) -> None:
    faults = Faults(corrupt=frozenset({"model.safetensors"}))
    with running_hub(tmp_path, faults) as hub:
        kube.apply(from_hub(hub, manifest()), namespace)
        found = kube.wait_until("ChecksumMismatch", lambda: failed("ChecksumMismatch", namespace))
        assert "model.safetensors" in found["message"]
        kube.apply(from_hub(hub, manifest(uri="hf://Qwen/No-Such-Model")), namespace)
        found = kube.wait_until("ModelNotFound", lambda: failed("ModelNotFound", namespace))
        assert "No-Such-Model" in found["message"]
        kube.apply(from_hub(hub, manifest(uri=f"hf://{REPOSITORY}@no-such-revision")), namespace)
        found = kube.wait_until("no revision", lambda: failed("ModelNotFound", namespace, "no-such-revision"))


def test_a_private_model_is_served_when_its_secret_is_there(namespace: str, tmp_path: Path) -> None:
    with running_hub(tmp_path, token="hf_right") as hub:
        kube.apply(from_hub(hub, manifest(secretRef={"name": "hub"})), namespace)
        found = kube.wait_until("SecretNotFound", lambda: failed("SecretNotFound", namespace))
        assert "Secret hub does not exist in this namespace, or lacks the key" in found["message"]
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}}
        kube.apply(secret | {"stringData": {"token": "hf_right"}}, namespace)
        kube.wait_ready("qwen", namespace)
        assert chat("qwen", namespace)


@pytest.mark.nightly
def test_a_volume_that_fills_during_a_download_is_in_the_status_until_it_has_room(
    namespace: str, tmp_path: Path
) -> None:
    if kube.current_context() != "conveyor-local":
        pytest.skip("only on the local cluster can a story mount a small volume")
    size = sum(path.stat().st_size for path in demo_model_directory().iterdir())
    with (
        volume(tmp_path / "claim", 2 * size) as folder,
        running_hub(tmp_path, Faults(bytes_per_second=size / 20)) as hub,
    ):
        kube.apply(host_path_claim(namespace, "small", str(folder)), namespace)
        kube.apply(from_hub(hub, manifest(cache={"strategy": "PVC", "claimName": "small"})), namespace)
        kube.wait_until("the download runs", lambda: list(folder.rglob("*.safetensors.*.unfinished")))
        fill(filler := folder / "filler")
        found = kube.wait_until("ModelDownloadFailed", lambda: failed("ModelDownloadFailed", namespace))
        assert "No space left on device" in found["message"] or "GiB free" in found["message"]
        filler.unlink()
        kube.wait_ready("qwen", namespace)
        assert chat("qwen", namespace)


def fill(path: Path) -> None:
    """Write to the file until its volume has no room."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


@contextmanager
def volume(folder: Path, size: int) -> Iterator[Path]:
    """Mount an empty volume of this many bytes."""
    folder.mkdir()
    programs.run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "tmpfs", folder, check=True)
    try:
        yield folder
    finally:
        programs.run("umount", "--lazy", folder, check=True)


def failed(reason: str, namespace: str, word: str = "") -> dict[str, Any] | None:
    condition = kube.condition(kube.get("infsvc", "qwen", namespace), "Ready")
    return condition if condition.get("reason") == reason and word in condition["message"] else None
