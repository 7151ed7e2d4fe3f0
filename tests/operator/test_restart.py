"""Tests that an operator that is killed anywhere, and the next one, reach the same state as one that is not killed."""

import copy

import pytest
from tests.operator.api_proxy import Call
from tests.operator.killer import live_write_by_write
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import CHILD_KINDS, Json, Space, Stage, wait_until

from conveyor_operator.loop import bodies

AUTOSCALING = {"minReplicas": 2, "maxReplicas": 5}
_SERVER_WRITTEN = (
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "generation",
    "managedFields",
    "selfLink",
    "namespace",
)


def spec_of(body: Json) -> Json:
    """Return what the operator is responsible for in a child: everything except what the API server writes."""
    body = copy.deepcopy(body)
    for key in _SERVER_WRITTEN:
        body["metadata"].pop(key, None)
    for owner in body["metadata"].get("ownerReferences", ()):
        owner.pop("uid")
    body["metadata"].get("annotations", {}).pop("deployment.kubernetes.io/revision", None)
    body.pop("status", None)
    body.get("spec", {}).pop("volumeName", None)
    return body


def end_state(stage: Stage) -> dict[tuple[str, str], Json]:
    return {(kind, name): spec_of(stage.space.need(kind, name)) for kind, name in sorted(stage.space.children("qwen"))}


def conditions(stage: Stage) -> dict[str, tuple[str, str]]:
    status = stage.space.need("InferenceService", "qwen").get("status") or {}
    return {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ()) if c["type"] != "ScalingReady"}


@pytest.mark.slow
def test_every_write_may_be_the_last_one_of_its_operator(stage: Stage) -> None:
    """A service is created by operators that each live for one write, and is then edited in the same way."""
    with Kubelet(stage.space, ready):
        stage.space.make_service(replicas=2)
        lives = live_write_by_write(stage, after=False)
        assert lives >= 7, "six children and a status, one life each"
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        stage.space.edit("qwen", replicas=None, batching={"maxBatchSize": 8}, autoscaling=AUTOSCALING)
        live_write_by_write(stage, after=True)
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        tortured, seen = end_state(stage), conditions(stage)
        assert stage.space.need("Deployment", "qwen-engine")["spec"]["replicas"] == 2
        stage.space.delete("InferenceService", "qwen")
        wait_until("all is gone", lambda: not stage.space.children("qwen"))
        with stage.operator():
            stage.space.make_service(batching={"maxBatchSize": 8}, autoscaling=AUTOSCALING)
            stage.space.wait_condition("qwen", "Ready", "True", "Ready")
            wait_until("one ConfigMap", lambda: set(end_state(stage)) == set(tortured))
            assert end_state(stage) == tortured
            assert conditions(stage) == seen


def test_a_second_operator_after_a_quiet_first_changes_nothing(stage: Stage) -> None:
    with Kubelet(stage.space, ready):
        with stage.operator():
            stage.space.make_service(autoscaling=AUTOSCALING)
            stage.space.wait_condition("qwen", "Ready", "True", "Ready")
            stage.proxy.wait_quiet()
        versions, before = all_versions(stage), len(stage.proxy.calls)
        with stage.operator():
            stage.proxy.wait_quiet(2)
        assert calls_in(stage.space, stage.proxy.calls[before:]) == []
        assert all_versions(stage) == versions


def calls_in(space: Space, calls: list[Call]) -> list[Call]:
    """Return the calls about services, without watches and lists, which are for all services."""
    return [call for call in calls if call.verb not in ("watch", "list") and call.namespace == space.namespace]


def test_of_all_services_only_those_that_have_changed_cost_a_restart_calls(stage: Stage) -> None:
    names = [f"qwen-{number}" for number in range(5)]
    with stage.operator():
        for name in names:
            stage.space.make_service(name)
            stage.space.wait_children(name)
        stage.proxy.wait_quiet()
    stage.space.edit("qwen-1", queue={"maxRequests": 9})
    stage.space.patch("Service", "qwen-3", {"metadata": {"annotations": {"somebody": "wrote this"}}})
    before = len(stage.proxy.calls)
    with stage.operator():
        stage.space.wait_observed("qwen-1")
        stage.proxy.wait_quiet(2)
    calls = calls_in(stage.space, stage.proxy.calls[before:])
    touched = {name for name in names for call in calls if call.name.startswith(name)}
    assert touched == {"qwen-1", "qwen-3"}
    assert not [call for call in calls if call.verb == "get" and call.resource == "inferenceservices"]


def test_a_service_too_large_to_be_kept_is_read_each_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "OBJECT_BYTES", 10)
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
    calls = calls_in(stage.space, stage.proxy.calls)
    assert [call for call in calls if (call.verb, call.resource, call.name) == ("get", "inferenceservices", "qwen")]


