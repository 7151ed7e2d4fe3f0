"""Tests the operator's repetition of the HPA's arithmetic, and the condition ScalingReady."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import make_deployment, make_observed, make_resource

from conveyor_api import names
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.observed import AutoscalerState
from conveyor_operator.inferenceservice.scaling import (
    MetricsApi,
    build_scaling_status,
    explain,
    find_proposals,
    judge_scaling,
    keep_decision,
)

AUTOSCALED = make_resource(autoscaling={"minReplicas": 1, "maxReplicas": 4}).spec
WORKING = {"AbleToScale": ("True", "ReadyForNewScale", ""), "ScalingActive": ("True", "ValidMetricFound", "")}


def make_autoscaler(**changes: Any) -> AutoscalerState:
    """Make an autoscaler with two replicas, 70 requests in flight and 6 waiting. It wants 3 replicas."""
    state = AutoscalerState(
        min_replicas=1,
        max_replicas=4,
        current_replicas=2,
        desired_replicas=3,
        targets={names.IN_FLIGHT_METRIC: "25600m", names.QUEUE_DEPTH_METRIC: "4"},
        currents={names.IN_FLIGHT_METRIC: "35", names.QUEUE_DEPTH_METRIC: "3"},
        conditions=WORKING,
    )
    return replace(state, **changes)


def judge(autoscaler: AutoscalerState | None, api: MetricsApi | None = None) -> tuple[str, str, str]:
    return judge_scaling(AUTOSCALED, make_observed(autoscaler=autoscaler), api or MetricsApi())


def test_the_arithmetic_of_both_metrics_is_reported() -> None:
    assert explain(make_autoscaler()) == (
        "Decided",
        "scaled 2 -> 3: inference_in_flight 70 / 25.6 -> 3; inference_queue_depth 6 / 4 -> 2; the larger is 3",
    )


def test_the_bound_that_cuts_a_proposal_is_named() -> None:
    many, none = {names.IN_FLIGHT_METRIC: "100"}, {names.IN_FLIGHT_METRIC: "0"}
    assert explain(make_autoscaler(currents=many, desired_replicas=4)) == (
        "AtMaximum",
        "scaled 2 -> 4: inference_in_flight 200 / 25.6 -> 8; maxReplicas is 4",
    )
    assert explain(make_autoscaler(currents=none, min_replicas=2, desired_replicas=2)) == (
        "Decided",
        "2 replicas: inference_in_flight 0 / 25.6 -> 0; minReplicas is 2",
    )


def test_a_proposal_that_the_hpa_holds_is_reported_with_the_reason() -> None:
    held = WORKING | {"AbleToScale": ("True", "ScaleDownStabilized", "recent recommendations were higher")}
    low = {names.IN_FLIGHT_METRIC: "5"}
    text = explain(make_autoscaler(currents=low, desired_replicas=2, conditions=held))
    assert text == (
        "Stabilized",
        "2 replicas: inference_in_flight 10 / 25.6 -> 1; held: recent recommendations were higher",
    )


def test_pods_that_go_one_step_at_a_time_are_no_tolerance() -> None:
    """On a cluster, 4 -> 3 on the way to 1 was reported as "within the tolerance of 10 %, so nothing moves"."""
    limited = WORKING | {"ScalingLimited": ("True", "ScaleDownLimit", "the desired replica count is decreasing faster")}
    low = {names.IN_FLIGHT_METRIC: "1"}
    reason, text = explain(make_autoscaler(currents=low, current_replicas=4, desired_replicas=3, conditions=limited))
    assert reason == "Limited"
    assert text.startswith("scaled 4 -> 3: inference_in_flight 4 / 25.6 -> 1; limited: the desired replica count")


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 200),
    st.sampled_from(["ReadyForNewScale", "SucceededRescale", "ScaleDownStabilized"]),
)
def test_the_tolerance_is_named_only_where_it_keeps_the_replicas_as_they_are(
    now: int, desired: int, total: int, able: str
) -> None:
    state = make_autoscaler(
        current_replicas=now,
        desired_replicas=desired,
        max_replicas=8,
        targets={"m": "10"},
        currents={"m": f"{-(-total * 1000 // now)}m"},
        conditions=WORKING | {"AbleToScale": ("True", able, "why")},
    )
    reason, text = explain(state)
    assert ("within the tolerance" in text) == (-(-total // 10) != now and abs(total - 10 * now) <= now)
    assert text.startswith(f"scaled {now} -> {desired}: " if now != desired else f"{desired} replicas: ")
    proposal = now if "within" in text else min(8, max(1, -(-total // 10)))
    assert (reason in ("Decided", "AtMaximum")) == (proposal == desired)


def test_a_small_deviation_moves_nothing() -> None:
    text = explain(make_autoscaler(currents={names.IN_FLIGHT_METRIC: "27"}, desired_replicas=2))[1]
    assert text == "2 replicas: inference_in_flight 54 / 25.6 -> 2, within the tolerance of 10 %"
    wide = make_autoscaler(currents={names.IN_FLIGHT_METRIC: "32"}, desired_replicas=2, tolerance_up="0.25")
    assert "within the tolerance of 25 %" in explain(wide)[1]


def test_no_metric_means_no_change() -> None:
    assert explain(make_autoscaler(currents={})) == ("NoMetrics", "the replicas stay at 3: no metric could be read")


def test_a_new_reading_is_no_news_and_a_new_decision_is() -> None:
    def describe(**changes: Any) -> dict[str, Any]:
        status = build_scaling_status(AUTOSCALED, make_observed(autoscaler=make_autoscaler(**changes)))
        assert status is not None
        return status.to_manifest()

    first = describe()
    assert (
        keep_decision(first, describe(currents={names.IN_FLIGHT_METRIC: "36", names.QUEUE_DEPTH_METRIC: "1"})) == first
    )
    for changes in (
        {"desired_replicas": 2},
        {"targets": {names.IN_FLIGHT_METRIC: "10"}},
        {"currents": {names.IN_FLIGHT_METRIC: "100"}, "max_replicas": 3},
        {"currents": {}},
    ):
        assert keep_decision(first, describe(**changes)) == describe(**changes) != first


def test_a_kind_that_the_hpa_does_not_know_yet_is_no_failure() -> None:
    """This is so at the HPA's first evaluation after an installation."""
    words = 'unable to get metric inference_in_flight: no matches for kind "InferenceService" in version "conveyor.dev"'
    conditions = WORKING | {"ScalingActive": ("False", "FailedGetObjectMetric", words)}
    assert judge(make_autoscaler(conditions=conditions))[:2] == ("Unknown", "WaitingForAutoscaler")


