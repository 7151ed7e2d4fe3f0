"""Tests each condition in each situation. The API documents all reasons."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator import kubelet
from tests.operator.builders import (
    FORMER,
    NEWEST,
    ROLLED_OUT,
    ROLLING_OUT,
    ended,
    make_child,
    make_deployment,
    make_observed,
    make_pod,
    make_resource,
)
from tests.operator.inferenceservice.judging import LOADING, READY, REFUSED, Obstacles, judge, make_situation, result

from conveyor_api.conditions import ABNORMAL, REASONS_BY_CONDITION, ConditionType, Reason
from conveyor_operator.inferenceservice.conditions import judge_all
from conveyor_operator.inferenceservice.gap import find_gap_end
from conveyor_operator.inferenceservice.observed import (
    AutoscalerState,
    Observed,
    RolledBack,
    observe_autoscaler,
)
from conveyor_operator.inferenceservice.pods import ContainerState, PodState, observe_pod
from conveyor_operator.inferenceservice.situation import Situation, read_former
from conveyor_operator.loop.steps import Obstacle

FETCHING = make_pod("pod", ContainerState("fetch", initial=True, running=True))


def test_a_service_whose_pods_all_run_is_ready_in_every_respect() -> None:
    found = judge(make_deployment(1), READY, endpoints=1)
    assert {type: result(judged) for type, judged in found.items()} == {
        "Ready": ("True", "Ready"),
        "Progressing": ("False", "UpToDate"),
        "ModelAvailable": ("True", "ModelLoaded"),
        "WorkloadReady": ("True", "ReplicasReady"),
        "EndpointReady": ("True", "EndpointsAvailable"),
        "ScalingReady": ("True", "FixedReplicas"),
        "NameClaimed": ("Unknown", "NamePending"),
    }


def test_a_new_service_is_on_its_way_without_a_failure() -> None:
    found = judge(None)
    assert result(found["Ready"]) == ("False", "PodsStarting")
    assert result(found["Progressing"]) == ("True", "PodsStarting")
    assert result(found["ModelAvailable"])[0] == "Unknown"


@pytest.mark.parametrize(("pod", "reason"), [(FETCHING, "ModelDownloading"), (LOADING, "ModelLoading")])
def test_the_progress_of_the_model_is_reported(pod: PodState, reason: str) -> None:
    found = judge(make_deployment(1, ready_replicas=0, available_replicas=0), pod)
    assert result(found["ModelAvailable"]) == ("False", reason)
    assert result(found["Ready"]) == ("False", reason)


def test_a_service_that_scales_up_stays_ready() -> None:
    deployment = make_deployment(3, ready_replicas=1, available_replicas=1)
    found = judge(deployment, READY, replace(LOADING, name="other"), endpoints=1, was_whole=True)
    assert result(found["Ready"]) == ("True", "Ready")
    assert result(found["WorkloadReady"]) == ("False", "PodsStarting")
    assert found["WorkloadReady"].message == "1 of 3 engines are ready"


@pytest.mark.parametrize("available", [0, 1])
def test_after_a_start_or_a_failure_a_service_is_called_ready_when_all_wanted_engines_are(available: int) -> None:
    """The endpoints may be known before the Deployment counts their pods as ready."""
    deployment = make_deployment(2, ready_replicas=available, available_replicas=available)
    found = judge(deployment, READY, replace(LOADING, name="other"), endpoints=1)
    assert result(found["Ready"]) == ("True", "PodsStarting")
    assert found["Ready"].message == f"{available} of 2 engines are ready"
    assert result(judge(make_deployment(2), READY, endpoints=2)["Ready"]) == ("True", "Ready")


def test_a_service_that_lost_one_pod_of_three_stays_ready_and_says_what_it_lost() -> None:
    deployment = make_deployment(3, ready_replicas=2, available_replicas=2)
    broken = make_pod("broken", ended(code=137, reason="OOMKilled"))
    found = judge(deployment, READY, broken, endpoints=2)
    assert result(found["Ready"]) == ("True", "OOMKilled")
    assert result(found["WorkloadReady"]) == ("False", "OOMKilled")
    assert found["WorkloadReady"].message == "2 of 3 engines are ready; see Ready"
    assert found["Ready"].message.startswith("2 of 3 engines are ready; container engine used more than its memory")
    assert found["Ready"].message.endswith("(pod broken)")


def test_several_pods_that_fail_are_reported_once_and_in_the_same_words() -> None:
    deployment = make_deployment(4, ready_replicas=1, available_replicas=1)
    sentence = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    early, late = "2026-11-21T08:00:00Z", "2026-11-21T09:00:00Z"
    for times in ((early, late, late), (late, early, early)):
        waiting = [
            make_pod(name, unschedulable=sentence, unschedulable_at=time)
            for name, time in zip("abc", times, strict=True)
        ]
        found = judge(deployment, READY, *waiting, endpoints=1)
        assert result(found["Ready"]) == ("True", "InsufficientGPU")
        assert found["Ready"].message == f"1 of 4 engines are ready; {sentence} (pod a and 2 more)"


def test_a_pod_that_waits_for_the_gpu_of_one_that_leaves_has_not_failed() -> None:
    deployment = make_deployment(1, ready_replicas=0, available_replicas=0, revision=2, conditions=ROLLING_OUT)
    waiting = make_pod("new", unschedulable="0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    leaving = replace(READY, name="old", config_hash="00000000", leaving=True)
    assert result(judge(deployment, waiting, leaving)["Ready"]) == ("False", "RollingOut")
    assert result(judge(deployment, waiting)["Ready"]) == ("False", "InsufficientGPU")
    not_yet_reported = replace(leaving, leaving=False)
    assert result(judge(deployment, waiting, not_yet_reported)["Ready"]) == ("False", "RollingOut")
    stuck = make_deployment(2, ready_replicas=1, available_replicas=1, revision=2, conditions=ROLLING_OUT)
    assert result(judge(stuck, waiting, not_yet_reported, endpoints=1)["Ready"]) == ("True", "InsufficientGPU")
    surging = replace(deployment, max_surge=1)
    assert result(judge(surging, waiting, not_yet_reported, rollout={"maxSurge": 1})["Ready"]) == (
        "False",
        "InsufficientGPU",
    )


@pytest.mark.parametrize("rollout", [{}, {"maxSurge": 1, "maxUnavailable": 0}])
def test_the_missing_additional_pod_is_reported_only_if_the_rollout_waits_for_it(rollout: dict[str, Any]) -> None:
    message = 'pods "new" is forbidden: exceeded quota: gpus'
    refused = make_deployment(1, updated_replicas=0, revision=2, conditions=ROLLING_OUT)
    found = judge(refused, endpoints=1, rollout=rollout, refused=message)
    assert result(found["Progressing"])[1] == ("PodsRefused" if rollout else "RollingOut")
    placed = make_deployment(1, replicas=2, updated_replicas=1, revision=2, conditions=ROLLING_OUT)
    waiting = make_pod("new", unschedulable="0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    found = judge(placed, waiting, endpoints=1, rollout=rollout)
    assert result(found["Progressing"])[1] == ("InsufficientGPU" if rollout else "RollingOut")


def test_a_pod_that_was_replaced_gives_no_reason_while_its_replacement_starts() -> None:
    evicted = make_pod("evicted", phase="Failed", reason="Evicted", message="low on memory")
    deployment = make_deployment(1, ready_replicas=0, available_replicas=0)
    assert result(judge(deployment, evicted)["WorkloadReady"]) == ("False", "Evicted")
    assert result(judge(deployment, evicted, LOADING)["WorkloadReady"]) == ("False", "PodsStarting")


def test_gpus_that_nobody_uses_are_reported_by_a_service_that_is_ready() -> None:
    for task, gpus, reason in (("Embed", 4, "GPUsUnused"), ("Embed", 1, "Ready"), ("Generate", 4, "Ready")):
        limits = {"nvidia.com/gpu": gpus, "cpu": 8}
        found = judge(make_deployment(1), READY, endpoints=1, task=task, resources={"limits": limits})
        assert result(found["Ready"]) == ("True", reason)
    vllm = {"runtime": "VLLM", "engine": {"image": "vllm:1"}, "resources": {"limits": {"nvidia.com/gpu": 4}}}
    assert result(judge(make_deployment(1), READY, endpoints=1, **vllm)["Ready"]) == ("True", "Ready")
    wasted = judge(make_deployment(1), READY, endpoints=1, resources={"limits": {"nvidia.com/mig-1g.10gb": "2"}})
    assert wasted["WorkloadReady"].message.endswith(
        "each engine requests 2 GPUs and uses one; request one GPU in resources.limits"
    )


def test_a_service_stays_ready_in_a_rollout_as_long_as_an_engine_answers() -> None:
    halfway = make_deployment(2, updated_replicas=1, revision=2, conditions=ROLLING_OUT)
    last_pod_starts = make_deployment(2, available_replicas=1, revision=2, conditions=ROLLING_OUT)
    for deployment in (halfway, last_pod_starts):
        for endpoints, ready in ((1, ("True", "Ready")), (0, ("False", "RollingOut"))):
            found = judge(deployment, READY, endpoints=endpoints, was_whole=True)
            assert result(found["Ready"]) == ready
            assert result(found["Progressing"]) == ("True", "RollingOut")


def test_scaling_is_no_rollout_also_before_the_controller_has_seen_it() -> None:
    """In a demo, the message was "RollingOut: 3 of 1 pods run the current spec"."""
    for desired, there in ((1, 3), (3, 1)):
        for seen in (1, 2):
            deployment = make_deployment(desired, generation=2, observed_generation=seen, replicas=there,
                                         updated_replicas=there, available_replicas=there)  # fmt: skip
            situation = make_situation(deployment, READY, endpoints=there, template_generation=1, was_whole=True)
            found = {judged.type: judged for judged in judge_all(situation)}
            assert result(found["Progressing"]) == ("False", "UpToDate")
            assert result(found["Ready"]) == ("True", "Ready")


def test_a_new_template_is_a_rollout_also_before_the_controller_has_seen_it() -> None:
    """The Deployment still counts the pods of the former template as updated."""
    found = judge_all(make_situation(make_deployment(1, generation=2), READY, endpoints=1, template_generation=2))
    assert result(found[1]) == ("True", "RollingOut")
    assert found[1].message == "0 of 1 pods run the current spec, 1 are ready"


@pytest.mark.parametrize(("there", "updated", "message"), [(0, 0, "0 of 1"), (1, 0, "0 of 1"), (2, 1, "1 of 2")])
def test_a_rollout_counts_the_pods_of_the_current_spec(there: int, updated: int, message: str) -> None:
    counts = {"replicas": there, "updated_replicas": updated, "available_replicas": 0}
    found = judge(make_deployment(1, revision=2, conditions=ROLLING_OUT, **counts))
    assert found["Progressing"].message == f"{message} pods run the current spec, 0 are ready"


def test_restored_pods_make_the_service_ready_and_the_rollout_failed() -> None:
    cause = RolledBack("attempt", "ImagePullFailed", "image a cannot be pulled (pod b)")
    restored = replace(make_situation(make_deployment(1), READY, endpoints=1, was_whole=True), rolled_back=cause)
    found = {judged.type: judged for judged in judge_all(restored)}
    assert result(found["Ready"]) == ("True", "Ready")
    assert result(found["Progressing"]) == ("False", "RolledBack")
    assert found["Progressing"].message.startswith("ImagePullFailed: image a cannot be pulled (pod b). The rollout")


def test_the_first_pods_are_no_rollout() -> None:
    starting = make_deployment(1, available_replicas=0, conditions=ROLLING_OUT)
    assert result(judge(starting, LOADING)["Progressing"]) == ("True", "PodsStarting")
    assert result(judge(starting, LOADING)["Ready"]) == ("False", "ModelLoading")


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
    found = judge(replace(deployment, conditions=ROLLING_OUT), replace(pod, template_label=NEWEST.pods_label))
    assert result(found[type]) == ("False", reason)
    dependent = ("Ready", "Progressing", "ModelAvailable", "WorkloadReady", "EndpointReady")
    assert {result(found[type]) for type in dependent} == {("False", reason)}, "they agree"
    assert [type for type in dependent if "(pod pod)" in found[type].message] == ["Ready"], "once is enough"
    assert {found[type].message for type in dependent[1:]} == {
        "see Ready",
        "no engine is ready: see Ready",
        "no engine of the current spec is ready: see Ready",
    }


def test_pods_of_a_former_spec_give_this_one_no_reason() -> None:
    """This holds even if both have the same configuration, because a pod's image, memory or volumes may be wrong."""
    broken = make_pod("old", ended("boom"), template_label=FORMER.pods_label)
    found = judge(make_deployment(1, updated_replicas=0), broken)
    assert result(found["WorkloadReady"]) == ("False", "PodsStarting")


