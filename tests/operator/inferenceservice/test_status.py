"""Tests the whole status: times, which changes are written, the last failure, and a spec that cannot be read."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tests.operator.builders import ended, make_deployment, make_observed, make_pod, make_resource

from conveyor_api.status import EffectiveStatus, InferenceServiceStatus
from conveyor_api.text import MAX_MESSAGE_BYTES
from conveyor_operator.inferenceservice.pods import PodState
from conveyor_operator.inferenceservice.situation import Situation
from conveyor_operator.inferenceservice.starts import PodStart
from conveyor_operator.inferenceservice.status import Written, build_invalid_status, build_status
from conveyor_operator.loop.report import is_same
from conveyor_protocol.pages import AdapterCounts

EARLY = datetime(2026, 11, 21, 8, 0, 0, tzinfo=UTC)
LATE = datetime(2026, 11, 21, 9, 30, 0, tzinfo=UTC)
WRITTEN = Written("http://gateway/default/qwen/v1", EffectiveStatus(image="example/engine:1", max_batch_size=32))


def status_of(
    *pods: PodState, previous: dict[str, Any] | None = None, now: datetime = EARLY, desired: int = 1, **deployment: Any
) -> dict[str, Any]:
    observed = make_observed(deployment=make_deployment(desired, **deployment), pods=pods, ready_endpoints=1)
    service = make_resource(generation=7)
    return build_status(service, Situation(service.spec, observed), WRITTEN, previous or {}, now)


def test_of_many_adapters_the_failed_ones_are_listed_first() -> None:
    adapters = [{"name": f"a{number}", "uri": f"pvc://team/a{number}"} for number in range(1000)]
    service = make_resource(adapters=adapters)
    observed = make_observed(deployment=make_deployment(1, ready_replicas=1), ready_endpoints=1)
    counts = {
        f"a{number}": {f"/adapters/claims/team/a{number}": AdapterCounts(ready=1, serving=1)} for number in range(990)
    }
    counts["a998"] = {"/adapters/claims/team/a998": AdapterCounts(failed=1, message="broken")}
    status = build_status(service, Situation(service.spec, observed), replace(WRITTEN, adapters=counts), {}, EARLY)
    assert status["readyAdapters"] == 990
    listed = [each["name"] for each in status["adapters"]]
    assert listed == [f"a{number}" for number in (*range(90), *range(990, 1000))]
    assert status["adapters"][-2]["message"] == "broken"
    assert "readyAdapters" not in status_of()


def condition(status: dict[str, Any], type: str) -> dict[str, Any]:
    return next(c for c in status["conditions"] if c["type"] == type)


def test_the_status_says_what_there_is() -> None:
    status = status_of(desired=3, ready_replicas=2)
    assert status["observedGeneration"] == 7
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"], status["desiredReplicas"]) == (
        3,
        2,
        3,
        3,
    )
    assert status["selector"] == "conveyor.dev/inference-service=qwen"
    assert status["url"] == "http://gateway/default/qwen/v1"
    assert status["effective"] == {"image": "example/engine:1", "maxBatchSize": 32}
    assert status["model"] == {"name": "qwen", "uri": "hf://example/model"}
    assert {c["observedGeneration"] for c in status["conditions"]} == {7}


def test_it_is_what_the_api_declares() -> None:
    status = status_of(make_pod("pod", ended("boom")))
    assert InferenceServiceStatus.model_validate(status).to_manifest() == status


def test_the_same_state_later_is_no_news() -> None:
    first = status_of()
    assert is_same(status_of(previous=first, now=LATE), first)


def test_the_order_of_conditions_is_no_news_and_their_message_is() -> None:
    first = status_of()
    turned = first | {"conditions": first["conditions"][::-1]}
    assert is_same(first, turned)
    changed = first | {"conditions": [first["conditions"][0] | {"message": "other"}, *first["conditions"][1:]]}
    assert not is_same(changed, first)


def test_a_transition_time_moves_only_with_the_status() -> None:
    first = status_of(desired=2, available_replicas=1)
    second = status_of(desired=2, available_replicas=2, previous=first, now=LATE)
    assert condition(second, "WorkloadReady")["lastTransitionTime"] == "2026-11-21T09:30:00Z"
    assert condition(second, "Ready")["lastTransitionTime"] == "2026-11-21T08:00:00Z"
    again = status_of(desired=2, available_replicas=0, previous=first, now=LATE)
    assert condition(again, "WorkloadReady")["lastTransitionTime"] == "2026-11-21T08:00:00Z"


def test_the_last_failure_stays_when_its_pod_is_gone() -> None:
    failed = status_of(make_pod("pod", ended("boom", code=3)))
    assert failed["lastFailure"] == {
        "reason": "CrashLoop",
        "message": "container engine ended with exit code 3: boom",
        "podName": "pod",
        "exitCode": 3,
        "time": "2026-11-21T08:00:00Z",
    }
    assert status_of(previous=failed, now=LATE)["lastFailure"] == failed["lastFailure"]


def test_a_later_failure_takes_its_place_and_an_earlier_one_does_not() -> None:
    first = status_of(make_pod("pod", ended("boom")))
    later = make_pod("late", ended("bang", ended_at="2026-11-21T08:30:00Z"))
    second = status_of(later, previous=first)
    assert second["lastFailure"]["podName"] == "late"
    assert status_of(make_pod("pod", ended("boom")), previous=second)["lastFailure"] == second["lastFailure"]


def test_a_failure_without_a_time_keeps_the_one_it_was_first_seen_at() -> None:
    pod = make_pod(unschedulable="3 Insufficient nvidia.com/gpu")
    first = status_of(pod)
    assert first["lastFailure"]["time"] == "2026-11-21T08:00:00Z"
    assert is_same(status_of(pod, previous=first, now=LATE), first)


def test_a_message_is_never_longer_than_the_api_allows() -> None:
    status = status_of(make_pod("pod", ended("x" * 10_000)), ready_replicas=0, available_replicas=0)
    assert len(status["lastFailure"]["message"]) <= MAX_MESSAGE_BYTES
    InferenceServiceStatus.model_validate(status)


def test_a_spec_that_cannot_be_read_leaves_the_rest_of_the_status_as_it_was() -> None:
    before = status_of()
    after = build_invalid_status("spec.batching.mode: unknown", 2, before, LATE)
    assert after["observedGeneration"] == 2
    assert condition(after, "Ready")["reason"] == "InvalidSpec"
    assert "spec.batching.mode: unknown" in condition(after, "Ready")["message"]
    assert condition(after, "EndpointReady") == condition(before, "EndpointReady")
    assert after["effective"] == before["effective"]
    assert {c["type"] for c in after["conditions"]} == {c["type"] for c in before["conditions"]} | {"Stalled"}
    waiting = build_invalid_status("wrong", 2, status_of(available_replicas=0, desired=1), LATE)
    assert "Reconciling" not in {c["type"] for c in waiting["conditions"]}


def test_the_last_start_is_reported_and_stays_until_the_next_one() -> None:
    start = PodStart("qwen-engine-1", "uid-1", {"total": 20, "model": 4, "load": 15})
    service = make_resource()
    situation, now = Situation(service.spec, make_observed()), LATE
    status = build_status(service, situation, replace(WRITTEN, last_start=start), {}, now)
    assert status["lastStart"] == {"podName": "qwen-engine-1", "total": "20s", "model": "4s", "load": "15s"}
    assert build_status(service, situation, WRITTEN, status, now)["lastStart"] == status["lastStart"]
    assert "lastStart" not in build_status(service, situation, WRITTEN, {}, now)
    whole = replace(WRITTEN, last_start=start.with_warm_up(6.0))
    split = {**status["lastStart"], "load": "9s", "warmUp": "6s"}
    assert build_status(service, situation, whole, status, now)["lastStart"] == split
