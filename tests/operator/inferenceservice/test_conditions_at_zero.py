"""Tests the conditions of a service without replicas, and of one that starts from zero."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import ended, make_deployment, make_pod
from tests.operator.inferenceservice.test_conditions import LOADING, READY, judge, make_situation, result

from conveyor_api.conditions import Reason
from conveyor_operator.inferenceservice.conditions import Judged, judge_all
from conveyor_operator.inferenceservice.observed import DeploymentState
from conveyor_operator.inferenceservice.pods import PodState
from conveyor_operator.inferenceservice.situation import Former
from conveyor_operator.loop.steps import Obstacle

SLEEPY = {"autoscaling": {"minReplicas": 0, "maxReplicas": 4}}


def test_zero_replicas_are_no_failure() -> None:
    found = judge(make_deployment(0), replicas=0)
    assert result(found["Ready"]) == ("True", "ScaledToZero")
    assert result(found["WorkloadReady"]) == ("True", "ScaledToZero")
    assert result(found["Progressing"]) == ("False", "UpToDate")


def test_a_service_at_zero_is_ready_since_the_next_request_is_answered() -> None:
    judged = judge(make_deployment(0), **SLEEPY)
    assert result(judged["Ready"]) == ("True", "ScaledToZero")
    assert result(judged["WorkloadReady"]) == ("True", "ScaledToZero")
    assert result(judged["ModelAvailable"]) == ("Unknown", "ScaledToZero")
    assert result(judged["EndpointReady"]) == ("False", "ScaledToZero")
    assert result(judged["Progressing"]) == ("False", "UpToDate")


def test_it_is_so_from_the_moment_of_the_decision() -> None:
    """The service is at zero while its last pod still drains."""
    draining = make_deployment(0, replicas=1, updated_replicas=1, ready_replicas=1, available_replicas=1)
    judged = judge(draining, replace(READY, leaving=True), endpoints=1, **SLEEPY)
    assert result(judged["Ready"]) == ("True", "ScaledToZero")
    assert result(judged["WorkloadReady"]) == ("True", "ScaledToZero")


WAKING = make_deployment(1, ready_replicas=0, available_replicas=0)


def judge_ready_of(*pods: PodState, from_zero: bool = True, **spec: Any) -> Judged:
    situation = make_situation(WAKING, *pods, **spec)
    return judge_all(replace(situation, former=Former(answered_from_zero=from_zero)))[0]


def test_one_that_is_woken_is_ready_and_says_what_requests_wait_for() -> None:
    ready = judge_ready_of(LOADING, **SLEEPY)
    assert result(ready) == ("True", "StartingFromZero")
    assert ready.message == "requests are queued: the first engine is loading the model"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("HorizontalPodAutoscaler", "qwen-engine"), ("PodDisruptionBudget", "qwen-engine"), ("Service", "qwen")],
)
def test_a_contest_about_a_child_that_no_engine_needs_leaves_it_ready(kind: str, name: str) -> None:
    contests = (Obstacle(kind, name, Reason.CONTESTED, "somebody"),)
    assert result(judge(make_deployment(0), obstacles=contests, **SLEEPY)["Ready"]) == ("True", "ScaledToZero")
    assert result(judge_ready_of(LOADING, obstacles=contests, **SLEEPY)) == ("True", "StartingFromZero")


def test_a_start_that_is_not_from_zero_or_fails_is_not_ready() -> None:
    assert result(judge_ready_of(LOADING, from_zero=False, **SLEEPY)) == ("False", "ModelLoading")
    assert result(judge_ready_of(LOADING)) == ("False", "ModelLoading")
    assert result(judge_ready_of(make_pod("x", ended("boom")), **SLEEPY)) == ("False", "CrashLoop")
    assert result(judge_ready_of(make_pod(unschedulable="Insufficient gpu"), **SLEEPY)) == ("False", "InsufficientGPU")


def test_a_start_that_takes_longer_than_the_queue_timeout_is_reported_at_zero() -> None:
    situation = make_situation(make_deployment(0), **SLEEPY)
    assert "the last starts" not in situation.why_none
    assert replace(situation, start_seconds=20).why_none.endswith("waits for it; the last starts took up to 20 s")
    assert replace(situation, start_seconds=90).why_none.endswith(
        "longer than queue.timeout (60 s): raise queue.timeout"
    )


def test_an_edit_at_zero_is_reported_as_untried_until_an_engine_has_run_it() -> None:
    def why(live: DeploymentState, tried: str) -> tuple[bool, str]:
        situation = replace(make_situation(live, **SLEEPY), former=Former(tried_template=tried))
        return "no engine has started with the current spec yet" in situation.why_none, situation.ready_template

    edited = make_deployment(0, template_hash="new")
    assert why(edited, "old") == (True, "old")
    assert why(edited, "new") == (False, "new")
    assert why(edited, "") == (False, ""), "not known: an engine may have"
    assert why(replace(edited, available_replicas=1, ready_replicas=1), "old") == (False, "new")
