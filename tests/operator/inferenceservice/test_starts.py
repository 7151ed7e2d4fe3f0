"""Tests that the period of scaling up follows the start times of the service's own pods, and changes rarely."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.operator import kubelet
from tests.operator.kubelet import Kubelet
from tests.operator.stage import Stage, wait_until

from conveyor_api.status import EffectiveStatus, InferenceServiceStatus, LastStart
from conveyor_operator.inferenceservice.pods import ContainerState, PodState
from conveyor_operator.inferenceservice.starts import PodStart, PodStarts

Json = dict[str, Any]
CREATED = "2026-11-22T08:00:00Z"


def pod(name: str, seconds: int | None) -> PodState:
    """Make a pod that took this long to start, or is not ready."""
    if seconds is None:
        return PodState(name, f"uid-{name}", created_at=CREATED)
    return PodState(name, f"uid-{name}", ready=True, created_at=CREATED, ready_at=after(CREATED, seconds))


def after(moment: str, seconds: int) -> str:
    return (datetime.fromisoformat(moment) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_a_pod_is_measured_once_however_often_it_becomes_ready() -> None:
    starts = PodStarts()
    for pods in ([pod("a", None)], [pod("a", 20)], [pod("a", None)], [pod("a", 900), pod("b", 30)]):
        starts.see(pods)
    assert starts.seconds == [20, 30]


def test_the_last_three_starts_are_kept_in_the_order_in_which_they_ended() -> None:
    starts = PodStarts()
    starts.see([pod("a", 50), pod("b", 10), pod("c", 40), pod("d", 30)])
    assert starts.seconds == [30, 40, 50]


def test_a_clock_that_is_wrong_measures_nothing() -> None:
    starts = PodStarts()
    starts.see([pod("a", -5), PodState("b", ready=True)])
    assert starts.seconds == []


def test_who_restarts_goes_on_from_the_status_and_measures_no_pod_that_was_ready_before() -> None:
    status = InferenceServiceStatus(effective=EffectiveStatus(pod_starts=["20s", "25s"], scale_up_period="160s"))
    starts = PodStarts(status, [pod("a", 900), pod("b", None)])
    starts.see([pod("a", 900), pod("b", 40)])
    assert starts.seconds == [20, 25, 40]
    assert PodStarts(status).choose_period(60) == 160


def test_a_start_is_reported_part_by_part() -> None:
    def at(seconds: int) -> str:
        return after(CREATED, seconds)

    fetch = ContainerState("fetch", initial=True, ended=True, started_at=at(12), ended_at=at(40))
    whole = replace(pod("a", 100), scheduled_at=at(2), containers=(fetch,))
    starts = PodStarts()
    start = PodStart("a", "uid-a", {"total": 100, "schedule": 2, "image": 10, "model": 28, "load": 60})
    assert starts.see([whole]) == [start]
    assert starts.last == start
    assert starts.see([whole, pod("b", 7)]) == [PodStart("b", "uid-b", {"total": 7})], (
        "what it does not say is left out"
    )


@pytest.mark.parametrize(
    ("reported_seconds", "load", "warm_up"),
    [(12.4, 48, 12), (0, 60, 0), (60.4, 0, 60), (1e300, 0, 60)],
    ids=["part of it", "none of it", "all of it", "a lie"],
)
def test_the_warm_up_is_separated_and_the_other_parts_stay_as_kubernetes_measured_them(
    reported_seconds: float, load: int, warm_up: int
) -> None:
    start = PodStart("a", "uid-a", {"total": 100, "model": 28, "load": 60})
    parts = {"total": 100, "model": 28, "load": load, "warm_up": warm_up}
    assert start.with_warm_up(reported_seconds).seconds == parts


def test_a_warm_up_without_a_report_or_without_a_known_load_changes_nothing() -> None:
    start, short = PodStart("a", "uid-a", {"total": 100, "load": 60}), PodStart("a", "uid-a", {"total": 100})
    assert start.with_warm_up(None) == start
    assert short.with_warm_up(5) == short


def test_a_warm_up_that_comes_after_the_next_start_is_no_part_of_that() -> None:
    fetch = ContainerState("fetch", initial=True, ended=True, started_at=CREATED, ended_at=CREATED)
    starts = PodStarts()
    (first,) = starts.see([replace(pod("a", 20), containers=(fetch,))])
    (second,) = starts.see([replace(pod("a", 20), containers=(fetch,)), replace(pod("b", 30), containers=(fetch,))])
    assert starts.describe_warm_up(first, 5).seconds["load"] == 15
    assert starts.last == second
    assert starts.describe_warm_up(second, 8) == starts.last
    assert starts.last.seconds == {"total": 30, "model": 0, "load": 22, "warm_up": 8}


@pytest.mark.parametrize(
    ("last_start", "found"),
    [
        (LastStart(pod_name="a", total="20s", load="15s"), PodStart("a", "uid-a", {"total": 20, "load": 15})),
        (LastStart(pod_name="a", total="20s", load="9s", warm_up="6s"), None),
        (LastStart(pod_name="b", total="20s", load="15s"), None),
        (LastStart(pod_name="gone", total="20s", load="15s"), None),
        (None, None),
    ],
    ids=["untold", "told", "not ready", "gone", "none"],
)
def test_who_restarts_finds_the_start_that_lacks_its_warm_up(
    last_start: LastStart | None, found: PodStart | None
) -> None:
    status = InferenceServiceStatus(last_start=last_start)
    assert PodStarts(status, [pod("a", 900), pod("b", None)]).last == found


@pytest.mark.parametrize(
    ("seconds", "queue_timeout_seconds", "period_seconds"),
    [
        ([], 60, 420),  # 300 s are assumed
        ([20], 60, 140),
        ([21], 60, 160),
        ([20, 280, 20], 60, 400),
        ([20], 5, 40),
        ([20], 600, 140),  # a wait that long is no reason to stand still so long
        ([5000], 60, 1800),  # what Kubernetes allows
    ],
)
def test_the_period_is_the_slowest_start_and_two_queue_time_outs(
    seconds: list[int], queue_timeout_seconds: float, period_seconds: int
) -> None:
    starts = PodStarts()
    for each in seconds:
        starts.add(each)
    assert starts.choose_period(queue_timeout_seconds) == period_seconds


def test_the_period_stays_until_it_is_too_short_or_half_as_long_again_as_need_be() -> None:
    starts, periods = PodStarts(), []
    for seconds in (20, 35, 35, 21, 22, 20, 50, 20, 20, 20, 100, 20, 20, 20):
        starts.add(seconds)
        periods.append(starts.choose_period(60))
    assert periods == [140, 160, 160, 160, 160, 160, 180, 180, 180, 180, 220, 220, 220, 140]


def start_in(seconds: int) -> kubelet.Decide:
    """Let every pod become ready this long after its creation."""

    def decide(pod: Json) -> Json:
        status = kubelet.ready(pod)
        for condition in status["conditions"]:
            condition["lastTransitionTime"] = after(pod["metadata"]["creationTimestamp"], seconds)
        return status

    return decide


def became_ready_after(pod: Json, seconds: int) -> bool:
    moment = after(pod["metadata"]["creationTimestamp"], seconds)
    return all(condition["lastTransitionTime"] == moment for condition in pod["status"]["conditions"])


def period(stage: Stage) -> int:
    policies = stage.space.need("HorizontalPodAutoscaler", "qwen-engine")["spec"]["behavior"]["scaleUp"]["policies"]
    (found,) = {policy["periodSeconds"] for policy in policies}
    return int(found)


def effective(stage: Stage) -> tuple[list[str] | None, str | None]:
    status = stage.space.need("InferenceService", "qwen").get("status") or {}
    effective = status.get("effective") or {}
    return effective.get("podStarts"), effective.get("scaleUpPeriod")


@pytest.mark.slow
def test_the_autoscaler_gets_the_period_that_its_own_pods_request_and_keeps_it_over_a_restart(stage: Stage) -> None:
    with Kubelet(stage.space, lambda pod: None) as node:
        with stage.operator():
            stage.space.make_service(autoscaling={"minReplicas": 2, "maxReplicas": 4})
            wait_until("the period is told", lambda: effective(stage) == (None, "420s"))
            assert period(stage) == 420
            node.decide = start_in(20)
            wait_until("both are measured", lambda: effective(stage) == (["20s", "20s"], "140s"))
            assert period(stage) == 140
        node.decide = start_in(900)  # as if they had become ready anew meanwhile
        wait_until("they have", lambda: all(became_ready_after(pod, 900) for pod in stage.space.list("Pod")))
        with stage.operator():
            stage.space.edit("qwen", autoscaling={"minReplicas": 3})
            wait_until("a third", lambda: effective(stage) == (["20s", "20s", "900s"], "1020s"))
            assert period(stage) == 1020


def test_policies_that_the_service_names_are_left_alone(stage: Stage) -> None:
    policies = [{"type": "Pods", "value": 1, "periodSeconds": 5}]
    with stage.operator(), Kubelet(stage.space, start_in(20)):
        autoscaling = {"maxReplicas": 4, "behavior": {"scaleUp": {"policies": policies}}}
        stage.space.make_service(autoscaling=autoscaling)
        wait_until("it is measured", lambda: effective(stage) == (["20s"], None))
        assert period(stage) == 5
