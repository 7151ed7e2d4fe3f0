"""From an InferenceService to its children on a real API server: made, changed, defended, and gone in the end."""

import pytest
import yaml
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import CHILD_KINDS, Json, Stage, make_service, wait_until

from conveyor_api import names
from e2e.cluster.api import ApiError

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
    claim = stage.space.need("PersistentVolumeClaim", "qwen-models")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    metrics = stage.space.need("HorizontalPodAutoscaler", "qwen-engine")["spec"]["metrics"]
    targets = {m["object"]["metric"]["name"]: m["object"]["target"]["averageValue"] for m in metrics}
    assert targets == {names.IN_FLIGHT_METRIC: "25600m", names.QUEUE_DEPTH_METRIC: "4"}


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
        old = config_maps(stage)
        kubelet.decide = lambda pod: None
        stage.space.edit("qwen", batching={"maxBatchSize": 8})
        wait_until("a second ConfigMap", lambda: len(config_maps(stage)) == 2)
        stage.proxy.wait_quiet()
        assert old < config_maps(stage), "the old one stays while a pod may need it"
        (new,) = config_maps(stage) - old
        template = stage.space.need("Deployment", "qwen-engine")["spec"]["template"]
        assert new.endswith(template["metadata"]["annotations"][names.CONFIG_HASH_ANNOTATION])
        text = stage.space.need("ConfigMap", new)["data"]["engine.yaml"]
        assert yaml.safe_load(text)["max_num_seqs"] == 8
        kubelet.decide = ready
        wait_until("only the new ConfigMap", lambda: config_maps(stage) == {new})


def test_deleted_children_come_back(stage: Stage) -> None:
    model = {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "10Gi"}}
    with stage.operator():
        stage.space.make_service(model=model, autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        before = uids(stage)
        assert {kind for kind, _ in before} == set(CHILD_KINDS)
        for kind, name in before:
            if kind == "PersistentVolumeClaim":  # pods would hold it, and nobody takes them away here
                stage.space.patch(kind, name, {"metadata": {"finalizers": None}})
            stage.space.delete(kind, name)

        def all_are_others() -> bool:
            now = uids(stage)
            return now.keys() == before.keys() and all(now[id] != before[id] for id in before)

        wait_until("others of the same names", all_are_others, 40, lambda: uids(stage).keys() ^ before.keys())


EDITS: dict[tuple[str, str], tuple[Json, Json]] = {
    ("Deployment", "qwen-engine"): (
        {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 9}}}},
        {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 135}}}},
    ),
    ("Service", "qwen-engine"): ({"spec": {"publishNotReadyAddresses": True}}, {"spec": {}}),
    ("Service", "qwen"): (
        {"spec": {"externalName": "elsewhere.example.org"}},
        {"spec": {"externalName": "conveyor-gateway.conveyor-system.svc.cluster.local"}},
    ),
    ("NetworkPolicy", "qwen-engine"): (
        {"spec": {"ingress": [{}]}},
        {"spec": {"policyTypes": ["Ingress"], "podSelector": {"matchLabels": names.pod_selector("qwen")}}},
    ),
    ("PodDisruptionBudget", "qwen-engine"): ({"spec": {"maxUnavailable": 3}}, {"spec": {"maxUnavailable": 1}}),
    ("HorizontalPodAutoscaler", "qwen-engine"): ({"spec": {"maxReplicas": 50}}, {"spec": {"maxReplicas": 4}}),
    ("ServiceAccount", "qwen-engine"): (
        {"automountServiceAccountToken": True},
        {"automountServiceAccountToken": False},
    ),
}


