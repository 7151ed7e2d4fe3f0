"""Installs KEDA's own definition of ScaledObjects, and plays KEDA's part for tests."""

from pathlib import Path
from typing import Any

from tests.operator.stage import Space, install_definition, wait_until

from e2e import keda
from e2e.cluster.api import Api, ApiError

Json = dict[str, Any]

FINALIZER = "finalizer.keda.sh"
_CRD = Path("config", "crd", "bases", "keda.sh_scaledobjects.yaml")
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_COLLECTION = "/apis/keda.sh/v1alpha1/scaledobjects"


def install(api: Api) -> None:
    install_definition(api, keda.fetch() / _CRD)


def remove(api: Api) -> None:
    """Remove the definition and every ScaledObject."""
    if not api.reachable(_COLLECTION):
        return
    for found in api.get(_COLLECTION)["items"]:
        metadata = found["metadata"]
        unfinish(Space(api, metadata["namespace"]), metadata["name"])
    api.delete(f"{_CRDS}/scaledobjects.keda.sh")
    wait_until("no ScaledObjects", lambda: not api.reachable(_COLLECTION))


def unfinish(space: Space, name: str = "qwen-engine") -> None:
    """Remove the finalizer, as KEDA does when a ScaledObject is deleted."""
    try:
        space.patch("ScaledObject", name, {"metadata": {"finalizers": None}})
    except ApiError as error:
        if error.code != 404:
            raise


def judge(space: Space, name: str = "qwen-engine", **conditions: tuple[str, str, str]) -> None:
    """Write these conditions, each status, reason and message, as KEDA does."""
    written = [
        {"type": type, "status": status, "reason": reason, "message": message}
        for type, (status, reason, message) in conditions.items()
    ]
    space.patch("ScaledObject", name, {"status": {"conditions": written}}, "status")


def take_up(space: Space, name: str = "qwen-engine") -> None:
    """Make the finalizer, the label and the HPA, as KEDA 2.21 does (controllers/keda/hpa.go)."""
    label = {"scaledobject.keda.sh/name": name}
    found = space.patch("ScaledObject", name, {"metadata": {"finalizers": [FINALIZER], "labels": label}})
    metadata, spec = found["metadata"], found["spec"]
    config = spec["advanced"]["horizontalPodAutoscalerConfig"]
    owner = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "name": name, "uid": metadata["uid"]}
    body = {
        "metadata": {
            "name": config["name"],
            "labels": metadata["labels"],
            "ownerReferences": [owner | {"controller": True, "blockOwnerDeletion": True}],
        },
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"],
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": config["behavior"],
            "metrics": [_build_metric(number, trigger, label) for number, trigger in enumerate(spec["triggers"])],
        },
    }
    space.create("HorizontalPodAutoscaler", body)
    judge(space, name, Ready=("True", "ScaledObjectReady", ""), Paused=("False", "", ""))


def _build_metric(number: int, trigger: Json, label: Json) -> Json:
    metadata = trigger["metadata"]
    metric = {"name": f"s{number}-metric-api-{metadata['valueLocation']}", "selector": {"matchLabels": label}}
    return {
        "type": "External",
        "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": metadata["targetValue"]}},
    }
