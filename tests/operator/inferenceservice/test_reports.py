"""Tests conditions and status on a real API server, with pods in every kind of failure."""

from typing import Any

import pytest
from tests.operator import kubelet
from tests.operator.inferenceservice.test_told_events import events
from tests.operator.kubelet import Kubelet
from tests.operator.stage import Json, Stage, make_service, wait_until

from e2e.cluster.api import ApiError

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 5}


def test_the_way_of_a_service_from_nothing_to_ready(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, lambda pod: None) as node:
        stage.space.make_service(replicas=2)
        stage.space.wait_condition("qwen", "Progressing", "True", "PodsStarting")
        stage.space.wait_condition("qwen", "Ready", "False", "ModelLoading")
        node.decide = lambda pod: kubelet.running(pod, ready=False)
        stage.space.wait_condition("qwen", "ModelAvailable", "False", "ModelLoading")
        node.decide = kubelet.ready
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        stage.space.wait_condition("qwen", "WorkloadReady", "True", "ReplicasReady")
        stage.proxy.wait_quiet()
        body = stage.space.need("InferenceService", "qwen")
    status = body["status"]
    assert (status["replicas"], status["readyReplicas"], status["desiredReplicas"]) == (2, 2, 2)
    assert status["url"] == f"http://conveyor-gateway.conveyor-system.svc.cluster.local/{stage.space.namespace}/qwen/v1"
    assert status["effective"]["image"] == "example/engine:1"
    assert "finalizers" not in body["metadata"]
    assert "annotations" not in body["metadata"], "nothing is written to the resource but its status"
    found = events(stage)
    assert found == [("Normal", "Ready")], "the only thing that happened"


def model_not_found(pod: Json) -> Json:
    return kubelet.fetch_failed(pod, "ModelNotFound", "no folder nowhere")


@pytest.mark.parametrize(
    ("pod_status", "type", "reason", "words"),
    [
        (model_not_found, "ModelAvailable", "ModelNotFound", "no folder nowhere"),
        (kubelet.oom_killed, "WorkloadReady", "OOMKilled", "resources.limits.memory"),
        (kubelet.unschedulable, "WorkloadReady", "InsufficientGPU", "3 Insufficient nvidia.com/gpu"),
        (kubelet.image_pull_failed, "WorkloadReady", "ImagePullFailed", "example/engine:1"),
    ],
)  # fmt: skip
def test_why_a_pod_does_not_run_is_in_the_condition(
    stage: Stage, pod_status: kubelet.Decide, type: str, reason: str, words: str
) -> None:
    with stage.operator(), Kubelet(stage.space, pod_status):
        stage.space.make_service()
        stage.space.wait_condition("qwen", type, "False", reason)
        assert words in stage.space.wait_condition("qwen", "Ready", "False", reason)["message"]
        failure = stage.space.need("InferenceService", "qwen")["status"]["lastFailure"]
        assert (failure["reason"], words in failure["message"]) == (reason, True)
        stage.proxy.wait_quiet()
        assert events(stage) == [("Warning", reason)], "one cause, one Event"
        conditions = stage.space.need("InferenceService", "qwen")["status"]["conditions"]
        dependent = {c["type"]: c["reason"] for c in conditions if c["type"] not in ("ScalingReady", "NameClaimed")}
        assert set(dependent.values()) == {reason}, "they agree"


def test_an_image_s_terminal_escapes_and_lone_surrogates_are_shown_as_marks(stage: Stage) -> None:
    def fail(pod: Json) -> Json:
        return kubelet.fetch_failed(pod, "ModelNotFound", "\x1b]0;owned\x07 no folder \u202e\ud800 nowhere")

    with stage.operator(), Kubelet(stage.space, fail):
        stage.space.make_service()
        message = stage.space.wait_condition("qwen", "Ready", "False", "ModelNotFound")["message"]
        assert "no folder \ufffd\ufffd nowhere" in message
        stage.proxy.wait_quiet()  # the status that is there is the one that was written
        stage.space.edit("qwen", queue={"timeout": "61s"})
        stage.space.wait_observed("qwen")
        stage.proxy.wait_quiet()
        events_now = stage.space.list("Event")
        assert [event["reason"] for event in events_now if event["type"] == "Warning"] == ["ModelNotFound"]
        assert all(event["message"].isprintable() for event in events_now)