def test_edits_of_what_is_ours_are_undone(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.proxy.wait_quiet()
        before = {child: stage.space.need(*child) for child in EDITS}
        for child, (edit, _) in EDITS.items():
            stage.space.patch(*child, edit)

        def still_wrong() -> list[tuple[str, str]]:
            now = {child: stage.space.need(*child) for child in EDITS}
            return [
                child
                for child, (edit, wanted) in EDITS.items()
                if version(now[child]) == version(before[child])
                or not contains(now[child], wanted)
                or contains(now[child], edit)
            ]

        wait_until("the edits are undone", lambda: not still_wrong(), 40, still_wrong)


def test_the_configuration_cannot_be_edited(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
    (name,) = config_maps(stage)
    with pytest.raises(ApiError) as refused:
        stage.space.patch("ConfigMap", name, {"data": {"engine.yaml": "max_num_seqs: 1"}})
    assert refused.value.code == 422


@pytest.mark.parametrize("value", [None, "other"], ids=["removed", "changed"])
def test_a_lost_label_comes_back(value: str | None, stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        stage.space.patch("Service", "qwen-engine", {"metadata": {"labels": {names.INFERENCE_SERVICE_LABEL: value}}})
        wait_until("the label", lambda: ("Service", "qwen-engine") in stage.space.children("qwen"))


def test_a_lost_owner_comes_back(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        stage.space.patch("PodDisruptionBudget", "qwen-engine", {"metadata": {"ownerReferences": None}})

        def has_owner() -> bool:
            return bool(stage.space.need("PodDisruptionBudget", "qwen-engine")["metadata"].get("ownerReferences"))

        wait_until("the owner", has_owner)


def test_what_others_add_stays(stage: Stage) -> None:
    added = {"name": "SIDE", "value": "1"}
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        path = stage.space.path("Deployment", "qwen-engine")
        operations = [
            {"op": "add", "path": "/spec/template/spec/containers/0/env/-", "value": added},
            {"op": "add", "path": "/spec/template/metadata/annotations/restarted-at", "value": "now"},
            {"op": "add", "path": "/metadata/labels/team", "value": "red"},
        ]
        stage.space.api.patch_json(path, operations)
        stage.space.edit("qwen", batching={"maxBatchSize": 8})
        wait_until("the edit", lambda: len(config_maps(stage)) == 2)
        stage.proxy.wait_quiet()
    deployment = stage.space.need("Deployment", "qwen-engine")
    assert added in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    assert deployment["spec"]["template"]["metadata"]["annotations"]["restarted-at"] == "now"
    assert deployment["metadata"]["labels"]["team"] == "red"


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


def test_an_object_of_somebody_else_is_not_adopted(stage: Stage) -> None:
    theirs = {"metadata": {"name": "qwen"}, "spec": {"ports": [{"port": 80}], "selector": {"app": "theirs"}}}
    stage.space.create("Service", theirs)
    with stage.operator():
        stage.space.make_service()
        condition = stage.space.wait_condition("qwen", "Ready", "False", "ChildNotOwned")
        assert "Service qwen exists and was not made by Conveyor" in condition["message"]
        stage.space.wait_children("qwen")  # the others are there all the same
        assert stage.space.need("Service", "qwen")["spec"]["selector"] == {"app": "theirs"}
        stage.space.delete("Service", "qwen")
        wait_until("ours", lambda: (stage.space.get("Service", "qwen") or {}).get("spec", {}).get("externalName"), 40)


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


def test_a_child_that_the_api_server_refuses_is_a_condition_with_its_words(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(scheduling={"nodeSelector": {"not a label": "x"}})
        condition = stage.space.wait_condition("qwen", "Ready", "False", "ChildRefused")
        assert "nodeSelector" in condition["message"]
        assert stage.space.condition("qwen", "WorkloadReady")["reason"] == "ChildRefused"
        assert stage.space.get("Deployment", "qwen-engine") is None
        stage.space.edit("qwen", scheduling={"nodeSelector": None})
        wait_until("the Deployment", lambda: stage.space.get("Deployment", "qwen-engine"))
        wait_until("no complaint", lambda: stage.space.condition("qwen", "Ready")["reason"] != "ChildRefused")


def test_a_bad_edit_leaves_the_running_pods_alone(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, ready):
        stage.space.make_service()
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        generation = stage.space.need("Deployment", "qwen-engine")["metadata"]["generation"]
        stage.space.edit("qwen", batching={"maxBatchSize": 8}, scheduling={"nodeSelector": {"not a label": "x"}})
        stage.space.wait_condition("qwen", "Ready", "False", "ChildRefused")
        assert stage.space.need("Deployment", "qwen-engine")["metadata"]["generation"] == generation
        assert stage.space.condition("qwen", "EndpointReady")["status"] == "True"
        assert len(config_maps(stage)) == 2, "the pods' ConfigMap must stay"


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


def uids(stage: Stage) -> dict[tuple[str, str], str]:
    found = [(kind, stage.space.get(kind, name)) for kind, name in stage.space.children("qwen")]
    return {(kind, o["metadata"]["name"]): o["metadata"]["uid"] for kind, o in found if o is not None}


def version(body: Json) -> str:
    return str(body["metadata"]["resourceVersion"])


def config_maps(stage: Stage) -> set[str]:
    return {name for kind, name in stage.space.children("qwen") if kind == "ConfigMap"}


def left(stage: Stage) -> list[str]:
    kinds = (*CHILD_KINDS, "InferenceService", "ReplicaSet", "Pod", "EndpointSlice")
    found = [(kind, o["metadata"]["name"]) for kind in kinds for o in stage.space.list(kind)]
    standard = {("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")}
    return [f"{kind}/{name}" for kind, name in found if (kind, name) not in standard]


def contains(whole: object, part: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(contains(whole.get(key), value) for key, value in part.items())
    return whole == part


def test_the_builder_makes_what_the_api_server_accepts(stage: Stage) -> None:
    assert stage.space.create("InferenceService", make_service("other"))["metadata"]["generation"] == 1


def test_pods_wait_for_a_configuration_that_is_refused(stage: Stage) -> None:
    quota = {"metadata": {"name": "no-more"}, "spec": {"hard": {"count/configmaps": "1"}}}  # Kubernetes' own
    stage.space.create("ResourceQuota", quota)
    with stage.operator():
        stage.space.make_service()
        condition = stage.space.wait_condition("qwen", "WorkloadReady", "False", "ChildRefused")
        assert "ConfigMap qwen-engine-" in condition["message"]
        stage.proxy.wait_quiet()
        assert stage.space.get("Deployment", "qwen-engine") is None
        stage.space.delete("ResourceQuota", "no-more")
        wait_until("the Deployment", lambda: stage.space.get("Deployment", "qwen-engine"), 60)
