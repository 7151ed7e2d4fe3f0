"""Builds the Job that downloads a model into its cache before engine pods need it. The Job uses no device. Pure.

The Job's pod runs the same fetch containers as the engine's pods, that of the model last. Engines fetch the other
adapters themselves. The pod does not mount claims and images that already contain an adapter: another node may have
the claim. The Job's name contains a hash of its content,
so a different fetch is a new Job. The selectors for engine pods do not match the Job's pod. Terms of the affinity that
select the engines are left out: with an engine on each node, no node would be far enough from all of them.
"""

import re
from typing import Any

from conveyor_api import names
from conveyor_operator.inferenceservice.manifests.resources import of_job
from conveyor_operator.inferenceservice.manifests.scheduling import without_terms_about_engines
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
_MOST_TRIES = 2**31 - 1  # the kubelet retries with growing delays, as in the engine's pods
_HASH_DIGITS = 8


def build_prewarm(owner: Owner, template: Object, image: str, one_node: bool) -> Object:
    """Return the Job. `template`: for engine pods. `one_node`: only one node at a time may mount the claim."""
    content = {"backoffLimit": _MOST_TRIES, "template": _build_template(owner, template, image, one_node)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": build_metadata(owner, names.prewarm_name(owner.name, hash_of(content)[:_HASH_DIGITS])),
        "spec": content,
    }


def _build_template(owner: Owner, template: Object, image: str, one_node: bool) -> Object:
    pods, metadata = template["spec"], template["metadata"]
    fetch, *others = (
        {**each, "image": each["image"] or image, "resources": of_job(each["resources"])}
        for each in pods["initContainers"]
    )
    left_out = {*_NOT_FETCHED_INTO, *(volume["name"] for volume in pods["volumes"] if _is_of_adapters(volume))}
    annotations = {key: text for key, text in metadata["annotations"].items() if key != names.CONFIG_HASH_ANNOTATION}
    spec: Object = {
        **{key: value for key, value in pods.items() if key not in _NOT_FETCHING},
        "restartPolicy": "OnFailure",
        **({"initContainers": others} if others else {}),
        "containers": [fetch],
        "volumes": [volume for volume in pods["volumes"] if volume["name"] not in left_out],
    }
    if "affinity" in pods:
        spec["affinity"] = without_terms_about_engines(pods["affinity"], owner.name)
    if one_node:
        spec["affinity"] = _beside_engines(owner, spec.get("affinity", {}))
    labels = {**metadata["labels"], **names.prewarm_labels(owner.name)}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def _is_of_adapters(volume: Object) -> bool:
    """Return whether the volume is a claim or an image that already contains an adapter, or the list of adapters."""
    return re.fullmatch(rf"{names.ADAPTER_VOLUME}-(list|\d+)", volume["name"]) is not None


def _beside_engines(owner: Owner, given: Object) -> Object:
    """Return an affinity for the node of the pods that mount the claim.

    If there are no such pods, any node is allowed, because the Job's pod itself matches the term.

    The required podAffinity terms of the spec become preferred ones. Kubernetes looks for pods that match all required
    terms at once. Engine pods match Conveyor's term, but perhaps not those of the spec. Then no pod would match, and
    the Job's pod could not be scheduled.
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
    preferences = [{"weight": 100, "podAffinityTerm": theirs} for theirs in near.get(required, [])]
    return {**given, "podAffinity": {required: [term], preferred: [*near.get(preferred, []), *preferences]}}
