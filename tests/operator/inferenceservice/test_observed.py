"""Tests what is kept of an object, and what counts as a change."""

import copy
from typing import Any

import pytest
from tests.operator.builders import ROLLING_OUT, build, build_one, make_child, make_deployment, make_pod

from conveyor_operator.inferenceservice.kinds import CHILDREN, GRANDCHILDREN, INFERENCE_SERVICE
from conveyor_operator.inferenceservice.observed import (
    HELD_REPLICAS_ANNOTATION,
    DeploymentState,
    Observed,
    observe,
    observe_autoscaler,
    observe_deployment,
    observe_ready_endpoints,
)
from conveyor_operator.kinds import Key
from conveyor_operator.loop.child import fingerprint, observe_child
from conveyor_operator.loop.store import Store

KEY = Key(INFERENCE_SERVICE, "default", "qwen")


def live(kind: str = "Deployment", **spec: Any) -> dict[str, Any]:
    body = copy.deepcopy(build_one(kind, **spec))
    body["metadata"] |= {"uid": "u", "resourceVersion": "1", "generation": 3}
    return body


def test_status_and_bookkeeping_are_no_change() -> None:
    before, after = live(), live()
    after["metadata"] |= {"resourceVersion": "2", "generation": 4, "managedFields": [{"manager": "x"}]}
    after["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "7"
    after["status"] = {"replicas": 3}
    after["spec"]["replicas"] = 9
    assert fingerprint(after) == fingerprint(before)


def test_every_child_that_somebody_touches_has_another_fingerprint() -> None:
    for kind, name in build(autoscaling={"maxReplicas": 4}):
        body = build(autoscaling={"maxReplicas": 4})[kind, name]
        for touch in (
            lambda b: b["metadata"]["labels"].update(team="red"),
            lambda b: b["metadata"].update(ownerReferences=[]),
            lambda b: b["metadata"].setdefault("annotations", {}).update(note="x"),
            lambda b: b.setdefault("spec", {}).update(other=1),
        ):
            touched = copy.deepcopy(body)
            touch(touched)
            assert fingerprint(touched) != fingerprint(body), kind


def test_the_controlling_owner_is_found_among_others() -> None:
    body = live()
    body["metadata"]["ownerReferences"].insert(0, {"kind": "Team", "name": "red", "uid": "t"})
    child = observe_child(body)
    assert (child.controller, child.controller_uid) == ("InferenceService/qwen", "uid-1")


def test_managers_of_replicas_are_read_from_managed_fields() -> None:
    body = live()
    body["metadata"]["managedFields"] = [
        {"manager": "conveyor", "fieldsV1": {"f:spec": {"f:template": {}}}},
        {"manager": "kube-controller-manager", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {"manager": "somebody", "fieldsV1": {"f:metadata": {}}},
    ]
    assert observe_deployment(body).replicas_managers == frozenset({"kube-controller-manager"})


def test_a_deployment_without_status_has_not_begun() -> None:
    state = observe_deployment(live())
    assert (state.requested_replicas, state.replicas, state.rolled_out) == (1, 0, False)


def test_a_rollout_is_done_only_when_the_controller_has_seen_it() -> None:
    assert make_deployment(2).complete
    assert not make_deployment(2, generation=2).complete
    assert not make_deployment(2, replicas=3).rolled_out
    assert not make_deployment(2, conditions=ROLLING_OUT).rolled_out
    assert make_deployment(0).complete


def test_a_pod_that_fails_later_and_scaling_are_no_rollout() -> None:
    assert make_deployment(2, available_replicas=1).rolled_out
    assert not make_deployment(2, available_replicas=1).complete
    assert make_deployment(3, generation=2, replicas=1, updated_replicas=1, available_replicas=1).rolled_out


def test_what_an_apply_returned_replaces_what_was_observed() -> None:
    observed = Observed(deployment=DeploymentState(generation=1))
    body = live()
    body["metadata"]["generation"] = 2
    after = observed.with_child(body)
    assert after.deployment is not None
    assert after.deployment.generation == 2
    assert ("Deployment", "qwen-engine") in after.children
    hpa = live("HorizontalPodAutoscaler", autoscaling={"maxReplicas": 4})
    with_hpa = after.with_child(hpa)
    assert with_hpa.autoscaler is not None
    assert with_hpa.without_child(("HorizontalPodAutoscaler", "qwen-engine")).autoscaler is None


def test_an_hpas_averages_are_read() -> None:
    body = live("HorizontalPodAutoscaler", autoscaling={"minReplicas": 2, "maxReplicas": 4})
    current = {"metric": {"name": "inference_in_flight"}, "current": {"averageValue": "35"}}
    body["status"] = {
        "currentReplicas": 2,
        "desiredReplicas": 3,
        "currentMetrics": [{"type": "Object", "object": current}, {"type": ""}],
        "conditions": [{"type": "AbleToScale", "status": "True", "reason": "ReadyForNewScale", "message": "m"}],
    }
    state = observe_autoscaler(body)
    assert (state.min_replicas, state.max_replicas, state.desired_replicas) == (2, 4, 3)
    assert state.targets == {"inference_in_flight": "192", "inference_queue_depth": "32"}
    assert state.currents == {"inference_in_flight": "35"}
    assert state.conditions == {"AbleToScale": ("True", "ReadyForNewScale", "m")}


def test_keda_s_metrics_have_the_names_of_conveyor_s() -> None:
    body = live("HorizontalPodAutoscaler", autoscaling={"maxReplicas": 4})
    metric = {"name": "s0-metric-api-inference_in_flight"}
    target = {"type": "AverageValue", "averageValue": "24"}
    body["spec"]["metrics"] = [{"type": "External", "external": {"metric": metric, "target": target}}]
    current = {"metric": metric, "current": {"averageValue": "35"}}
    body["status"] = {"currentMetrics": [{"type": "External", "external": current}]}
    state = observe_autoscaler(body)
    assert state.targets == {"inference_in_flight": "24"}
    assert state.currents == {"inference_in_flight": "35"}


def test_endpoints_count_when_they_are_ready_or_do_not_say() -> None:
    endpoints = [{"conditions": {"ready": True}}, {"conditions": {"ready": False}}, {"conditions": {}}, {}]
    ports = [{"name": "http", "port": 8000}]
    assert observe_ready_endpoints({"endpoints": endpoints, "ports": ports}) == 3
    assert observe_ready_endpoints({"endpoints": None, "ports": ports}) == 0
    assert observe_ready_endpoints({"endpoints": endpoints, "ports": None}) == 0


def test_claims_say_how_they_may_be_mounted() -> None:
    model = {"uri": "hf://a/b", "cache": {"strategy": "PVC", "size": "1Gi"}}
    assert observe_child(live("PersistentVolumeClaim", model=model, replicas=2)).access_mode == "ReadWriteMany"
    assert make_child().access_mode == ""


def make_store(**values: list[Any]) -> Store:
    store, kinds = Store(), {kind.kind: kind for kind in (*CHILDREN, *GRANDCHILDREN)}
    for kind, found in values.items():
        for number, value in enumerate(found):
            store.put(kinds[kind], f"{kind}-{number}", KEY, value)
    return store


def test_everything_of_one_service_is_collected() -> None:
    observed = observe(
        make_store(
            Deployment=[(make_child(), make_deployment(2))],
            Service=[(make_child("Service", "qwen"), None), (make_child("Service", "qwen-engine"), None)],
            Pod=[make_pod("b"), make_pod("a")],
            EndpointSlice=[1, 2],
        ),
        KEY,
    )
    assert set(observed.children) == {("Deployment", "qwen-engine"), ("Service", "qwen"), ("Service", "qwen-engine")}
    assert observed.deployment == make_deployment(2)
    assert [pod.name for pod in observed.pods] == ["a", "b"]
    assert observed.ready_endpoints == 3


def test_a_copy_with_our_label_is_not_taken_for_the_deployment() -> None:
    ours, copy = (make_child(), make_deployment(2)), (make_child(name="copy"), make_deployment(9))
    for order in ([ours, copy], [copy, ours]):
        assert observe(make_store(Deployment=order), KEY).deployment == make_deployment(2)


def test_other_services_are_not_mixed_in() -> None:
    store = make_store(Deployment=[(make_child(), make_deployment())], Pod=[make_pod()], EndpointSlice=[1])
    assert observe(store, KEY._replace(name="other")) == Observed()


@pytest.mark.parametrize(
    ("text", "read"), [("4", "4"), ("1000", "1000"), ("1001", ""), ("\u00b2", ""), ("9" * 11, ""), ("-1", "")]
)
def test_only_a_number_that_a_service_may_have_is_read_from_the_annotation(text: str, read: str) -> None:
    body = live()
    body["metadata"].setdefault("annotations", {})[HELD_REPLICAS_ANNOTATION] = text
    assert observe_deployment(body).held_replicas == read
