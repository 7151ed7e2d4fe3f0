"""Builds the Job that tries an engine's image and configuration before a rollout removes an old engine. Pure.

The Job's pod is an engine pod without devices, claims and the model's download. It parses the configuration and ends.
Where the engine would run, the node has pulled the image by then. The selectors for engine pods do not match it.
"""

from typing import Final

from conveyor_api import names
from conveyor_operator.inferenceservice.manifests.resources import of_job
from conveyor_operator.inferenceservice.manifests.scheduling import without_terms_about_engines
from conveyor_operator.loop.child import hash_of
from conveyor_operator.loop.owner import Object, Owner, build_metadata

# vLLM parses its configuration only with a GPU, so only its image is tried.
_COMMANDS: Final = {
    "Conveyor": ("python", "-m", "conveyor_engine", "check", "--config", names.ENGINE_CONFIG_PATH),
    "VLLM": ("python3", "-c", ""),
}
_NOT_CHECKING: Final = (
    "initContainers",
    "terminationGracePeriodSeconds",
    "resourceClaims",
    "topologySpreadConstraints",
)
_NOT_OF_CONTAINER: Final = ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
_MOST_TRIES: Final = 2**31 - 1  # a registry may be away for a while
_HASH_DIGITS: Final = 8


def build_check(owner: Owner, template: Object, image: str, runtime: str) -> Object:
    """Return the Job. template: for engine pods. image: for a container without one."""
    content = {"backoffLimit": _MOST_TRIES, "template": _build_template(owner, template, image, runtime)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": build_metadata(owner, names.check_name(owner.name, hash_of(content)[:_HASH_DIGITS])),
        "spec": content,
    }


def _build_template(owner: Owner, template: Object, image: str, runtime: str) -> Object:
    pods, metadata = template["spec"], template["metadata"]
    (engine,) = pods["containers"]
    volumes = [volume for volume in pods["volumes"] if "persistentVolumeClaim" not in volume]
    kept = {volume["name"] for volume in volumes}
    container = {
        **{key: value for key, value in engine.items() if key not in _NOT_OF_CONTAINER},
        "image": engine["image"] or image,
        "command": list(_COMMANDS[runtime]),
        "resources": of_job(engine["resources"]),
        "volumeMounts": [mount for mount in engine["volumeMounts"] if mount["name"] in kept],
    }
    spec: Object = {
        **{key: value for key, value in pods.items() if key not in _NOT_CHECKING},
        "restartPolicy": "OnFailure",
        "containers": [container],
        "volumes": volumes,
    }
    if "affinity" in pods:
        spec["affinity"] = without_terms_about_engines(pods["affinity"], owner.name)
    annotations = {key: text for key, text in metadata["annotations"].items() if key != names.CONFIG_HASH_ANNOTATION}
    labels = {**metadata["labels"], **names.check_labels(owner.name)}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}
