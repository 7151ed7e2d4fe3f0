"""`oci://` models: the node pulls an image from a registry and mounts it, or the conditions say why it cannot."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from e2e import kube, oci
from e2e.demo_model import demo_model_directory
from e2e.services import service
from e2e.test_modes import chat

pytestmark = pytest.mark.mounts_images

NAME = "packed"


@pytest.fixture(scope="module", autouse=True)
def _node_mounts_images() -> None:
    (node,) = kube.list_("nodes", "default")
    runtime = node["status"]["nodeInfo"]["containerRuntimeVersion"]
    assert runtime.startswith(f"containerd://{oci.VERSION}"), f"{runtime}: run `make cluster-down`, then `make oci`"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[oci.Registry]:
    with oci.running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def image(registry: oci.Registry) -> str:
    digest = registry.push(demo_model_directory(), "models/demo:1")
    return f"{registry.address}/models/demo:1@{digest}"


def apply(uri: str, namespace: str, **spec: Any) -> None:
    kube.apply(service(NAME, model={"uri": uri}, **spec), namespace)


def test_the_image_is_pulled_once_and_mounted_in_each_pod(image: str, registry: oci.Registry, namespace: str) -> None:
    uri = f"oci://{image}//models"
    pushed = registry.num_requests()
    apply(uri, namespace)
    kube.wait_ready(NAME, namespace)
    assert chat(NAME, namespace)
    pulled = registry.num_requests()
    assert pulled > pushed
    apply(uri, namespace, replicas=2)
    kube.wait_until("two engines", lambda: num_ready(namespace) == 2)
    assert registry.num_requests() == pulled


@pytest.mark.parametrize("version", [":1", f":1@sha256:{'a' * 64}"], ids=["tag", "digest"])
def test_the_status_names_the_image_that_does_not_exist(version: str, registry: oci.Registry, namespace: str) -> None:
    reference = f"{registry.address}/models/nowhere{version}"
    apply(f"oci://{reference}", namespace)
    for reason in ("ErrImagePull", "ImagePullBackOff"):
        kube.wait_until(reason, partial(kubelet_reports, reason, namespace))
    message = f"image {reference} cannot be pulled: "
    kube.wait_until(message, lambda: is_reported("ImagePullFailed", message, namespace))
    events = [each["message"] for each in kube.list_("events", namespace) if each["reason"] == "ImagePullFailed"]
    assert events
    assert all(message in each for each in events), events


def test_the_status_names_a_folder_that_the_image_lacks_and_a_change_helps(image: str, namespace: str) -> None:
    apply(f"oci://{image}//nowhere", namespace)
    kube.wait_until("ModelNotFound", lambda: is_reported("ModelNotFound", "/models/oci/nowhere", namespace))
    apply(f"oci://{image}//models", namespace)
    kube.wait_ready(NAME, namespace)


def num_ready(namespace: str) -> int:
    return int(((kube.get("infsvc", NAME, namespace) or {}).get("status") or {}).get("readyReplicas", 0))


def is_reported(reason: str, words: str, namespace: str) -> bool:
    ready = kube.condition(kube.get("infsvc", NAME, namespace), "Ready")
    return ready.get("reason") == reason and words in ready["message"]


def kubelet_reports(reason: str, namespace: str) -> bool:
    pods = kube.list_("pods", namespace)
    states = [status["state"] for pod in pods for status in pod["status"].get("initContainerStatuses", [])]
    return reason in [state.get("waiting", {}).get("reason") for state in states]
