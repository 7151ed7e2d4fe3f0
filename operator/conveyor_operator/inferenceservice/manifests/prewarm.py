"""The Job that brings a model into its cache before the pods that need it, without a device. Pure.

Its pod runs the fetch of the engine's pods, as they do, and is named by what it runs: another fetch is another Job. No
selector of the engine's pods finds it.
"""

from typing import Any

from conveyor_api import names
from conveyor_operator.inferenceservice.manifests.resources import of_fetch
from conveyor_operator.loop.child import hash_of
from conveyor_operator.loop.owner import Object, Owner, build_metadata

_NOT_FETCHING = (
    "containers",
    "initContainers",
    "volumes",
    "terminationGracePeriodSeconds",
    "resourceClaims",
    "topologySpreadConstraints",
)
_NOT_FETCHED_INTO = (names.CONFIG_VOLUME, names.SHARED_MEMORY_VOLUME)
_MOST_TRIES = 2**31 - 1  # the kubelet tries again, less and less often, as it does in the engine's pods
_HASH_DIGITS = 8


def build_prewarm(owner: Owner, template: Object, image: str, one_node: bool) -> Object:
    """`template` is the engine's pods'. `one_node`: only one node may mount the claim at a time."""
    content = {"backoffLimit": _MOST_TRIES, "template": _build_template(owner, template, image, one_node)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": build_metadata(owner, names.prewarm_name(owner.name, hash_of(content)[:_HASH_DIGITS])),
        "spec": content,
    }


def _build_template(owner: Owner, template: Object, image: str, one_node: bool) -> Object:
    pods, metadata = template["spec"], template["metadata"]
    (fetch,) = pods["initContainers"]
    annotations = {key: text for key, text in metadata["annotations"].items() if key != names.CONFIG_HASH_ANNOTATION}
    spec: Object = {
        **{key: value for key, value in pods.items() if key not in _NOT_FETCHING},
        "restartPolicy": "OnFailure",
        "containers": [{**fetch, "image": fetch["image"] or image, "resources": of_fetch(fetch["resources"])}],
        "volumes": [volume for volume in pods["volumes"] if volume["name"] not in _NOT_FETCHED_INTO],
    }
    if one_node:
        spec["affinity"] = _beside_engines(owner, pods.get("affinity", {}))
    labels = {**metadata["labels"], **names.prewarm_labels(owner.name)}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def _beside_engines(owner: Owner, given: Object) -> Object:
    """On the node of the pods that have the claim. Where there are none, a pod that is among those may go anywhere.

    Pods that the spec requires to be near are only preferred: an engine, which obeys that, need not be one of them.
    """
    own = [names.pod_selector(owner.name), names.prewarm_pod_selector(owner.name)]
    values = [value for selector in own for value in selector.values()]
    term: dict[str, Any] = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {
            "matchExpressions": [{"key": names.INFERENCE_SERVICE_LABEL, "operator": "In", "values": values}]
        },
    }
    required, preferred = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))
    near = given.get("podAffinity", {})
    wishes = [{"weight": 100, "podAffinityTerm": theirs} for theirs in near.get(required, [])]
    return {**given, "podAffinity": {required: [term], preferred: [*near.get(preferred, []), *wishes]}}