def test_a_failure_that_the_deployment_quotes_of_a_former_template_is_not_reported() -> None:
    old_words = {
        "ReplicaFailure": ("True", "FailedCreate", "must specify limits.memory"),
        "Progressing": ("False", "ProgressDeadlineExceeded", "timed out"),
    }
    deployment = make_deployment(1, generation=2, updated_replicas=0, available_replicas=0, conditions=old_words)
    found = judge(deployment, template_generation=2)
    assert result(found["WorkloadReady"]) == ("False", "PodsStarting")
    found = judge(deployment, template_generation=2, refused="exceeded quota: gpus")
    assert result(found["WorkloadReady"]) == ("False", "PodsRefused")
    assert found["Ready"].message == "exceeded quota: gpus"


def test_a_replica_set_that_cannot_be_made_is_reported() -> None:
    conditions = {"Progressing": ("False", "ReplicaSetCreateError", "exceeded quota: replicasets")}
    found = judge(make_deployment(1, available_replicas=0, replicas=0, updated_replicas=0, conditions=conditions))
    assert (found["Ready"].reason, found["Ready"].message) == ("PodsRefused", "exceeded quota: replicasets")


def test_the_gateway_needs_one_ready_endpoint() -> None:
    assert result(judge(make_deployment(1), READY)["EndpointReady"]) == ("False", "NoReadyEndpoints")
    assert result(judge(make_deployment(1), READY)["Ready"]) == ("False", "NoReadyEndpoints")


