"""Tests that deleted or edited children are restored, and that fields that others add to them stay."""

import pytest
from tests.operator.stage import CHILD_KINDS, Json, Stage, wait_until

from conveyor_api import names
from e2e.cluster.api import ApiError

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 4}


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


def test_deleted_children_come_back(stage: Stage) -> None:
    model = {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "10Gi"}}
    with stage.operator():
        stage.space.make_service(model=model, autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        before = uids(stage)
        assert {kind for kind, _ in before} == set(CHILD_KINDS) - {"Job"}
        for kind, name in before:
            if kind == "PersistentVolumeClaim":  # pods would hold it, and nobody takes them away here
                stage.space.patch(kind, name, {"metadata": {"finalizers": None}})
            stage.space.delete(kind, name)

        def all_are_others() -> bool:
            now = uids(stage)
            return now.keys() == before.keys() and all(now[id] != before[id] for id in before)

        wait_until("others of the same names", all_are_others, 40, lambda: uids(stage).keys() ^ before.keys())


def uids(stage: Stage) -> dict[tuple[str, str], str]:
    found = [(kind, stage.space.get(kind, name)) for kind, name in stage.space.children("qwen")]
    return {(kind, o["metadata"]["name"]): o["metadata"]["uid"] for kind, o in found if o is not None}


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
                for child, (edit, expected) in EDITS.items()
                if version(now[child]) == version(before[child])
                or not contains(now[child], expected)
                or contains(now[child], edit)
            ]

        wait_until("the edits are undone", lambda: not still_wrong(), 40, still_wrong)


def version(body: Json) -> str:
    return str(body["metadata"]["resourceVersion"])


def contains(whole: object, part: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(contains(whole.get(key), value) for key, value in part.items())
    return whole == part


def test_the_configuration_cannot_be_edited(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
    (name,) = stage.space.config_maps()
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
        wait_until("the edit", lambda: len(stage.space.config_maps()) == 2)
        stage.proxy.wait_quiet()
    deployment = stage.space.need("Deployment", "qwen-engine")
    assert added in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    assert deployment["spec"]["template"]["metadata"]["annotations"]["restarted-at"] == "now"
    assert deployment["metadata"]["labels"]["team"] == "red"
