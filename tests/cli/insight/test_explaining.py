"""Tests the explanation of each situation. `test_explained_service` compares the decisions with the controller's."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.builders import build_one, make_deployment, make_resource

from conveyor_api import names
from conveyor_insight.explaining import DecisionReason, Explanation, explain
from conveyor_insight.facts import ClassFacts, Counts, Facts, LimitFacts
from conveyor_kubectl.words import build_json, build_text
from e2e.cluster.paths import REPOSITORY

NOW = datetime(2026, 11, 23, 1, 0, tzinfo=UTC)
BEHAVIOR = {"scaleUp": {"policies": [{"type": "Pods", "value": 2, "periodSeconds": 60}]}}
AUTOSCALING = {"minReplicas": 1, "maxReplicas": 4, "behavior": BEHAVIOR}
BATCHING = {"maxBatchSize": 40}  # targets 30 and 5


def make_facts(
    *values: int | str, desired: int = 1, autoscaling: Any = AUTOSCALING, hpa: Any = None, **changes: Any
) -> Facts:
    """Make the facts of a service with `desired` pods whose metrics have these values."""
    body = build_one("HorizontalPodAutoscaler", autoscaling=autoscaling, batching=BATCHING) | (hpa or {})
    facts = Facts(
        service=make_resource(autoscaling=autoscaling, batching=BATCHING),
        now=NOW,
        deployment=make_deployment(desired),
        autoscaler=body,
        values=dict(zip((names.IN_FLIGHT_METRIC, names.QUEUE_DEPTH_METRIC), values, strict=True)),
    )
    return replace(facts, **changes)


def decide(facts: Facts) -> tuple[int, DecisionReason]:
    found = explain(facts)
    return found.desired, found.reason


def describe(facts: Facts) -> str:
    return " ".join(explain(facts).sentences)


@pytest.mark.parametrize(
    ("values", "desired", "decided"),
    [
        ((80, 0), 1, (3, DecisionReason.SCALES_UP)),
        ((31, 0), 1, (1, DecisionReason.WITHIN_TOLERANCE)),
        ((60, 10), 2, (2, DecisionReason.AT_TARGET)),
        ((31, 12), 1, (3, DecisionReason.SCALES_UP)),
        ((200, 0), 2, (4, DecisionReason.AT_MAXIMUM)),
        ((200, 0), 1, (3, DecisionReason.LIMITED)),
        ((0, 0), 1, (1, DecisionReason.AT_MINIMUM)),
        ((30, 0), 3, (3, DecisionReason.STABILIZED)),
        ((30, 0), 7, (4, DecisionReason.OUT_OF_BOUNDS)),
        (("503", "503"), 3, (3, DecisionReason.NO_METRICS)),
        (("503", 1), 3, (3, DecisionReason.NO_METRICS)),
        (("503", 18), 3, (4, DecisionReason.SCALES_UP)),
    ],
)
def test_the_metrics_the_bounds_and_the_behavior_decide(
    values: tuple[int | str, int | str], desired: int, decided: tuple[int, DecisionReason]
) -> None:
    assert decide(make_facts(*values, desired=desired)) == decided


def test_the_table_has_the_arithmetic() -> None:
    assert build_text(explain(make_facts(95, "no gateway is known", desired=3))).splitlines() == [
        "InferenceService default/qwen: 3 replicas desired, 3 current, 3 ready; between 1 and 4",
        "",
        "METRIC                  VALUE     TARGET   RATIO   TOLERANCE   REPLICAS",
        "inference_in_flight     95        30       1.06    10 %        3",
        "inference_queue_depth   unknown   5",
        "",
        "3 replicas (WithinTolerance). inference_in_flight is within 10 % of its target, so the replicas stay.",
        "The HorizontalPodAutoscaler has not read its metrics yet.",
        "",
        "inference_queue_depth: no gateway is known",
    ]


PAGE = "docs/priorities.md"


def test_each_class_has_a_row_with_what_waits_and_since_when() -> None:
    classes = (ClassFacts("chat", 0, 0, 0), ClassFacts("agents", 1, 3, 2), ClassFacts("batch", 10, 120, 48))
    found = explain(make_facts(95, 0, desired=3, classes=classes))
    table = build_text(found).split("\n\n")[2]
    assert table in (REPOSITORY / PAGE).read_text()
    assert table.splitlines()[2].split() == ["agents", "1", "3", "2", "s"]
    assert build_json(found)["classes"][2] == {
        "name": "batch", "level": 10, "waiting": 120, "waitSeconds": 48, "problem": None,
    }  # fmt: skip


def test_what_cannot_be_read_of_classes_is_said_once() -> None:
    classes = tuple(ClassFacts(name, level, "no gateway", "no gateway") for level, name in enumerate(("a", "b")))
    found = explain(make_facts(95, 0, desired=3, classes=classes))
    assert build_text(found).splitlines()[-1] == "classes: no gateway"
    assert build_text(found).count("unknown") == 4
    assert build_json(found)["classes"][0] == {
        "name": "a", "level": 0, "waiting": None, "waitSeconds": None, "problem": "no gateway",
    }  # fmt: skip


OBJECTIVES_PAGE = "docs/objectives.md"


def test_the_batch_size_that_objectives_allow_is_reported_with_the_reasons() -> None:
    limits = LimitFacts(16, {"missed": 2, "slack": 1})
    found = explain(make_facts(95, 0, desired=3, limits=limits))
    text = build_text(found).split("\n\n")[2]
    assert text.replace("of 40", "of 64") in (REPOSITORY / OBJECTIVES_PAGE).read_text()
    assert build_json(found)["objectives"] == {
        "running": 16, "maxBatchSize": 40, "engines": {"missed": 2, "slack": 1}, "problem": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (LimitFacts("no gateway is known", {}), "objectives: no gateway is known"),
        (LimitFacts(40, {}), "objectives: no engine with requests reports its limit"),
    ],
)
def test_limits_that_are_not_known_are_named_as_such(limits: LimitFacts, message: str) -> None:
    assert message in build_text(explain(make_facts(95, 0, desired=3, limits=limits)))


def test_a_tolerance_of_its_own_counts_in_its_direction() -> None:
    wide = AUTOSCALING | {"behavior": {"scaleUp": {"tolerance": "0.5"}}}
    assert decide(make_facts(40, 0, autoscaling=wide)) == (1, DecisionReason.WITHIN_TOLERANCE)
    assert decide(make_facts(50, 0, autoscaling=wide)) == (2, DecisionReason.SCALES_UP)


def test_steps_that_are_used_up_hold_until_their_period_is_over() -> None:
    limited = {"type": "ScalingLimited", "status": "True", "reason": "ScaleUpLimit", "message": "faster"}
    status = {"conditions": [limited], "desiredReplicas": 1, "lastScaleTime": "2026-11-23T00:59:15Z"}
    facts = make_facts(200, 0, desired=1, hpa={"status": status})
    assert decide(facts) == (1, DecisionReason.LIMITED)
    assert "last decided on" not in describe(facts)
    assert "allows 2 pods within 60 s, and the last change was 45 s ago" in describe(facts)
    later = replace(facts, now=datetime(2026, 11, 23, 1, 0, 16, tzinfo=UTC))
    assert decide(later) == (3, DecisionReason.LIMITED)
    assert "The HorizontalPodAutoscaler last decided on 1" in describe(later)


def test_a_direction_that_is_disabled_is_named() -> None:
    never = AUTOSCALING | {"behavior": {"scaleDown": {"selectPolicy": "Disabled", "stabilizationWindowSeconds": 0}}}
    facts = make_facts(0, 0, desired=2, autoscaling=never)
    assert decide(facts) == (2, DecisionReason.LIMITED)
    assert "behavior.scaleDown is disabled" in describe(facts)


def test_without_engines_it_says_whether_a_request_starts_one() -> None:
    sleeping = {"minReplicas": 0, "maxReplicas": 4}
    assert decide(make_facts(0, 0, desired=0, autoscaling=sleeping)) == (0, DecisionReason.SCALED_TO_ZERO)
    assert decide(make_facts(0, 0, desired=0)) == (0, DecisionReason.PAUSED)


def test_a_service_that_may_go_to_zero_is_explained_with_its_own_bounds_and_its_idle_timeout() -> None:
    """Its HorizontalPodAutoscaler has 1, which no user wrote."""
    sleepy = {"minReplicas": 0, "maxReplicas": 3, "idleTimeout": "7m"}
    facts = make_facts(0, 0, desired=1, autoscaling=sleepy)
    assert decide(facts) == (1, DecisionReason.AT_MINIMUM)
    assert build_text(explain(facts)).splitlines()[0].endswith("1 ready; between 0 and 3")
    assert "After 420 s without a request (autoscaling.idleTimeout) the operator scales to zero" in describe(facts)
    assert "minReplicas is 1" not in describe(facts)
    assert build_json(explain(facts))["bounds"] == {"minReplicas": 0, "maxReplicas": 3}
    asleep = make_facts(0, 0, desired=0, autoscaling=sleepy)
    assert "no request arrived for 420 s (autoscaling.idleTimeout)" in describe(asleep)
    assert build_text(explain(asleep)).splitlines()[0].endswith("between 0 and 3")


def test_whoever_else_sets_the_replicas_is_named() -> None:
    fixed = make_facts("404", "404", service=make_resource(replicas=2), autoscaler=None, desired=2)
    assert decide(fixed) == (2, DecisionReason.FIXED_REPLICAS)
    theirs = replace(fixed, others=("mine",))
    assert decide(theirs) == (2, DecisionReason.OTHER_AUTOSCALER)
    assert "HorizontalPodAutoscaler mine, which Conveyor did not create, sets" in describe(theirs)
    assert "mine, which Conveyor did not create, scales the same Deployment" in describe(
        make_facts(9, 0, others=("mine",))
    )


def test_what_is_not_there_yet_is_said() -> None:
    assert decide(make_facts("404", "404", autoscaler=None)) == (1, DecisionReason.NO_AUTOSCALER)
    assert decide(make_facts("404", "404", deployment=None)) == (0, DecisionReason.NO_AUTOSCALER)


def test_pods_that_are_not_ready_count_and_the_conditions_say_why() -> None:
    workload, scaling = (
        {"type": type, "status": "False", "reason": reason, "message": message, "lastTransitionTime": "t"}
        for type, reason, message in (
            ("WorkloadReady", "InsufficientGPU", "no node"),
            ("ScalingReady", "MetricsAPIOwnedByOther", "it belongs to another"),
        )
    )
    service = make_resource(status={"conditions": [workload, scaling]}, autoscaling=AUTOSCALING)
    text = describe(make_facts(95, 0, desired=3, service=service, deployment=make_deployment(3, ready_replicas=1)))
    assert "1 of 3 pods are ready (InsufficientGPU: no node). The arithmetic counts all 3." in text
    assert "ScalingReady is not True (MetricsAPIOwnedByOther: it belongs to another)." in text


def test_a_pod_that_cannot_be_made_does_not_count() -> None:
    """The controller counts the pods that exist: 60 is the target of 2 x 30, whatever number is requested."""
    found: Explanation = explain(make_facts(60, 0, desired=3, deployment=make_deployment(3, replicas=2)))
    assert found.metrics[0].ratio == 1


@pytest.mark.parametrize(
    ("desired", "ready", "starting", "requests", "message"),
    [
        (1, 0, 1, (40, 40), "40 requests wait; 1 starting engine has 40 places; 0 beyond them."),
        (1, 0, 1, (90, 90), "90 requests wait; 1 starting engine has 40 places; 50 beyond them. "
         "No engine is ready, so the metrics call for the 3 engines whose batches hold all requests."),
        (3, 1, 2, (141, 101), "101 requests wait; 2 starting engines have 80 places; 21 beyond them."),
        (3, 1, 1, (41, 1), "1 request waits; 1 starting engine has 40 places; 0 beyond them."),
        (3, 2, 2, None, "1 starting engine has 40 places; the metrics leave out the requests for them."),
    ],
)  # fmt: skip
def test_the_places_of_starting_engines_are_reported(
    desired: int, ready: int, starting: int, requests: tuple[int, int] | None, message: str
) -> None:
    facts = make_facts(30, 0, desired=desired, deployment=make_deployment(desired, ready_replicas=ready))
    status = facts.service.status.model_copy(update={"starting_replicas": starting})
    service = facts.service.model_copy(update={"status": status})
    found = explain(replace(facts, service=service, counts=requests and Counts(*requests)))
    assert message in " ".join(found.sentences)
    assert f"{desired} current, {ready} ready, {found.starting} starting" in build_text(found)
    assert build_json(found)["replicas"]["starting"] == min(starting, desired - ready)


def test_places_whose_time_is_over_are_not_reported() -> None:
    facts = make_facts(30, 0, desired=3, deployment=make_deployment(3, ready_replicas=1))
    over = (facts.now - timedelta(seconds=1)).isoformat()
    status = facts.service.status.model_copy(update={"starting_replicas": 2, "starting_until": over})
    assert explain(replace(facts, service=facts.service.model_copy(update={"status": status}))).starting == 0


def test_a_pod_that_fails_has_no_places() -> None:
    assert "places" not in describe(make_facts(30, 0, desired=3, deployment=make_deployment(3, ready_replicas=2)))


def test_requests_of_the_last_start_that_fill_a_batch_are_reported() -> None:
    text = "40 requests are queued or at engines. Those that arrived while no engine was ready are compared with"
    assert text in describe(make_facts(30, 0, counts=Counts(40, 0)))
    assert text not in describe(make_facts(40, 0, counts=Counts(40, 0)))
