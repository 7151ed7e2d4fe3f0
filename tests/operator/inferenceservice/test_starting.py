"""Tests which pods are expected to be ready soon, so that requests are left to them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.process import GatewayProcess
from tests.operator.kubelet import (
    Kubelet,
    crashed,
    fetch_failed,
    image_pull_failed,
    oom_killed,
    prewarming,
    ready,
    running,
    unschedulable,
)
from tests.operator.stage import Stage, wait_until

from conveyor_operator.inferenceservice import starts
from conveyor_operator.inferenceservice.pods import PodState, observe_pod
from conveyor_operator.inferenceservice.starting import count_starting, describe_places, find_lapse, find_next_end

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


@pytest.mark.parametrize(
    ("status", "seconds", "lapse", "next_look"),
    [
        ({}, 1, 1, 1),
        (running({}, ready=False), 1, 1, 0.5),
        (running({}, ready=False), PERIOD_SECONDS * 0.49, 1, 0.5),
        (running({}, ready=False), PERIOD_SECONDS * 0.5, 2, 1.5),
        (running({}, ready=False), PERIOD_SECONDS * 10.7, 12, 11.5),
    ],
)
def test_the_count_lapses_within_one_and_a_half_periods_unless_it_is_extended(
    status: dict[str, object], seconds: float, lapse: float, next_look: float
) -> None:
    """While the operator is down, nobody sees that a pod has failed. lapse and next_look: in periods."""
    pods, now = [observe(status)], CREATED + timedelta(seconds=seconds)
    assert find_lapse(pods, PERIOD_SECONDS, now) == CREATED + timedelta(seconds=PERIOD_SECONDS * lapse)
    assert find_next_end(pods, PERIOD_SECONDS, now) == CREATED + timedelta(seconds=PERIOD_SECONDS * next_look)


def test_pods_that_do_not_start_have_no_lapse() -> None:
    pods = [observe(ready({})), observe(crashed({}, 1, "Traceback"))]
    assert find_lapse(pods, PERIOD_SECONDS, CREATED) is None


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


def test_pods_that_fail_while_the_operator_is_down_lose_their_places(
    stage: Stage, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "UNKNOWN_START_SECONDS", 0)
    monkeypatch.setattr(starts, "_STEP_SECONDS", 4)
    space, key = stage.space, f"{stage.space.namespace}/qwen"

    def status() -> dict[str, Any]:
        return dict(space.need("InferenceService", "qwen")["status"])

    def count_places(gateway: GatewayProcess) -> int:
        return int((gateway.demand(key) or {}).get("replicas", {}).get("starting", 0))

    with (
        GatewayProcess(kubeconfig, "--watch-namespaces", space.namespace) as gateway,
        Kubelet(space, lambda pod: running(pod, ready=False), addresses=False) as kubelet,
    ):
        with stage.operator():
            space.make_service(replicas=2, queue={"timeout": "1s"})
            wait_until("two starting engines", lambda: count_places(gateway) == 2)
            first = status()["startingUntil"]
            wait_until("a later time", lambda: status()["startingUntil"] > first)
            assert count_places(gateway) == 2
        kubelet.decide = lambda pod: crashed(pod, 1, "Traceback")
        wait_until("no places", lambda: count_places(gateway) == 0, 40)
        assert status()["startingReplicas"] == 2