counts = st.integers(0, 4)
pods = st.lists(
    st.sampled_from(
        [READY, LOADING, FETCHING, make_pod(), make_pod("x", ended("boom")), make_pod(unschedulable="Insufficient gpu"),
         make_pod(template_label="aaaaaaaa"), make_pod(leaving=True), make_pod(phase="Failed", reason="Evicted")]
    ),
    max_size=4,
)  # fmt: skip
obstacles = st.sampled_from(
    [
        (), (REFUSED,), (replace(REFUSED, temporary=True),),
        (Obstacle("Service", "qwen", Reason.CHILD_NOT_OWNED, "taken", temporary=True),),
    ]
)  # fmt: skip


rollouts = st.sampled_from([{}, ROLLED_OUT, ROLLING_OUT])


@given(counts, counts, counts, counts, st.booleans(), pods, counts, obstacles, rollouts)
def test_every_situation_has_all_conditions_with_documented_reasons(
    desired: int, there: int, updated: int, available: int, seen: bool, pods: list[PodState], endpoints: int,
    obstacles: Obstacles, conditions: dict[str, tuple[str, str, str]],
) -> None:  # fmt: skip
    deployment = make_deployment(
        desired, replicas=there, updated_replicas=updated, available_replicas=available, observed_generation=int(seen),
        conditions=conditions,
    )  # fmt: skip
    children = {("Deployment", "qwen-engine"): make_child()}
    observed = Observed(
        children, deployment, pods=tuple(pods), ready_endpoints=endpoints, replica_sets=(FORMER, NEWEST)
    )
    situation = Situation(make_resource(replicas=desired).spec, observed, obstacles)
    judged = judge_all(situation)
    usual = [type for type in ConditionType if type not in ABNORMAL]
    assert [part.type for part in judged][: len(usual)] == usual
    assert len(judged) <= len(usual) + 1, "Reconciling and Stalled exclude each other"
    all_reasons = {reason for reasons in REASONS_BY_CONDITION.values() for reason in reasons}
    for part in judged:
        allowed: Any = all_reasons if part.type == "Ready" else REASONS_BY_CONDITION[part.type]
        if part.reason != "Evicted":  # Kubernetes' own word, passed on
            assert part.reason in allowed, part
        assert part.status in ("True", "False", "Unknown")
        assert part.message
    ready = judged[0]
    for part in judged[2:5]:
        if situation.blocker is not None and not part.is_true and part.reason != "ScaledToZero":
            assert part.reason == situation.blocker.reason, "a failure is the same in all that depends on it"
    assert ready.is_true == (obstacles != (REFUSED,) and (endpoints > 0 or not (desired + there or obstacles)))


