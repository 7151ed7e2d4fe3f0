"""The mistakes of docs/troubleshooting.md, made on the cluster: what is reported, and after how many seconds."""

import json
import shutil
import time
from collections.abc import Iterator

import pytest
from tests.operator.inferenceservice.mistakes import REPORTED, Reported

from e2e import kube
from e2e.cluster.gpus import COUNT, RESOURCE
from e2e.demo_model import demo_model_directory
from e2e.services import service

NAME = "mistake"
ENCODER_DECODER = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}


@pytest.fixture
def encoder_decoder() -> Iterator[None]:
    """Write an encoder-decoder model into the volume. Its other files are those of the demo's model."""
    demo = demo_model_directory()
    folder = demo.parent / "t5"
    shutil.copytree(demo, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(ENCODER_DECODER))
    yield
    shutil.rmtree(folder)


# Each comes from another part of the cluster. The others come from a part that one of these comes from.
# tests/operator/inferenceservice/test_mistakes.py has all of them.
IN_CI = {
    *("ClaimNotFound", "ModelNotFound", "ModelDownloadFailed", "SecretNotFound", "ImagePullFailed", "OOMKilled"),
    *("UnsupportedModel", "Unschedulable", "PodsRefused", "ChildRefused"),
}


def marks(mistake: Reported) -> list[pytest.MarkDecorator]:
    group = [pytest.mark.xdist_group("most GPUs")] if takes_most_gpus(mistake) else []
    return group if mistake.reason in IN_CI else [*group, pytest.mark.nightly]


def takes_most_gpus(mistake: Reported) -> bool:
    limits = mistake.on_cluster.get("resources", {}).get("limits", {})
    return COUNT // 2 < limits.get(RESOURCE, 0) <= COUNT


@pytest.mark.parametrize("mistake", [pytest.param(each, marks=marks(each), id=each.done) for each in REPORTED])
def test_the_status_reports_the_mistake(mistake: Reported, namespace: str, request: pytest.FixtureRequest) -> None:
    if mistake.on_cluster.get("model", {}).get("uri", "").endswith("/t5"):
        request.getfixturevalue("encoder_decoder")
    if mistake.quota:
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
        kube.apply(quota | {"spec": {"hard": mistake.quota}}, namespace)
    began = time.monotonic()
    kube.apply(service(NAME, **mistake.on_cluster), namespace)
    kube.wait_until(f"{mistake.reason}: {mistake.sentence}", lambda: is_reported(mistake, namespace))
    figure = f"{mistake.done}: {mistake.reason} after {time.monotonic() - began:.0f} s"
    request.node.user_properties.append(("figure", figure))


def is_reported(mistake: Reported, namespace: str) -> bool:
    """Return whether the columns of `kubectl get` and the condition's message report the mistake."""
    row = kube.kubectl("get", "infsvc", NAME, "-n", namespace, "--no-headers").split()
    ready = kube.condition(kube.get("infsvc", NAME, namespace), "Ready")
    return row[1:3] == [mistake.ready, mistake.reason] and (mistake.seen or mistake.sentence) in ready["message"]
