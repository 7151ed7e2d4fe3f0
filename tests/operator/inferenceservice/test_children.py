"""Tests how the children of an InferenceService are created and changed on a real API server."""

import pytest
import yaml
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Stage, make_service, wait_until

from conveyor_api import names

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 4}


def test_a_service_gets_its_children_and_they_are_its_own(stage: Stage) -> None:
    with stage.operator():
        uid = stage.space.make_service()["metadata"]["uid"]
        children = stage.space.wait_children("qwen")
    kinds = sorted(kind for kind, _ in children)
    assert kinds == [
        "ConfigMap",
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "Service",
        "ServiceAccount",
    ]
    for kind, name in children:
        owners = stage.space.need(kind, name)["metadata"]["ownerReferences"]
        assert [(o["uid"], o["controller"]) for o in owners] == [(uid, True)]


def test_autoscaling_and_a_cache_add_an_autoscaler_and_a_claim(stage: Stage) -> None:
    model = {"uri": "hf://example/model@main", "cache": {"strategy": "PVC", "size": "10Gi"}}
    with stage.operator():
        stage.space.make_service(model=model, autoscaling=AUTOSCALING)
        stage.space.wait_children("qwen")
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        status = stage.space.wait_observed("qwen")["status"]
    claim = stage.space.need("PersistentVolumeClaim", "qwen-models")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert status["effective"]["cacheAccessMode"] == "ReadWriteMany"
    metrics = stage.space.need("HorizontalPodAutoscaler", "qwen-engine")["spec"]["metrics"]
    targets = {m["object"]["metric"]["name"]: m["object"]["target"]["averageValue"] for m in metrics}
    assert targets == {names.IN_FLIGHT_METRIC: "24", names.QUEUE_DEPTH_METRIC: "4"}


def test_taking_autoscaling_and_cache_away_removes_their_children(stage: Stage) -> None:
    model = {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "10Gi"}}
    with stage.operator(), Kubelet(stage.space, ready):
        stage.space.make_service(model=model, autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.space.edit("qwen", autoscaling=None, model={"cache": None})
        wait_until("no HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine") is None)

        def claim_is_leaving() -> bool:
            claim = stage.space.get("PersistentVolumeClaim", "qwen-models")
            return claim is None or "deletionTimestamp" in claim["metadata"]

        wait_until("no claim", claim_is_leaving)


def test_an_edit_rolls_the_pods_with_a_new_configuration_and_collects_the_old_one(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, ready) as kubelet:
        stage.space.make_service()
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        old = stage.space.config_maps()
        kubelet.decide = lambda pod: None
        stage.space.edit("qwen", batching={"maxBatchSize": 8})
        wait_until("a second ConfigMap", lambda: len(stage.space.config_maps()) == 2)
        stage.proxy.wait_quiet()
        assert old < stage.space.config_maps(), "the old one stays while a pod may need it"
        (new,) = stage.space.config_maps() - old
        template = stage.space.need("Deployment", "qwen-engine")["spec"]["template"]
        assert new.endswith(template["metadata"]["annotations"][names.CONFIG_HASH_ANNOTATION])
        text = stage.space.need("ConfigMap", new)["data"]["engine.yaml"]
        assert yaml.safe_load(text)["max_num_seqs"] == 8
        kubelet.decide = ready
        wait_until("only the new ConfigMap", lambda: stage.space.config_maps() == {new})


@pytest.mark.slow
def test_one_operator_serves_many_services_in_its_namespace(stage: Stage) -> None:
    with stage.operator():
        for number in range(6):
            stage.space.make_service(f"qwen-{number}")
        for number in range(6):
            stage.space.wait_children(f"qwen-{number}")


def test_services_of_other_namespaces_are_left_alone(stage: Stage) -> None:
    stage.space.make_service()
    with stage.operator(watch_namespaces=("default",)):
        stage.proxy.wait_quiet()
    assert stage.space.children("qwen") == set()


def test_the_builder_makes_what_the_api_server_accepts(stage: Stage) -> None:
    assert stage.space.create("InferenceService", make_service("other"))["metadata"]["generation"] == 1
