"""Tests that a model in an image is a volume that the real API server accepts, and that refusals are reported."""

from dataclasses import replace

import pytest
from tests.operator.builders import build_one, desire, make_observed, make_pod
from tests.operator.inferenceservice.test_plan import remember
from tests.operator.kubelet import Json, Kubelet, ready
from tests.operator.stage import Space, Stage

from conveyor_api.conditions import Reason
from conveyor_operator.inferenceservice.differences import find_differences
from conveyor_operator.inferenceservice.failures import find_failure
from conveyor_operator.inferenceservice.pods import ContainerState, observe_pod
from conveyor_operator.loop.steps import Obstacle

REFERENCE = f"registry.example.com/models/qwen:1@sha256:{'a' * 64}"
MODEL = {"uri": f"oci://{REFERENCE}//models"}
SECRET = {"imagePullSecrets": [{"name": "registry"}]}


def forbid_what_is_not_restricted(space: Space) -> None:
    body = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    space.api.call("PATCH", f"/api/v1/namespaces/{space.namespace}", body, "application/merge-patch+json")


def volume_of(pods: Json) -> Json:
    (volume,) = [each for each in pods["volumes"] if each["name"] == "models"]
    return dict(volume)


def test_the_pods_mount_the_image_and_read_the_folder_in_it(stage: Stage) -> None:
    space = stage.space
    forbid_what_is_not_restricted(space)
    with stage.operator(), Kubelet(space, ready):
        space.make_service(model=MODEL, pod=SECRET)
        space.wait_condition("qwen", "Ready", "True", "Ready")
    (pod,) = space.list("Pod")
    assert volume_of(pod["spec"])["image"] == {"reference": REFERENCE, "pullPolicy": "IfNotPresent"}
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    (fetch,), (engine,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    for container in (fetch, engine):
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "models"]
        assert (mount["mountPath"], mount["readOnly"]) == ("/models/oci", True)
    assert fetch["command"][-4:] == ["--uri", MODEL["uri"], "--target", "/models/oci/models"]
    (config,) = [each["data"]["engine.yaml"] for each in space.list("ConfigMap") if "engine.yaml" in each["data"]]
    assert "model: /models/oci/models\n" in config
    assert "fsGroup" not in pod["spec"]["securityContext"], "an image has the groups that it has"


@pytest.mark.parametrize(
    "message",
    [
        'Deployment.apps "qwen-engine" is invalid: spec.template.spec.volumes[1]: Required value: '
        "must specify a volume type",
        'failed to create typed patch object: .spec.template.spec.volumes[name="models"].image: '
        "field not declared in schema",
    ],
)
def test_a_cluster_without_image_volumes_is_reported(message: str) -> None:
    memory = remember()
    id = ("Deployment", "qwen-engine")
    memory.refused[id] = Obstacle(*id, Reason.CHILD_REFUSED, message)
    (obstacle,) = find_differences(desire(model=MODEL), make_observed(), memory).obstacles
    assert obstacle.message == (
        f"{message}. model.uri: oci:// needs image volumes, which this cluster lacks (Kubernetes 1.35 has them)"
    )
    adapters = [{"name": "sql", "uri": f"oci://{REFERENCE}"}]
    (adapted,) = find_differences(desire(adapters=adapters), make_observed(), memory).obstacles
    assert adapted.message == obstacle.message.replace("model.uri", "adapters")
    (other,) = find_differences(desire(), make_observed(), memory).obstacles
    assert other.message == message


def describe(waiting: str, message: str) -> str:
    """Return the report about a pod with the model in an image, whose first container waits."""
    template = build_one("Deployment", model=MODEL)["spec"]["template"]
    pod = observe_pod({"metadata": {"name": "a", "creationTimestamp": ""}, "spec": template["spec"]})
    container = ContainerState("fetch", "example/engine:1", waiting_reason=waiting, waiting_message=message)
    failure = find_failure(replace(pod, containers=(container,)))
    assert failure is not None
    return failure.message


def test_an_image_that_cannot_be_pulled_is_the_one_that_is_named() -> None:
    without_tag = REFERENCE.replace(":1@", "@")  # as containerd has it
    cause = f'rpc error: code = NotFound desc = failed to pull and unpack image "{without_tag}": not found'
    expected = f"image {REFERENCE} cannot be pulled: {cause}"
    assert describe("ErrImagePull", cause) == expected
    assert describe("ImagePullBackOff", f'Back-off pulling image "{REFERENCE}": ErrImagePull: {cause}') == expected
    assert describe("ErrImagePull", "failed to pull example/engine:1: no").startswith("image example/engine:1 cannot")
    assert make_pod().model_image == ""


def test_a_node_whose_runtime_mounts_no_images_is_reported() -> None:
    """The message is that of containerd 1.6."""
    message = (
        'failed to generate container "3e71" spec: failed to generate spec: failed to mkdir "": '
        "mkdir : no such file or directory"
    )
    assert describe("CreateContainerError", message) == (
        "container fetch cannot start: model.uri: oci:// needs image volumes, which the node's runtime lacks "
        "(containerd 2.1 has them)"
    )
    assert describe("CreateContainerError", "other") == "container fetch cannot start: other"