def test_what_was_changed_while_it_was_away_is_undone(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
    stage.space.patch("PodDisruptionBudget", "qwen-engine", {"spec": {"maxUnavailable": 3}})
    stage.space.delete("Service", "qwen")
    with stage.operator():
        wait_until("the Service", lambda: stage.space.get("Service", "qwen"))
        wait_until("the edit is undone", lambda: budget(stage) == 1)


def budget(stage: Stage) -> int:
    return int(stage.space.need("PodDisruptionBudget", "qwen-engine")["spec"]["maxUnavailable"])


def all_versions(stage: Stage) -> dict[str, str]:
    """Return the versions of all objects but the HPA, whose status its controller writes, and the operator's Events."""
    kinds = [kind for kind in (*CHILD_KINDS, "InferenceService") if kind != "HorizontalPodAutoscaler"]
    found = [o for kind in kinds for o in stage.space.list(kind)]
    found += [o for o in stage.space.list("Event") if o.get("reportingController") == "conveyor.dev/operator"]
    return {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in found}


@pytest.mark.slow
def test_an_upgrade_with_another_default_image_restarts_no_pod(stage: Stage) -> None:
    with Kubelet(stage.space, ready):
        with stage.operator():
            stage.space.make_service()
            stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        generation = stage.space.need("Deployment", "qwen-engine")["metadata"]["generation"]
        with stage.operator(engine_image="example/engine:2"):
            stage.proxy.wait_quiet()
            stage.space.edit("qwen", queue={"maxRequests": 9})
            stage.space.wait_observed("qwen")
            stage.proxy.wait_quiet()
            deployment = stage.space.need("Deployment", "qwen-engine")
            assert deployment["metadata"]["generation"] == generation
            assert stage.space.need("InferenceService", "qwen")["status"]["effective"]["image"] == "example/engine:1"
            stage.space.edit("qwen", batching={"maxBatchSize": 8})

            def new_image() -> bool:
                status = stage.space.need("InferenceService", "qwen")["status"]
                return bool(status["effective"]["image"] == "example/engine:2")

            wait_until("the new image with the next rollout", new_image)
            container = stage.space.need("Deployment", "qwen-engine")["spec"]["template"]["spec"]["containers"][0]
            assert container["image"] == "example/engine:2"


@pytest.mark.slow
def test_an_operator_whose_status_was_not_taken_stays_with_the_new_image(stage: Stage) -> None:
    """The status then has the former image. It must not come back, and no pod may be replaced again."""

    def deployed() -> tuple[int, str]:
        deployment = stage.space.need("Deployment", "qwen-engine")
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        return deployment["metadata"]["generation"], container["image"]

    with Kubelet(stage.space, ready):
        with stage.operator():
            stage.space.make_service()
            stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        generation, _ = deployed()
        stage.proxy.fail(lambda call: (call.resource, call.subresource) == ("inferenceservices", "status"), 500, 1000)
        with stage.operator(engine_image="example/engine:2"):
            stage.proxy.wait_quiet()
            stage.space.edit("qwen", batching={"maxBatchSize": 8})
            wait_until("the new image", lambda: deployed()[1] == "example/engine:2")
        stage.proxy.faults.clear()
        with stage.operator(engine_image="example/engine:2"):
            stage.space.wait_observed("qwen")
            stage.proxy.wait_quiet()
            assert deployed() == (generation + 1, "example/engine:2")


def test_faults_of_the_api_server_are_outlived(stage: Stage) -> None:
    """Every third write fails, each time in another way. 0 is a broken connection."""
    count = 0

    def every_third(call: Call) -> bool:
        nonlocal count
        count += int(call.is_write)
        return call.is_write and count % 3 == 0

    faults = [stage.proxy.fail(every_third, status, times=1, Retry_After="0") for status in (409, 429, 500, 503, 0)]
    with stage.operator(), Kubelet(stage.space, ready):
        stage.space.make_service(autoscaling=AUTOSCALING)
        stage.space.wait_condition("qwen", "Ready", "True", "Ready", timeout=60)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
    assert [fault.hits for fault in faults] == [1] * 5


def is_reconciles(call: Call) -> bool:
    """Return whether a call is by a reconcile. Claims of names are made outside reconciles."""
    return call.is_write and call.resource != "servednames"


def test_retry_after_of_the_api_server_is_respected(stage: Stage) -> None:
    stage.proxy.fail(is_reconciles, 429, times=1, Retry_After="3")
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
    writes = list(filter(is_reconciles, stage.proxy.calls))
    assert writes[0].status == 429
    assert writes[1].at - writes[0].at >= 3


def test_watches_that_break_are_taken_up_again(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        stage.proxy.sever()
        stage.space.delete("PodDisruptionBudget", "qwen-engine")
        stage.proxy.severed = False
        wait_until("it is back", lambda: stage.space.get("PodDisruptionBudget", "qwen-engine"))