def test_an_api_that_is_registered_and_that_the_hpa_does_not_know_yet_is_no_failure() -> None:
    conditions = WORKING | {
        "ScalingActive": ("False", "FailedGetObjectMetric", "no custom metrics API (custom.metrics.k8s.io) registered")
    }
    new, none = MetricsApi(registered=True), MetricsApi()
    assert judge(make_autoscaler(conditions=conditions), new)[:2] == ("Unknown", "WaitingForAutoscaler")
    assert judge(make_autoscaler(conditions=conditions), none)[:2] == ("False", "MetricsUnavailable")


@given(st.integers(0, 100_000), st.integers(1, 50), st.integers(1, 1024))
def test_the_total_is_found_again_from_the_hpas_average(total: int, replicas: int, target: int) -> None:
    milli = -(-total * 1000 // replicas)  # the HPA rounds its average up to thousandths
    state = make_autoscaler(current_replicas=replicas, targets={"m": str(target)}, currents={"m": f"{milli}m"})
    (proposal,) = find_proposals(state)
    assert proposal.total == total
    assert proposal.replicas == (-(-total // target) if proposal.tolerance is None else replicas)


def test_a_working_autoscaler_is_ready() -> None:
    assert judge(make_autoscaler())[:2] == ("True", "ScalingActive")


def test_an_autoscaler_without_metrics_says_the_hpas_words() -> None:
    conditions = WORKING | {"ScalingActive": ("False", "FailedGetObjectMetric", "503 from the metrics API")}
    status, reason, message = judge(make_autoscaler(conditions=conditions))
    assert (status, reason) == ("False", "MetricsUnavailable")
    assert "503 from the metrics API" in message


def test_an_autoscaler_that_cannot_scale_has_failed() -> None:
    conditions = {"AbleToScale": ("False", "FailedGetScale", "no such deployment")}
    assert judge(make_autoscaler(conditions=conditions))[:2] == ("False", "AutoscalerFailed")


def test_an_autoscaler_paused_by_a_zero_says_how_to_resume() -> None:
    conditions = WORKING | {"ScalingActive": ("False", "ScalingDisabled", "the replica count is zero")}
    status, reason, message = judge(make_autoscaler(conditions=conditions))
    assert (status, reason) == ("False", "AutoscalerFailed")
    assert "scale it to 1" in message


def test_before_the_hpas_first_look_nothing_is_known() -> None:
    assert judge(None)[:2] == ("Unknown", "WaitingForAutoscaler")
    assert judge(make_autoscaler(conditions={}))[:2] == ("Unknown", "WaitingForAutoscaler")


def test_a_metrics_api_of_somebody_else_is_named() -> None:
    other = MetricsApi("monitoring/prometheus-adapter", "v1beta1.custom.metrics.k8s.io")
    status, reason, message = judge(make_autoscaler(), other)
    assert (status, reason) == ("False", "MetricsAPIOwnedByOther")
    assert "monitoring/prometheus-adapter" in message
    assert "v1beta1.custom.metrics.k8s.io" in message


def test_fixed_replicas_are_always_ready() -> None:
    spec = make_resource(replicas=3).spec
    status, reason, message = judge_scaling(spec, make_observed(), MetricsApi("other/adapter", "v1beta1"))
    assert (status, reason) == ("True", "FixedReplicas")
    assert "3" in message


def test_held_replicas_say_how_to_change_them() -> None:
    observed = make_observed(deployment=make_deployment(4, held_replicas="4"))
    message = judge_scaling(make_resource().spec, observed, MetricsApi())[2]
    assert "keeps its 4 replicas" in message
    assert "spec.replicas" in message


def test_the_status_shows_what_the_hpa_saw() -> None:
    status = build_scaling_status(AUTOSCALED, make_observed(autoscaler=make_autoscaler()))
    assert status is not None
    assert status.desired_replicas == 3
    assert [(m.name, m.current, m.target) for m in status.metrics] == [
        (names.IN_FLIGHT_METRIC, "35", "25600m"),
        (names.QUEUE_DEPTH_METRIC, "3", "4"),
    ]
    assert build_scaling_status(make_resource().spec, make_observed()) is None


SLEEPY = make_resource(autoscaling={"minReplicas": 0, "maxReplicas": 4}).spec
RESTING = {**WORKING, "ScalingActive": ("False", "ScalingDisabled", "scaling is disabled since the replica count is 0")}


def test_at_zero_the_hpa_rests_and_the_status_says_that_and_why() -> None:
    for conditions in (WORKING, RESTING):  # before and after it has looked
        asleep = make_observed(deployment=make_deployment(0), autoscaler=make_autoscaler(conditions=conditions))
        assert judge_scaling(SLEEPY, asleep, MetricsApi())[:2] == ("True", "ScaledToZero")
        status = build_scaling_status(SLEEPY, asleep)
        assert status is not None
        assert (status.desired_replicas, status.reason) == (0, "ScaledToZero")


def test_a_service_that_was_woken_says_so_until_the_hpa_looks_again() -> None:
    woken = make_observed(deployment=make_deployment(1), autoscaler=make_autoscaler(conditions=RESTING))
    assert judge_scaling(SLEEPY, woken, MetricsApi())[:2] == ("Unknown", "WaitingForAutoscaler")
    status = build_scaling_status(SLEEPY, woken, activity=Activity.WAITING)
    assert status is not None
    assert (status.desired_replicas, status.reason) == (1, "Woken")
    assert status.message == "scaled 0 -> 1: requests are queued"
    assert build_scaling_status(SLEEPY, woken, {"reason": "Woken"}) == status, "until the HPA looks"
    unlooked = make_observed(deployment=make_deployment(1), autoscaler=make_autoscaler())  # it slept for seconds
    status = build_scaling_status(SLEEPY, unlooked, {"reason": "ScaledToZero"}, Activity.WAITING)
    assert status is not None
    assert status.reason == "Woken"


def test_replicas_that_came_without_a_request_are_not_put_down_to_one() -> None:
    """They came from a raised minimum, or from a user."""
    woken = make_observed(deployment=make_deployment(2), autoscaler=make_autoscaler(conditions=RESTING))
    for spec in (SLEEPY, AUTOSCALED):
        status = build_scaling_status(spec, woken)
        assert status is not None
        assert (status.reason, status.message) == ("Pending", "scaled 0 -> 2")


def test_a_deployment_that_a_user_has_scaled_to_zero_is_still_named_as_such() -> None:
    stopped = make_observed(deployment=make_deployment(0), autoscaler=make_autoscaler(conditions=RESTING))
    assert judge_scaling(AUTOSCALED, stopped, MetricsApi())[:2] == ("False", "AutoscalerFailed")


BY_KEDA = make_resource(autoscaling={"provider": "KEDA", "maxReplicas": 4}).spec
KEDA_READY = {"Ready": ("True", "ScaledObjectReady", "")}


@pytest.mark.parametrize(
    ("served", "answer", "autoscaler", "judged"),
    [
        (None, None, None, ("Unknown", "WaitingForAutoscaler", "has not checked yet whether KEDA is installed")),
        (False, None, None, ("False", "KEDANotInstalled", "Install KEDA")),
        (True, None, None, ("Unknown", "WaitingForAutoscaler", "the ScaledObject does not exist yet")),
        (True, {}, None, ("Unknown", "WaitingForAutoscaler", "has not processed the ScaledObject yet")),
        (True, KEDA_READY, None, ("Unknown", "WaitingForAutoscaler", "the HorizontalPodAutoscaler does not exist yet")),
        (True, KEDA_READY, make_autoscaler(), ("True", "ScalingActive", "sets the replicas")),
        (
            True,
            {"Ready": ("False", "Check", "wrong")},
            make_autoscaler(),
            ("False", "AutoscalerFailed", "Check: wrong"),
        ),
        (
            True,
            {"Ready": ("False", "TriggerError", "")},
            make_autoscaler(),
            ("False", "MetricsUnavailable", "TriggerE"),
        ),
        (True, {"Ready": ("Unknown", "PartialTriggerError", "")}, make_autoscaler(), ("True", "ScalingActive", "")),
        (True, KEDA_READY | {"Paused": ("True", "", "")}, None, ("False", "AutoscalerFailed", "is paused")),
    ],
)
def test_keda_is_judged_before_its_hpa(
    served: bool | None, answer: Any, autoscaler: AutoscalerState | None, judged: tuple[str, str, str]
) -> None:
    """It does not matter who serves custom.metrics.k8s.io, because KEDA does not read it."""
    observed, api = make_observed(autoscaler=autoscaler, scaled_object=answer), MetricsApi(owner="other/adapter")
    status, reason, message = judge_scaling(BY_KEDA, observed, api, served)
    assert (status, str(reason)) == judged[:2]
    assert judged[2] in message
