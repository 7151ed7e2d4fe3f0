"""Tests that objects of other owners with the names of children are not adopted."""

from tests.operator.stage import Stage, wait_until

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 4}


def test_an_object_of_somebody_else_is_not_adopted(stage: Stage) -> None:
    theirs = {"metadata": {"name": "qwen"}, "spec": {"ports": [{"port": 80}], "selector": {"app": "theirs"}}}
    stage.space.create("Service", theirs)
    with stage.operator():
        stage.space.make_service()
        condition = stage.space.wait_condition("qwen", "Ready", "False", "ChildNotOwned")
        assert "Service qwen already exists and was not created by Conveyor" in condition["message"]
        stage.space.wait_children("qwen")  # the others are there all the same
        assert stage.space.need("Service", "qwen")["spec"]["selector"] == {"app": "theirs"}
        stage.space.delete("Service", "qwen")
        wait_until("ours", lambda: (stage.space.get("Service", "qwen") or {}).get("spec", {}).get("externalName"))


def make_foreign_deployment(stage: Stage) -> None:
    labels = {"app": "theirs"}
    pod = {"containers": [{"name": "web", "image": "example/web:1"}]}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}}
    spec |= {"template": {"metadata": {"labels": labels}, "spec": pod}}
    stage.space.create("Deployment", {"metadata": {"name": "qwen-engine"}, "spec": spec})


def test_a_deployment_of_somebody_else_is_not_scaled(stage: Stage) -> None:
    make_foreign_deployment(stage)
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        stage.space.wait_condition("qwen", "Ready", "False", "ChildNotOwned")
        stage.proxy.wait_quiet()
        assert stage.space.get("HorizontalPodAutoscaler", "qwen-engine") is None


def test_an_autoscaler_leaves_a_deployment_that_somebody_else_took_over(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.proxy.wait_quiet()
    stage.space.delete("Deployment", "qwen-engine")
    wait_until("no Deployment", lambda: stage.space.get("Deployment", "qwen-engine") is None)
    make_foreign_deployment(stage)
    with stage.operator():
        wait_until("no HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine") is None)


def test_a_child_of_another_controller_is_not_adopted(stage: Stage) -> None:
    other = stage.space.create("ConfigMap", {"metadata": {"name": "other"}})
    owner = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "other",
        "uid": other["metadata"]["uid"],
        "controller": True,
    }
    theirs = {"metadata": {"name": "qwen-engine", "ownerReferences": [owner]}, "spec": {"maxUnavailable": 2}}
    stage.space.create("PodDisruptionBudget", theirs)
    with stage.operator():
        stage.space.make_service()
        condition = stage.space.wait_condition("qwen", "Ready", "False", "ChildNotOwned")
    assert "belongs to ConfigMap/other" in condition["message"]
    assert stage.space.need("PodDisruptionBudget", "qwen-engine")["spec"]["maxUnavailable"] == 2


def test_a_service_of_kserve_with_the_same_name_is_named_as_such(stage: Stage) -> None:
    theirs = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "name": "qwen", "uid": "uid-0"}
    metadata = {"name": "qwen", "ownerReferences": [{**theirs, "controller": True}]}
    stage.space.create("Service", {"metadata": metadata, "spec": {"ports": [{"port": 80}]}})
    with stage.operator():
        stage.space.make_service()
        condition = stage.space.wait_condition("qwen", "Ready", "False", "ChildNotOwned")
    assert "belongs to InferenceService/qwen of serving.kserve.io" in condition["message"]
