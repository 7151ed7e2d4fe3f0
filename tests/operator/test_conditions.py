"""Each condition in each situation; every reason is one of those that the API documents."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator import kubelet
from tests.operator.builders import ended, make_child, make_deployment, make_observed, make_pod, make_resource

from conveyor_api.conditions import REASONS_BY_CONDITION, ConditionType, Reason
from conveyor_operator.conditions import Judged, Situation, judge_all
from conveyor_operator.observed import DeploymentState, Observed
from conveyor_operator.plan import Obstacle
from conveyor_operator.pods import ContainerState, PodState, observe_pod

LOADING = make_pod("pod", ended(code=0, reason="Completed", name="fetch"), ContainerState("engine", running=True))
FETCHING = make_pod("pod", ContainerState("fetch", initial=True, running=True))
READY = replace(LOADING, ready=True)
REFUSED = Obstacle("Deployment", "qwen-engine", Reason.CHILD_REFUSED, "Deployment qwen-engine: bad nodeSelector")


Obstacles = tuple[Obstacle, ...]


def judge(
    deployment: DeploymentState | None, *pods: PodState, endpoints: int = 0, obstacles: Obstacles = (), **spec: Any
) -> dict[str, Judged]:
    observed = make_observed(deployment=deployment, pods=pods, ready_endpoints=endpoints)
    situation = Situation(make_resource(**spec).spec, observed, obstacles)
    return {judged.type: judged for judged in judge_all(situation)}


def said(judged: Judged) -> tuple[str, str]:
    return judged.status, judged.reason


def test_a_service_whose_pods_all_run_is_ready_in_every_respect() -> None:
    found = judge(make_deployment(1), READY, endpoints=1)
    assert {type: said(judged) for type, judged in found.items()} == {
        "Ready": ("True", "Ready"),
        "Progressing": ("False", "UpToDate"),
        "ModelAvailable": ("True", "ModelLoaded"),
        "WorkloadReady": ("True", "ReplicasReady"),
        "EndpointReady": ("True", "EndpointsAvailable"),
        "ScalingReady": ("True", "FixedReplicas"),
    }


def test_a_new_service_is_on_its_way_and_nobody_is_to_blame() -> None:
    found = judge(None)
    assert said(found["Ready"]) == ("False", "PodsStarting")
    assert said(found["Progressing"]) == ("True", "PodsStarting")
    assert said(found["ModelAvailable"])[0] == "Unknown"


@pytest.mark.parametrize(("pod", "reason"), [(FETCHING, "ModelDownloading"), (LOADING, "ModelLoading")])
def test_the_way_of_the_model_is_told(pod: PodState, reason: str) -> None:
    found = judge(make_deployment(1, ready_replicas=0, available_replicas=0), pod)
    assert said(found["ModelAvailable"]) == ("False", reason)
    assert said(found["Ready"]) == ("False", reason)


def test_a_service_that_scales_up_stays_ready() -> None:
    deployment = make_deployment(3, ready_replicas=1, available_replicas=1)
    found = judge(deployment, READY, replace(LOADING, name="other"), endpoints=1)
    assert said(found["Ready"]) == ("True", "Ready")
    assert said(found["WorkloadReady"]) == ("False", "PodsStarting")
    assert found["WorkloadReady"].message == "1 of 3 engines are ready"


def test_a_service_that_lost_one_pod_of_three_stays_ready_and_says_what_it_lost() -> None:
    deployment = make_deployment(3, ready_replicas=2, available_replicas=2)
    broken = make_pod("broken", ended(code=137, reason="OOMKilled"))
    found = judge(deployment, READY, broken, endpoints=2)
    assert said(found["Ready"]) == ("True", "Ready")
    assert said(found["WorkloadReady"]) == ("False", "OOMKilled")
    assert "(pod broken)" in found["WorkloadReady"].message


def test_a_service_stays_ready_in_a_rollout_as_long_as_an_engine_answers() -> None:
    for deployment in (make_deployment(2, updated_replicas=1), make_deployment(2, generation=2)):
        for endpoints, ready in ((1, ("True", "Ready")), (0, ("False", "RollingOut"))):
            found = judge(deployment, READY, endpoints=endpoints)
            assert said(found["Ready"]) == ready
            assert said(found["Progressing"]) == ("True", "RollingOut")


@pytest.mark.parametrize(
    ("status", "type", "reason"),
    [
        (kubelet.fetch_failed({}, "ModelNotFound", "no such model"), "ModelAvailable", "ModelNotFound"),
        (kubelet.fetch_failed({}, "ChecksumMismatch", "model.safetensors"), "ModelAvailable", "ChecksumMismatch"),
        (kubelet.oom_killed({}), "WorkloadReady", "OOMKilled"),
        (kubelet.unschedulable({}), "WorkloadReady", "InsufficientGPU"),
        (kubelet.image_pull_failed({}), "WorkloadReady", "ImagePullFailed"),
    ],
)
def test_the_cause_in_a_pod_is_the_reason_of_the_service(status: dict, type: str, reason: str) -> None:
    pod = observe_pod({"metadata": {"name": "pod"}, "status": status})
    deployment = make_deployment(1, ready_replicas=0, available_replicas=0)
    found = judge(deployment, replace(pod, config_hash="aaaaaaaa"))
    assert said(found[type]) == ("False", reason)
    assert said(found["Ready"]) == ("False", reason)


def test_pods_of_a_former_spec_are_not_blamed_on_this_one() -> None:
    broken = make_pod("old", ended("boom"), config_hash="00000000")
    found = judge(make_deployment(1, updated_replicas=0), broken)
    assert said(found["WorkloadReady"]) == ("False", "PodsStarting")


def test_a_refused_child_is_the_reason_and_its_words_are_the_message() -> None:
    found = judge(None, obstacles=(REFUSED,))
    for type in ("Ready", "Progressing", "WorkloadReady"):
        assert said(found[type]) == ("False", "ChildRefused")
        assert found[type].message == "Deployment qwen-engine: bad nodeSelector"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("HorizontalPodAutoscaler", "qwen-engine"), ("PodDisruptionBudget", "qwen-engine"), ("Service", "qwen")],
)
def test_a_refused_child_that_no_request_needs_is_told_by_a_service_that_is_ready(kind: str, name: str) -> None:
    obstacle = Obstacle(kind, name, Reason.CHILD_REFUSED, "no")
    found = judge(make_deployment(1), READY, endpoints=1, obstacles=(obstacle,))
    assert said(found["Ready"]) == ("True", "Ready")
    assert said(found["WorkloadReady"]) == ("True", "ReplicasReady")
    assert said(found["EndpointReady"]) == ("True", "EndpointsAvailable")
    assert said(found["Progressing"]) == ("False", "ChildRefused")
    assert said(found["ScalingReady"])[0] == ("False" if kind == "HorizontalPodAutoscaler" else "True")


def test_while_no_engine_answers_every_obstacle_is_told_at_once() -> None:
    obstacle = Obstacle("Service", "qwen", Reason.CHILD_NOT_OWNED, "taken")
    assert said(judge(None, obstacles=(obstacle,))["Ready"]) == ("False", "ChildNotOwned")


def test_a_refused_engine_service_is_why_no_engine_is_found() -> None:
    obstacle = Obstacle("Service", "qwen-engine", Reason.CHILD_NOT_OWNED, "taken")
    found = judge(make_deployment(1), READY, obstacles=(obstacle,))
    assert said(found["EndpointReady"]) == said(found["Ready"]) == ("False", "ChildNotOwned")


def test_what_passes_by_itself_does_not_make_a_service_that_answers_unready() -> None:
    passing = replace(REFUSED, temporary=True)
    found = judge(make_deployment(1), READY, endpoints=1, obstacles=(passing,))
    assert said(found["Ready"]) == ("True", "Ready")
    assert said(found["Progressing"]) == ("True", "ChildRefused")
    assert said(judge(None, obstacles=(passing,))["Ready"]) == ("False", "ChildRefused")


def test_zero_replicas_are_no_failure() -> None:
    found = judge(make_deployment(0), replicas=0)
    assert said(found["Ready"]) == ("False", "ScaledToZero")
    assert said(found["WorkloadReady"]) == ("True", "ScaledToZero")
    assert said(found["Progressing"]) == ("False", "UpToDate")


def test_pods_that_a_quota_forbids_are_told() -> None:
    conditions = {"ReplicaFailure": ("True", "FailedCreate", "exceeded quota: gpus")}
    deployment = make_deployment(1, replicas=0, updated_replicas=0, available_replicas=0, conditions=conditions)
    found = judge(deployment)
    assert said(found["WorkloadReady"]) == ("False", "PodsRefused")
    assert found["WorkloadReady"].message == "exceeded quota: gpus"
    assert said(found["Ready"]) == ("False", "PodsRefused")


def test_a_rollout_that_takes_too_long_is_told() -> None:
    conditions = {"Progressing": ("False", "ProgressDeadlineExceeded", "timed out")}
    found = judge(make_deployment(1, available_replicas=0, conditions=conditions), LOADING)
    assert said(found["Progressing"]) == ("False", "ProgressDeadlineExceeded")
    assert said(found["WorkloadReady"]) == ("False", "ProgressDeadlineExceeded")


def test_the_gateway_needs_one_ready_endpoint() -> None:
    assert said(judge(make_deployment(1), READY)["EndpointReady"]) == ("False", "NoReadyEndpoints")
    assert said(judge(make_deployment(1), READY)["Ready"]) == ("False", "NoReadyEndpoints")


counts = st.integers(0, 4)
pods = st.lists(
    st.sampled_from(
        [READY, LOADING, FETCHING, make_pod(), make_pod("x", ended("boom")), make_pod(unschedulable="Insufficient gpu"),
         make_pod(config_hash="00000000"), make_pod(leaving=True), make_pod(phase="Failed", reason="Evicted")]
    ),
    max_size=4,
)  # fmt: skip
obstacles = st.sampled_from(
    [
        (), (REFUSED,), (replace(REFUSED, temporary=True),),
        (Obstacle("Service", "qwen", Reason.CHILD_NOT_OWNED, "taken", temporary=True),),
    ]
)  # fmt: skip


@given(counts, counts, counts, counts, st.booleans(), pods, counts, obstacles)
def test_every_situation_has_all_conditions_with_documented_reasons(
    asked: int, there: int, updated: int, available: int, seen: bool, pods: list[PodState], endpoints: int,
    obstacles: Obstacles,
) -> None:  # fmt: skip
    deployment = make_deployment(
        asked, replicas=there, updated_replicas=updated, available_replicas=available, observed_generation=int(seen)
    )
    observed = Observed({("Deployment", "qwen-engine"): make_child()}, deployment, None, tuple(pods), endpoints)
    judged = judge_all(Situation(make_resource(replicas=asked).spec, observed, obstacles))
    assert [part.type for part in judged] == list(ConditionType)
    all_reasons = {reason for reasons in REASONS_BY_CONDITION.values() for reason in reasons}
    for part in judged:
        allowed = all_reasons if part.type == "Ready" else REASONS_BY_CONDITION[part.type]
        if part.reason != "Evicted":  # Kubernetes' own word, passed on
            assert part.reason in allowed, part
        assert part.status in ("True", "False", "Unknown")
        assert part.message
    ready = judged[0]
    assert ready.is_true == (obstacles != (REFUSED,) and endpoints > 0 and asked + there > 0)