def test_of_a_job_the_pod_counts_that_has_not_been_evicted() -> None:
    evicted = make_pod("old", phase="Failed", reason="Evicted", message="the node was low on memory")
    fetching = make_pod("new", ContainerState("fetch", initial=True, running=True))

    def progressing(*pods: PodState) -> tuple[str, str]:
        observed = replace(make_observed(deployment=None), prewarm_pods=pods)
        return result(judge_all(Situation(make_resource().spec, observed, prewarming=True))[1])

    assert progressing(evicted) == ("False", "Evicted")
    assert progressing(evicted, fetching) == ("True", "ModelDownloading")


@pytest.mark.parametrize(
    ("former", "seconds", "expected"),
    [
        ("True", 6, ("True", "ScalingActive")),  # an upgrade replaces the gateways
        ("True", 30, ("False", "MetricsUnavailable")),
        ("False", 6, ("False", "MetricsUnavailable")),  # it never worked, or it is reported already
    ],
)
def test_metrics_that_cannot_be_read_for_a_moment_are_not_reported(
    former: str, seconds: int, expected: tuple[str, str]
) -> None:
    since = datetime(2026, 11, 28, 12, tzinfo=UTC)
    conditions = {"AbleToScale": ("True", "", ""), "ScalingActive": ("False", "FailedGetObjectMetric", "no route")}
    autoscaler = AutoscalerState(conditions=conditions, inactive_since=since.isoformat())
    reason = "ScalingActive" if former == "True" else "MetricsUnavailable"
    previous = {"conditions": [{"type": "ScalingReady", "status": former, "reason": reason}]}
    situation = Situation(
        make_resource(autoscaling={"maxReplicas": 4}).spec,
        make_observed(autoscaler=autoscaler),
        former=read_former(previous),
        now=since + timedelta(seconds=seconds),
    )
    judged = next(each for each in judge_all(situation) if each.type == "ScalingReady")
    assert (judged.status, judged.reason) == expected
    assert find_gap_end(autoscaler) == since + timedelta(seconds=30)


def test_an_hpa_is_observed_with_the_time_since_which_it_lacks_its_metrics() -> None:
    condition = {"type": "ScalingActive", "status": "False", "lastTransitionTime": "2026-11-28T12:00:00Z"}
    body = {"spec": {"maxReplicas": 4}, "status": {"conditions": [condition]}}
    assert observe_autoscaler(body).inactive_since == "2026-11-28T12:00:00Z"
    condition["status"] = "True"
    assert find_gap_end(observe_autoscaler(body)) is None
