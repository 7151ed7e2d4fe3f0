"""Tests services that are deleted, created again with the same name, or leave orphans."""

import pytest
from tests.operator.stage import CHILD_KINDS, Stage, wait_until

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 4}


@pytest.mark.slow
def test_deleting_a_service_leaves_nothing(stage: Stage) -> None:
    model = {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "10Gi"}}
    with stage.operator():
        stage.space.make_service(model=model, autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        finalizers = {"metadata": {"finalizers": None}}  # pods would hold the claim, and nobody takes them away here
        stage.space.patch("PersistentVolumeClaim", "qwen-models", finalizers)
        stage.space.delete("InferenceService", "qwen")
        wait_until("nothing is left", lambda: not left(stage), 60, lambda: left(stage))
        stage.proxy.wait_quiet()
        assert not left(stage)


def test_deleting_needs_no_operator(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
    stage.space.delete("InferenceService", "qwen")
    wait_until("nothing is left", lambda: not left(stage), 60, lambda: left(stage))


def left(stage: Stage) -> list[str]:
    kinds = (*CHILD_KINDS, "InferenceService", "ReplicaSet", "Pod", "EndpointSlice")
    found = [(kind, o["metadata"]["name"]) for kind in kinds for o in stage.space.list(kind)]
    standard = {("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")}
    return [f"{kind}/{name}" for kind, name in found if (kind, name) not in standard]


def test_a_service_that_is_being_deleted_gets_no_new_children(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.space.patch("InferenceService", "qwen", {"metadata": {"finalizers": ["example.org/wait"]}})
        stage.space.delete("InferenceService", "qwen")
        stage.space.delete("PodDisruptionBudget", "qwen-engine")
        stage.proxy.wait_quiet()
        assert stage.space.get("PodDisruptionBudget", "qwen-engine") is None
        stage.space.patch("InferenceService", "qwen", {"metadata": {"finalizers": None}})


def test_a_service_made_again_under_its_name_gets_its_own_children(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.space.delete("InferenceService", "qwen")
        uid = stage.space.make_service()["metadata"]["uid"]

        def owned_anew() -> bool:
            found = [stage.space.get(kind, name) for kind, name in stage.space.children("qwen")]  # None: gone by now
            return len(found) == 7 and all(o and o["metadata"]["ownerReferences"][0]["uid"] == uid for o in found)

        wait_until("children of the second one", owned_anew, 60, lambda: stage.space.children("qwen"))
        stage.space.wait_condition("qwen", "ScalingReady", "True", "FixedReplicas")


def test_orphans_of_a_former_service_are_taken_back(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        uid = stage.space.need("Deployment", "qwen-engine")["metadata"]["uid"]
        path = stage.space.path("InferenceService", "qwen") + "?propagationPolicy=Orphan"
        stage.space.api.delete(path)
        wait_until("it is gone", lambda: stage.space.get("InferenceService", "qwen") is None)
        new = stage.space.make_service()["metadata"]["uid"]

        def is_ours() -> bool:
            metadata = stage.space.need("Deployment", "qwen-engine")["metadata"]
            return metadata["uid"] == uid and [o["uid"] for o in metadata.get("ownerReferences", ())] == [new]

        wait_until("the same Deployment with the new owner", is_ours)
