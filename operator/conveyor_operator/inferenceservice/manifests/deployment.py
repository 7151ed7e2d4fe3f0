"""Builds the engine's Deployment. Pure."""

import json
from collections.abc import Mapping
from math import ceil

from conveyor_api import names
from conveyor_operator.inferenceservice.observed import ROLLED_BACK_ANNOTATION, RolledBack
from conveyor_operator.inferenceservice.replica_sets import TEMPLATE_HASH_ANNOTATION
from conveyor_operator.loop.owner import Object, Owner, build_metadata

_LONGEST_DOWNLOAD_SECONDS = 90 * 60  # the longest sensible one


def build_deployment(
    owner: Owner,
    rollout: Mapping[str, int | str],
    template: Object,
    image: str,
    template_hash: str,
    startup_timeout_seconds: float,
) -> Object:
    """Return the Deployment, without `replicas`.

    template: from `build_pod_template`. template_hash: from `image.hash_template`.
    rollout: the parameters of RollingUpdate. image: for containers without an image. An unfinished rollout is no error
    before the longest download and start.
    """
    metadata = build_metadata(owner, names.engine_name(owner.name))
    metadata["annotations"] = {**owner.annotations, TEMPLATE_HASH_ANNOTATION: template_hash}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": names.pod_selector(owner.name)},
            "strategy": _build_strategy(rollout["maxSurge"], rollout["maxUnavailable"]),
            "progressDeadlineSeconds": _LONGEST_DOWNLOAD_SECONDS + ceil(startup_timeout_seconds),
            "revisionHistoryLimit": 1,
            "template": _with_image(template, image),
        },
    }


def build_restored(deployment: Object, template: Object, template_hash: str, cause: RolledBack) -> Object:
    """Return the Deployment with an earlier pod template, and with an annotation that says why.

    The pods that failed go first, whatever the spec says, because they may hold the only GPU.
    """
    rolled_back = json.dumps({"attempt": cause.attempt, "reason": cause.reason, "message": cause.message})
    annotations = {TEMPLATE_HASH_ANNOTATION: template_hash, ROLLED_BACK_ANNOTATION: rolled_back}
    metadata = deployment["metadata"]
    return {
        **deployment,
        "metadata": {**metadata, "annotations": {**metadata["annotations"], **annotations}},
        "spec": {**deployment["spec"], "strategy": _build_strategy(0, 1), "template": template},
    }


def _build_strategy(max_surge: int | str, max_unavailable: int | str) -> Object:
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": max_surge, "maxUnavailable": max_unavailable}}


def _with_image(template: Object, image: str) -> Object:
    pods = template["spec"]
    imaged = {
        containers: [{**container, "image": container["image"] or image} for container in pods[containers]]
        for containers in ("initContainers", "containers")
    }
    return {**template, "spec": {**pods, **imaged}}