def test_a_fixed_service_is_ready_and_remembers_its_failure(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, kubelet.oom_killed) as node:
        stage.space.make_service()
        stage.space.wait_condition("qwen", "Ready", "False", "OOMKilled")
        node.decide = kubelet.ready
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        assert stage.space.need("InferenceService", "qwen")["status"]["lastFailure"]["reason"] == "OOMKilled"


def test_a_transition_time_stays_while_the_status_does(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, lambda pod: None) as node:
        stage.space.make_service()
        first = stage.space.wait_condition("qwen", "Ready", "False", "ModelLoading")
        node.decide = kubelet.oom_killed
        wait_until("another second", lambda: stage.space.condition("qwen", "Ready")["reason"] == "OOMKilled")
        second = stage.space.condition("qwen", "Ready")
    assert second["lastTransitionTime"] == first["lastTransitionTime"]


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("ResourceQuota", {"hard": {"pods": "0"}}, "exceeded quota"),
        (
            "LimitRange",
            {"limits": [{"type": "Container", "default": {"memory": "512Mi"}}]},
            '"1Gi": must be less than or equal to memory limit of 512Mi',  # as in the page on troubleshooting
        ),
    ],
    ids=["quota", "limit below the default request"],
)
def test_a_rule_of_the_namespace_that_forbids_pods_is_reported(
    stage: Stage, kind: str, spec: dict[str, object], words: str
) -> None:
    stage.space.create(kind, {"metadata": {"name": "rule"}, "spec": spec})
    with stage.operator():
        stage.space.make_service()
        condition = stage.space.wait_condition("qwen", "Ready", "False", "PodsRefused")
    assert words in condition["message"]


def test_an_hpa_without_a_metrics_server_is_reported_with_a_remedy(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, kubelet.ready):
        stage.space.make_service(autoscaling=AUTOSCALING)
        condition = stage.space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
    assert "Set metrics.enabled: true, or autoscaling.provider: External." in condition["message"]


@pytest.mark.slow
def test_a_rollout_is_reported_from_beginning_to_end_by_a_service_that_stays_ready(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, kubelet.ready) as node:
        stage.space.make_service(replicas=2, rollout={"maxUnavailable": 0, "maxSurge": 1})
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        stage.proxy.wait_quiet()
        before = events(stage)
        node.decide = lambda pod: None
        stage.space.edit("qwen", batching={"maxBatchSize": 8})
        condition = stage.space.wait_condition("qwen", "Progressing", "True", "RollingOut")
        assert condition["observedGeneration"] == 2
        assert stage.space.condition("qwen", "Ready")["status"] == "True"
        node.decide = kubelet.ready
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        stage.proxy.wait_quiet()
        assert events(stage) == [*before, ("Normal", "RollingOut"), ("Normal", "UpToDate")], "it was never unready"


def test_an_unreadable_resource_is_reported_and_its_pods_stay(stage: Stage) -> None:
    """A different CRD accepts values that the operator cannot read, here an unknown mode."""
    crd_path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferenceservices.conveyor.dev"
    with stage.operator(), Kubelet(stage.space, kubelet.ready):
        stage.space.make_service()
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        before = stage.space.need("Deployment", "qwen-engine")["metadata"]["resourceVersion"]
        modes = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/batching/properties/mode/enum"
        stage.space.api.patch_json(crd_path, [{"op": "add", "path": f"{modes}/-", "value": "Speculative"}])
        try:
            wait_until("the API server lets it through", lambda: set_mode(stage, "Speculative"))
            condition = stage.space.wait_condition("qwen", "Ready", "False", "InvalidSpec")
            assert "spec.batching.mode" in condition["message"]
            stage.proxy.wait_quiet()
            assert stage.space.need("Deployment", "qwen-engine")["metadata"]["resourceVersion"] == before
            assert stage.space.condition("qwen", "EndpointReady")["status"] == "True"
            set_mode(stage, "Continuous")
            stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        finally:
            stage.space.api.patch_json(crd_path, [{"op": "remove", "path": f"{modes}/4"}])


