"""Tests children that the API server refuses."""

from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Stage, wait_until


def test_a_child_that_the_api_server_refuses_is_a_condition_with_its_words(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(pod={"nodeSelector": {"not a label": "x"}})
        condition = stage.space.wait_condition("qwen", "Ready", "False", "ChildRefused")
        assert "nodeSelector" in condition["message"]
        assert stage.space.condition("qwen", "WorkloadReady")["reason"] == "ChildRefused"
        assert stage.space.get("Deployment", "qwen-engine") is None
        stage.space.edit("qwen", pod={"nodeSelector": None})
        wait_until("the Deployment", lambda: stage.space.get("Deployment", "qwen-engine"))
        wait_until("no complaint", lambda: stage.space.condition("qwen", "Ready")["reason"] != "ChildRefused")


def test_a_bad_edit_leaves_the_running_pods_alone(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, ready):
        stage.space.make_service()
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        generation = stage.space.need("Deployment", "qwen-engine")["metadata"]["generation"]
        stage.space.edit("qwen", batching={"maxBatchSize": 8}, pod={"nodeSelector": {"not a label": "x"}})
        stage.space.wait_condition("qwen", "Ready", "False", "ChildRefused")
        assert stage.space.need("Deployment", "qwen-engine")["metadata"]["generation"] == generation
        assert stage.space.condition("qwen", "EndpointReady")["status"] == "True"
        assert len(stage.space.config_maps()) == 2, "the pods' ConfigMap must stay"


def test_pods_wait_for_a_configuration_that_is_refused(stage: Stage) -> None:
    quota = {"metadata": {"name": "no-more"}, "spec": {"hard": {"count/configmaps": "0"}}}
    stage.space.create("ResourceQuota", quota)
    with stage.operator():
        stage.space.make_service()
        condition = stage.space.wait_condition("qwen", "Ready", "False", "ChildRefused")
        assert "ConfigMap qwen-engine-" in condition["message"]
        stage.proxy.wait_quiet()
        assert stage.space.get("Deployment", "qwen-engine") is None
        stage.space.delete("ResourceQuota", "no-more")
        wait_until("the Deployment", lambda: stage.space.get("Deployment", "qwen-engine"))
