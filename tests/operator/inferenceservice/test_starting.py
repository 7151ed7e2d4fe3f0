"""Tests which pods are expected to be ready soon, so that requests are left to them."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.operator.kubelet import (
    crashed,
    fetch_failed,
    image_pull_failed,
    oom_killed,
    prewarming,
    ready,
    running,
    unschedulable,
)

from conveyor_operator.inferenceservice.pods import PodState, observe_pod
from conveyor_operator.inferenceservice.starting import count_starting, describe_places, find_next_end

CREATED = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)
PERIOD_SECONDS = 420


def observe(status: dict[str, object], **metadata: object) -> PodState:
    named = {"name": "qwen-engine-a", "creationTimestamp": "2026-11-21T08:00:00Z"}
    return observe_pod({"metadata": named | metadata, "spec": {}, "status": status})


def count(pod: PodState, seconds: float) -> int:
    return count_starting([pod], 0, PERIOD_SECONDS, CREATED + timedelta(seconds=seconds))


@pytest.mark.parametrize("seconds", [1, 86_400])
@pytest.mark.parametrize("status", [running({}, ready=False), prewarming({}) | {"conditions": []}])
def test_a_pod_starts_while_a_container_runs(status: dict[str, object], seconds: float) -> None:
    assert count(observe(status), seconds) == 1


@pytest.mark.parametrize("status", [{}, {"phase": "Pending"}, unschedulable({})])
def test_a_pod_that_runs_nothing_starts_until_starts_are_late(status: dict[str, object]) -> None:
    """It may wait for a node or for its image. With a volume that cannot be mounted it waits for ever."""
    pod = observe(status)
    assert (count(pod, PERIOD_SECONDS - 1), count(pod, PERIOD_SECONDS)) == (1, 0)
    end = CREATED + timedelta(seconds=PERIOD_SECONDS)
    assert find_next_end([pod], PERIOD_SECONDS, CREATED) == end
    assert find_next_end([pod], PERIOD_SECONDS, end) is None


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Failed"},
        crashed({}, 1, "Traceback"),
        oom_killed({}),
        fetch_failed({}, "ModelNotFound", "there is no model"),
        image_pull_failed({}),
        unschedulable({}, 'persistentvolumeclaim "models" not found'),
    ],
)
def test_a_pod_that_fails_does_not_start(status: dict[str, object]) -> None:
    assert count(observe(status), 1) == 0
    assert find_next_end([observe(status)], PERIOD_SECONDS, CREATED) is None


def test_a_pod_that_became_ready_counts_until_the_deployment_has_it() -> None:
    """The Deployment's status follows the EndpointSlice, so the gateways see the engine before its places are gone."""
    pods, now = [observe(ready({})), observe(running({}, ready=False))], CREATED
    assert [count_starting(pods, number, PERIOD_SECONDS, now) for number in (0, 1, 2, 3)] == [2, 1, 0, 0]
    assert find_next_end([observe(ready({}))], PERIOD_SECONDS, now) is None


def test_a_pod_that_is_deleted_does_not_start() -> None:
    assert count(observe({}, deletionTimestamp="2026-11-21T08:00:05Z"), 1) == 0


def test_places_are_reported_in_words() -> None:
    assert describe_places(1, 4) == "1 starting engine has 4 places"
    assert describe_places(3, 4) == "3 starting engines have 12 places"
    assert describe_places(1, 1) == "1 starting engine has 1 place"
