"""The HPA's arithmetic, redone to be read, and the condition ScalingReady."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import make_deployment, make_observed, make_resource

from conveyor_api import names
from conveyor_operator.observed import AutoscalerState
from conveyor_operator.scaling import MetricsApi, build_scaling_status, explain, find_wishes, judge_scaling

AUTOSCALED = make_resource(autoscaling={"minReplicas": 1, "maxReplicas": 4}).spec
WORKING = {"AbleToScale": ("True", "ReadyForNewScale", ""), "ScalingActive": ("True", "ValidMetricFound", "")}


def make_autoscaler(**changes: Any) -> AutoscalerState:
    """Two replicas, 70 requests in flight, 6 waiting: 3 are wanted."""
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


def test_the_arithmetic_of_both_metrics_is_told() -> None:
    assert explain(make_autoscaler()) == (
        "inference_in_flight 70 / 25.6 -> 3; inference_queue_depth 6 / 4 -> 2; the larger is 3; desired 3"
    )


def test_the_bound_that_cuts_a_wish_is_named() -> None:
    assert "maxReplicas is 4; desired 4" in explain(
        make_autoscaler(currents={names.IN_FLIGHT_METRIC: "100"}, desired_replicas=4)
    )
    assert "minReplicas is 2; desired 2" in explain(
        make_autoscaler(currents={names.IN_FLIGHT_METRIC: "0"}, min_replicas=2, desired_replicas=2)
    )


def test_a_wish_that_the_hpa_holds_says_why() -> None:
    held = WORKING | {"AbleToScale": ("True", "ScaleDownStabilized", "recent recommendations were higher")}
    low = {names.IN_FLIGHT_METRIC: "5"}
    told = explain(make_autoscaler(currents=low, desired_replicas=2, conditions=held))
    assert "held: recent recommendations were higher; desired 2" in told


def test_a_small_deviation_moves_nothing() -> None:
    told = explain(make_autoscaler(currents={names.IN_FLIGHT_METRIC: "27"}, desired_replicas=2))
    assert "within the tolerance of 10 %" in told


def test_no_metric_means_no_change() -> None:
    assert explain(make_autoscaler(currents={})) == "no metric could be read; desired 3, as it was"


@given(st.integers(0, 100_000), st.integers(1, 50), st.integers(1, 1024))
def test_the_total_is_found_again_from_the_hpas_average(total: int, replicas: int, target: int) -> None:
    milli = -(-total * 1000 // replicas)  # the HPA rounds its average up to thousandths
    state = make_autoscaler(current_replicas=replicas, targets={"m": str(target)}, currents={"m": f"{milli}m"})
    (wish,) = find_wishes(state)
    assert wish.total == total
    assert wish.replicas == -(-total // target)


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
    observed = make_observed(deployment=make_deployment(4, held_replicas="1:4"))
    message = judge_scaling(make_resource().spec, observed, MetricsApi())[2]
    assert "4 replicas are kept" in message
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
