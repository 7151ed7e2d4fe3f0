"""Tests that a rollout first adds a pod if there is room for it, and otherwise first removes one."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator import kubelet
from tests.operator.builders import NEWEST, NOW, make_deployment, make_observed, make_pod, make_resource
from tests.operator.kubelet import Kubelet
from tests.operator.stage import Stage, wait_until

from conveyor_operator.inferenceservice import rollout
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.rollout import PATIENCE, Rollout, plan_rollout

ONE_MORE, ONE_LESS = Rollout(1, 0), Rollout(0, 1)
Json = dict[str, Any]


def plan(observed: Observed = Observed(), access_mode: str | None = None, **spec: Any) -> Rollout:  # noqa: B008
    return plan_rollout(make_resource(**spec).spec, access_mode, observed, NOW)


def rolling(waited_seconds: float | None = None, **changes: Any) -> Observed:
    """Return an old pod, and a new one that has found no node for this long."""
    state = {"replicas": 2, "updated_replicas": 1, "max_surge": 1, **changes}
    since = (NOW - timedelta(seconds=waited_seconds)).isoformat() if waited_seconds is not None else ""
    new = make_pod("new", unschedulable="no GPU" if since else "", unschedulable_at=since)
    return make_observed(deployment=make_deployment(1, **state), pods=(make_pod("old"), new))


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ({"maxSurge": "25%", "maxUnavailable": 0}, Rollout("25%", 0)),
        ({"maxSurge": 2}, Rollout(2, 1)),
        ({"maxUnavailable": 3}, Rollout(0, 3)),
    ],
)
def test_what_the_spec_says_holds(spec: Json, asked: Rollout) -> None:
    for observed in (Observed(), rolling(3600)):
        assert plan(observed, rollout=spec) == asked


def test_a_rollout_that_is_left_open_brings_one_more() -> None:
    at_rest = make_observed(deployment=make_deployment(1, max_surge=1))
    for observed in (Observed(), at_rest, rolling()):
        assert plan(observed) == ONE_MORE


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"uri": "pvc://models/demo"}},
        {"adapters": [{"name": "sql", "uri": "pvc://models/sql"}]},
        {"model": {"uri": "hf://a/b", "cache": {"strategy": "PVC", "claimName": "theirs"}}},
        {"pod": {"volumes": [{"name": "more", "persistentVolumeClaim": {"claimName": "theirs"}}]}},
    ],
)
def test_pods_that_might_not_mount_a_volume_beside_others_make_room(spec: Json) -> None:
    assert plan(**spec) == ONE_LESS


def test_the_claim_that_conveyor_makes_says_whether_two_may_have_it() -> None:
    cache = {"model": {"uri": "hf://a/b", "cache": {"strategy": "PVC", "size": "1Gi"}}}
    assert plan(access_mode="ReadWriteOnce", **cache) == ONE_LESS
    assert plan(access_mode="ReadWriteMany", **cache) == ONE_MORE


def test_a_pod_that_finds_no_node_is_waited_for_a_while() -> None:
    assert plan(rolling(10)) == Rollout(1, 0, NOW + timedelta(seconds=20))
    assert plan(rolling(PATIENCE.total_seconds())) == ONE_LESS


def test_a_pod_that_has_no_quota_is_not_waited_for() -> None:
    deployment = make_deployment(1, updated_replicas=0, max_surge=1)

    def refused(message: str) -> Observed:
        return make_observed(deployment=deployment, replica_sets=(replace(NEWEST, refused=message),))

    assert plan(refused('pods "new" is forbidden: exceeded quota: gpus')) == ONE_LESS
    assert plan(refused("violates PodSecurity")) == ONE_MORE, "it would be refused in the old one's place as well"


def test_without_old_pods_there_is_nobody_to_make_room() -> None:
    assert plan(rolling(3600, updated_replicas=2)) == ONE_MORE, "it scales"


def test_a_rollout_that_goes_without_keeps_to_it_until_it_is_over() -> None:
    assert plan(rolling(max_surge=0)) == ONE_LESS, "the new pod has found its node"
    over = make_observed(deployment=make_deployment(1, max_surge=0))
    assert plan(over) == ONE_MORE


def replicas(stage: Stage) -> tuple[int, int]:
    """Return the numbers of all pods and of pods with the current spec."""
    status = stage.space.need("Deployment", "qwen-engine").get("status") or {}
    return status.get("replicas", 0), status.get("updatedReplicas", 0)


def test_a_lone_replica_on_the_only_gpu_makes_room_for_its_successor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "PATIENCE", timedelta(seconds=2))

    def one_gpu(pod: Json) -> Json:
        pods = sorted(stage.space.list("Pod"), key=lambda each: each["metadata"]["creationTimestamp"])
        has_it = pods[0]["metadata"]["uid"] == pod["metadata"]["uid"]
        if has_it:
            return kubelet.ready(pod)
        waits = kubelet.unschedulable(pod)
        waits["conditions"][0]["lastTransitionTime"] = pod["metadata"]["creationTimestamp"]
        return waits

    with stage.operator(), Kubelet(stage.space, one_gpu):
        stage.space.make_service(model={"uri": "hf://org/model"})
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        (old,) = stage.space.list("Pod")
        stage.space.edit("qwen", drain={"timeout": "7s"})
        wait_until("a second pod waits", lambda: replicas(stage) == (2, 1))
        assert stage.space.condition("qwen", "Ready")["status"] == "True", "the old one answers"

        def rolled() -> bool:
            pods = stage.space.list("Pod")
            return len(pods) == 1 and pods[0]["metadata"]["uid"] != old["metadata"]["uid"]

        wait_until("the old one made room", rolled, show=lambda: replicas(stage))
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        effective = stage.space.need("InferenceService", "qwen")["status"]["effective"]
        assert (effective["maxSurge"], effective["maxUnavailable"]) == (1, 0), "the next one tries again"
        told = [event["reason"] for event in stage.space.list("Event")]
        assert told.count("InsufficientGPU") <= 1, "between the end of the old one and the place of the new one"
