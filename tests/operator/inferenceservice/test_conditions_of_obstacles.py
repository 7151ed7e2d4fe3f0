"""Tests the conditions of services whose children or pods are refused, contested, forbidden or lost."""

from dataclasses import replace

import pytest
from tests.operator import kubelet
from tests.operator.builders import (
    NEWEST,
    make_deployment,
)
from tests.operator.inferenceservice.judging import LOADING, READY, REFUSED, judge, result

from conveyor_api.conditions import Reason
from conveyor_operator.inferenceservice.pods import observe_pod
from conveyor_operator.loop.steps import Obstacle


def test_a_refused_child_is_the_reason_and_its_words_are_the_message() -> None:
    found = judge(None, obstacles=(REFUSED,))
    for type in ("Ready", "Progressing", "WorkloadReady"):
        assert result(found[type]) == ("False", "ChildRefused")
    assert found["Ready"].message == "Deployment qwen-engine: bad nodeSelector"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("HorizontalPodAutoscaler", "qwen-engine"), ("PodDisruptionBudget", "qwen-engine"), ("Service", "qwen")],
)
def test_a_refused_child_that_no_request_needs_is_reported_by_a_service_that_is_ready(kind: str, name: str) -> None:
    obstacle = Obstacle(kind, name, Reason.CHILD_REFUSED, "no")
    found = judge(make_deployment(1), READY, endpoints=1, obstacles=(obstacle,))
    assert result(found["Ready"]) == ("True", "Ready")
    assert result(found["WorkloadReady"]) == ("True", "ReplicasReady")
    assert result(found["EndpointReady"]) == ("True", "EndpointsAvailable")
    assert result(found["Progressing"]) == ("False", "ChildRefused")
    assert result(found["ScalingReady"])[0] == ("False" if kind == "HorizontalPodAutoscaler" else "True")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("HorizontalPodAutoscaler", "qwen-engine"),
        ("PodDisruptionBudget", "qwen-engine"),
        ("Service", "qwen"),
        ("Service", "qwen-engine"),
    ],
)
def test_a_contest_about_a_child_that_is_no_pod_is_no_failed_rollout(kind: str, name: str) -> None:
    contest = Obstacle(kind, name, Reason.CONTESTED, "somebody")
    found = judge(make_deployment(1), READY, endpoints=1, obstacles=(contest,))
    assert result(found["Ready"]) == ("True", "Ready")
    assert result(found["Progressing"]) == ("False", "Contested")
    assert not {"Stalled", "Reconciling"} & set(found)


def test_a_contest_about_the_deployment_is_a_stalled_rollout() -> None:
    contest = Obstacle("Deployment", "qwen-engine", Reason.CONTESTED, "somebody")
    found = judge(make_deployment(1), READY, endpoints=1, obstacles=(contest,))
    assert result(found["Stalled"]) == ("True", "Contested")


def test_a_contest_does_not_hide_why_no_engine_is_ready() -> None:
    contest = Obstacle("PodDisruptionBudget", "qwen-engine", Reason.CONTESTED, "somebody")
    found = judge(make_deployment(1, available_replicas=0), LOADING, obstacles=(contest,))
    assert result(found["Ready"]) == ("False", "ModelLoading")
    contest = replace(contest, kind="Service")
    assert result(judge(make_deployment(1), READY, obstacles=(contest,))["Ready"]) == ("False", "Contested")


def test_while_no_engine_answers_every_obstacle_is_reported_at_once() -> None:
    obstacle = Obstacle("Service", "qwen", Reason.CHILD_NOT_OWNED, "taken")
    assert result(judge(None, obstacles=(obstacle,))["Ready"]) == ("False", "ChildNotOwned")


def test_a_refused_engine_service_is_why_no_engine_is_found() -> None:
    obstacle = Obstacle("Service", "qwen-engine", Reason.CHILD_NOT_OWNED, "taken")
    found = judge(make_deployment(1), READY, obstacles=(obstacle,))
    assert result(found["EndpointReady"]) == result(found["Ready"]) == ("False", "ChildNotOwned")


def test_what_passes_by_itself_does_not_make_a_service_that_answers_unready() -> None:
    passing = replace(REFUSED, temporary=True)
    found = judge(make_deployment(1), READY, endpoints=1, obstacles=(passing,))
    assert result(found["Ready"]) == ("True", "Ready")
    assert result(found["Progressing"]) == ("True", "ChildRefused")
    assert result(judge(None, obstacles=(passing,))["Ready"]) == ("False", "ChildRefused")


def test_pods_that_a_quota_forbids_are_reported() -> None:
    deployment = make_deployment(1, replicas=0, updated_replicas=0, available_replicas=0)
    found = judge(deployment, refused="exceeded quota: gpus")
    assert result(found["WorkloadReady"]) == ("False", "PodsRefused")
    assert found["Ready"].message == "exceeded quota: gpus"
    assert result(found["Ready"]) == ("False", "PodsRefused")


def test_a_rollout_that_takes_too_long_is_reported() -> None:
    conditions = {"Progressing": ("False", "ProgressDeadlineExceeded", "timed out")}
    found = judge(make_deployment(1, available_replicas=0, revision=2, conditions=conditions), LOADING)
    assert result(found["Progressing"]) == ("False", "ProgressDeadlineExceeded")
    assert result(found["WorkloadReady"]) == ("False", "ProgressDeadlineExceeded")


def test_engines_of_a_node_that_stopped_reporting_are_lost_not_loading() -> None:
    body = {"metadata": {"name": "pod"}, "spec": {"nodeName": "n1"}, "status": kubelet.node_lost({})}
    pod = replace(observe_pod(body), template_label=NEWEST.pods_label)
    found = judge(make_deployment(1, ready_replicas=0, available_replicas=0), pod)
    for type in ("Ready", "WorkloadReady", "EndpointReady", "ModelAvailable"):
        assert result(found[type]) == ("False", "NodeLost")
    assert found["Ready"].message == (
        f"node n1 has not reported since {kubelet.TIME}; its engines may still answer (pod pod)"
    )
    assert result(found["Progressing"]) == ("False", "UpToDate")
    assert result(found["Reconciling"]) == ("True", "NodeLost")