def set_mode(stage: Stage, mode: str) -> bool:
    try:
        stage.space.edit("qwen", batching={"mode": mode})
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("status", [409, 500])
def test_a_child_that_the_api_server_does_not_accept_is_reported_until_it_is_accepted(
    stage: Stage, status: int
) -> None:
    """This happens when an admission webhook is broken. The call is not refused, but never succeeds."""
    fault = stage.proxy.fail(lambda call: call.is_write and call.resource == "deployments", status, times=10**6)
    with stage.operator(), Kubelet(stage.space, kubelet.ready):
        stage.space.make_service()
        condition = stage.space.wait_condition("qwen", "Ready", "False", "ChildRefused")
        assert condition["message"] == f"Deployment qwen-engine: injected {status}"
        assert stage.space.condition("qwen", "WorkloadReady")["reason"] == "ChildRefused"
        assert stage.space.condition("qwen", "Progressing")["status"] == "True"
        fault.times = 0
        stage.space.wait_condition("qwen", "Ready", "True", "Ready", 60)


def test_a_failure_that_ends_at_once_is_not_reported(stage: Stage) -> None:
    stage.proxy.fail(lambda call: call.is_write and call.resource == "deployments", 500)
    with stage.operator(), Kubelet(stage.space, kubelet.ready):
        stage.space.make_service()
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        stage.proxy.wait_quiet()
    assert not [event for event in events(stage) if event[0] == "Warning"]


FOUND = '{"contextLength": 1024, "task": "rerank", "quantization": "awq 4 bits", "weightBytes": 5000000000}'


def test_what_the_fetch_found_in_the_model_is_known_as_long_as_the_source_is_the_same(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, lambda pod: kubelet.ready(pod, FOUND)) as node:
        stage.space.make_service(engine={"device": "Auto"})
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        wait_until("it is told", lambda: model_status(stage) == (1024, "Rerank", "awq 4 bits", 5_000_000_000))
        wait_until("the mode follows the task", lambda: effective(stage) == ("Dynamic", "10ms"))
        before = {pod["metadata"]["name"] for pod in stage.space.list("Pod")}
        with pytest.raises(ApiError, match="exceeds the context length of the model"):
            stage.space.edit("qwen", engine={"maxModelLen": 4096})
        stage.proxy.wait_quiet()
        assert {pod["metadata"]["name"] for pod in stage.space.list("Pod")} == before, "the good pod stays"
        node.decide = lambda pod: kubelet.ready(pod, "[" * 4000)
        stage.space.edit("qwen", model={"uri": "pvc://models/other"})
        wait_until("it is forgotten", lambda: model_status(stage) == (None, None, None, None))
        stage.space.edit("qwen", task="Embed")
        wait_until("the spec says it", lambda: model_status(stage) == (None, "Embed", None, None))


def test_the_sizes_that_follow_from_the_workload_are_reported_with_their_reasons(stage: Stage) -> None:
    found = '{"contextLength": 4096, "task": "generate"}'
    with stage.operator(), Kubelet(stage.space, lambda pod: kubelet.ready(pod, found)):
        workload = {"inputTokens": {"p50": 256, "p95": 1024}, "outputTokens": {"p50": 128, "p95": 512}}
        stage.space.make_service(engine={"device": "Auto"}, workload=workload)
        wait_until("the model's context", lambda: derived(stage).get("engine.maxModelLen") == "4096 tokens")
        stage.proxy.wait_quiet()
        assert derived(stage)["kvCache.blockBudget"] == "3072 blocks"
        stage.space.edit("qwen", engine={"maxModelLen": 2048})
        wait_until("an explicit setting wins", lambda: "engine.maxModelLen" not in derived(stage))
        stage.space.edit("qwen", workload=None)
        wait_until("nothing follows", lambda: derived(stage) == {})


def derived(stage: Stage) -> dict[str, str]:
    status = stage.space.need("InferenceService", "qwen").get("status") or {}
    return {each["name"]: each["value"] for each in (status.get("effective") or {}).get("derived", [])}


def model_status(stage: Stage) -> tuple[Any, ...]:
    model = stage.space.need("InferenceService", "qwen")["status"]["model"]
    return tuple(model.get(name) for name in ("contextLength", "task", "quantization", "weightBytes"))


def effective(stage: Stage) -> tuple[str, str | None]:
    effective = stage.space.need("InferenceService", "qwen")["status"]["effective"]
    return effective["mode"], effective.get("window")


def test_two_services_with_one_refused_do_not_disturb_each_other(stage: Stage) -> None:
    with stage.operator(), Kubelet(stage.space, kubelet.ready):
        stage.space.make_service("bad", pod={"nodeSelector": {"not a label": "x"}})
        stage.space.create("InferenceService", make_service("good"))
        stage.space.wait_condition("good", "Ready", "True", "Ready")
        stage.space.wait_condition("bad", "Ready", "False", "ChildRefused")
