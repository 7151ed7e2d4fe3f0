"""Builds the engine's Deployment. Pure."""

from collections.abc import Mapping

from conveyor_api import names
from conveyor_operator.inferenceservice.observed import TEMPLATE_HASH_ANNOTATION
from conveyor_operator.loop.owner import Object, Owner, build_metadata

# Longer than the longest sensible download plus the start-up: an unfinished rollout is not an error before that.
_PROGRESS_DEADLINE_SECONDS = 2 * 60 * 60


def build_deployment(
    owner: Owner, rollout: Mapping[str, int | str], template: Object, image: str, template_hash: str
) -> Object:
    """Return the Deployment, without `replicas`.

    template: from `build_pod_template`. template_hash: from `image.hash_template`.
    rollout: the parameters of RollingUpdate. image: for containers without an image.
    """
    metadata = build_metadata(owner, names.engine_name(owner.name))
    metadata["annotations"] = {TEMPLATE_HASH_ANNOTATION: template_hash}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": names.pod_selector(owner.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": dict(rollout)},
            "progressDeadlineSeconds": _PROGRESS_DEADLINE_SECONDS,
            "revisionHistoryLimit": 1,
            "template": _with_image(template, image),
        },
    }


def _with_image(template: Object, image: str) -> Object:
    pods = template["spec"]
    imaged = {
        containers: [{**container, "image": container["image"] or image} for container in pods[containers]]
        for containers in ("initContainers", "containers")
    }
    return {**template, "spec": {**pods, **imaged}}
