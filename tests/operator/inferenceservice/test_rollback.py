"""Tests that a rollout that removed the old engines and fails for good restores them, once for each spec."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator import kubelet
from tests.operator.builders import FORMER, NEWEST, NOW, ROLLING_OUT, ended, make_deployment, make_observed, make_pod
from tests.operator.kubelet import Kubelet
from tests.operator.stage import Stage, wait_until

from conveyor_operator.inferenceservice import rollback
from conveyor_operator.inferenceservice.observed import DeploymentState, Observed, observe_deployment
from conveyor_operator.inferenceservice.pods import ContainerState, PodState
from conveyor_operator.inferenceservice.rollback import Verdict, judge_rollout

Json = dict[str, Any]
BAD = "example/engine:nope"
FULL = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
NO_NODE = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
NO_IMAGE = ContainerState("fetch", initial=True, waiting_reason="ErrImagePull")


def fallen(*pods: PodState, refused_since: float | None = None, **changes: Any) -> Observed:
    """Return a service whose only old engine was removed for these new pods, which were created at NOW."""
    state: Json = {
        "template_hash": "new", "available_replicas": 0, "ready_replicas": 0, "revision": 2, "conditions": ROLLING_OUT,
    }  # fmt: skip
    newest = NEWEST
    if refused_since is not None:
        newest = replace(NEWEST, refused="exceeded quota: gpus", refused_since=NOW.isoformat())
    former = replace(FORMER, name="qwen-engine-aaaaaaaa", template_hash="old")
    deployment = make_deployment(1, **state | changes)
    return make_observed(deployment=deployment, pods=pods, replica_sets=(former, newest))


def new_pod(*containers: ContainerState, **changes: Any) -> PodState:
    return make_pod("new", *containers, created_at=NOW.isoformat(), **changes)


def judge(observed: Observed, seconds: float, proven: str = "old") -> Verdict:
    return judge_rollout(observed, "new", "attempt", proven, NOW + timedelta(seconds=seconds))


def unschedulable(message: str) -> PodState:
    return new_pod(unschedulable=message, unschedulable_at=NOW.isoformat())


@pytest.mark.parametrize(
    ("pod", "reason", "patience_seconds"),
    [
        (new_pod(NO_IMAGE), "ImagePullFailed", 60),
        (new_pod(ended('{"reason": "InvalidConfig", "message": "no"}')), "InvalidConfig", 60),
        (new_pod(ended('{"reason": "ModelNotFound", "message": "no"}', name="fetch")), "ModelNotFound", 60),
        (unschedulable(NO_NODE), "Unschedulable", 60),
        (unschedulable(FULL), "InsufficientGPU", 300),
    ],
)
def test_a_failure_that_lasts_restores_the_former_pods(pod: PodState, reason: str, patience_seconds: int) -> None:
    observed = fallen(pod)
    waits = judge(observed, patience_seconds - 1)
    assert waits == Verdict(look_again_at=NOW + timedelta(seconds=patience_seconds))
    found = judge(observed, patience_seconds)
    assert found.cause is not None
    assert (found.cause.reason, found.replica_set) == (reason, "qwen-engine-aaaaaaaa")
    assert found.cause.message.endswith("(pod new)")


def test_a_container_that_crashes_is_restarted_twice() -> None:
    for reason in ("CrashLoop", "OOMKilled"):
        for restarts, fails in ((0, False), (1, False), (2, True)):
            found = judge(fallen(new_pod(ended("boom", reason=reason, restarts=restarts))), 1)
            assert (found.cause is not None) is fails


def test_what_may_still_succeed_or_has_lost_nothing_is_left_alone() -> None:
    bad = new_pod(NO_IMAGE)
    assert judge(fallen(new_pod(ContainerState("engine", running=True))), 3600) == Verdict(), "it loads"
    assert judge(fallen(bad, available_replicas=1), 3600) == Verdict(), "the old engine answers"
    assert judge(fallen(bad), 3600, proven="") == Verdict(), "no spec has ever worked"
    assert judge(fallen(bad), 3600, proven="new") == Verdict(), "this spec has worked, so the spec is not the cause"
    assert judge(fallen(bad, template_hash="other"), 3600) == Verdict(), "the Deployment is about to change"
    assert judge(replace(fallen(bad), replica_sets=(NEWEST,)), 3600) == Verdict(), "nothing is left to restore"
    leaving = make_pod("old", template_label=FORMER.pods_label, leaving=True)
    assert judge(fallen(unschedulable(FULL), leaving), 3600) == Verdict(), "its GPU is about to be free"


def test_a_quota_that_still_refuses_the_pod_counts_once_the_old_one_has_gone() -> None:
    found = judge(fallen(refused_since=0, replicas=0, updated_replicas=0), 300)
    assert found.cause is not None
    assert (found.cause.reason, found.cause.message) == ("PodsRefused", "exceeded quota: gpus")


@pytest.mark.parametrize("text", ["", "yes", "[]", "{}", '{"attempt": 1, "reason": "a", "message": "b"}'])
def test_an_annotation_that_somebody_wrote_is_no_rollback(text: str) -> None:
    assert observe_with(text).rolled_back is None


def observe_with(text: str) -> DeploymentState:
    annotations = {"conveyor.dev/rolled-back": text}
    template: Json = {"metadata": {}, "spec": {"containers": []}}
    return observe_deployment({"metadata": {"annotations": annotations}, "spec": {"template": template}})


def decide(pod: Json) -> Json:
    bad = pod["spec"]["containers"][0]["image"] == BAD
    return kubelet.image_pull_failed(pod) if bad else kubelet.ready(pod)


def images(stage: Stage) -> list[str]:
    return sorted(pod["spec"]["containers"][0]["image"] for pod in stage.space.list("Pod"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback, "_LASTING_PATIENCE", timedelta(seconds=3))


def test_a_wrong_image_brings_the_removed_engine_back_and_a_right_one_goes_forward(
    stage: Stage, impatient: None
) -> None:
    space = stage.space
    with stage.operator(), Kubelet(space, decide):
        space.make_service(model={"uri": "hf://org/model"}, rollout={"maxUnavailable": 1})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        (config,) = space.config_maps()
        space.edit("qwen", engine={"image": BAD}, batching={"maxBatchSize": 8})
        condition = space.wait_condition("qwen", "Progressing", "False", "RolledBack")
        assert condition["message"].startswith(
            "ImagePullFailed: image example/engine:1 cannot be pulled (pod qwen-engine-"
        )
        space.wait_condition("qwen", "Ready", "True", "Ready")
        assert images(stage) == ["example/engine:1"]
        assert config in space.config_maps()
        condition = [event for event in space.list("Event") if event["reason"] == "RolledBack"]
        assert [event["type"] for event in condition] == ["Warning"]
    with stage.operator(), Kubelet(space, decide):
        stage.proxy.wait_quiet()
        deployment = space.need("Deployment", "qwen-engine")
        assert images(stage) == ["example/engine:1"], "the next operator does not try again"
        space.edit("qwen", replicas=2)
        wait_until("it scales", lambda: images(stage) == ["example/engine:1"] * 2, show=lambda: images(stage))
        space.wait_condition("qwen", "WorkloadReady", "True", "ReplicasReady")
        assert space.condition("qwen", "Progressing")["reason"] == "RolledBack", "the same pods would fail again"
        space.edit("qwen", replicas=1, engine={"image": "example/engine:2"})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        wait_until("the right image", lambda: images(stage) == ["example/engine:2"], show=lambda: images(stage))
        annotations = space.need("Deployment", "qwen-engine")["metadata"]["annotations"]
    assert "conveyor.dev/rolled-back" in deployment["metadata"]["annotations"]
    assert "conveyor.dev/rolled-back" not in annotations


def test_a_rollback_ends_with_the_former_spec_and_another_try_with_another_annotation(
    stage: Stage, impatient: None
) -> None:
    space = stage.space
    with stage.operator(), Kubelet(space, decide) as node:
        space.make_service(model={"uri": "hf://org/model"}, rollout={"maxUnavailable": 1})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        space.edit("qwen", engine={"image": BAD})
        space.wait_condition("qwen", "Progressing", "False", "RolledBack")
        (old,) = wait_until("the old engine", lambda: images(stage) == ["example/engine:1"] and space.list("Pod"))
        space.edit("qwen", engine={"image": None})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        assert [pod["metadata"]["uid"] for pod in space.list("Pod")] == [old["metadata"]["uid"]], "it runs this spec"
        space.edit("qwen", engine={"image": BAD})
        space.wait_condition("qwen", "Progressing", "False", "RolledBack")
        node.decide = kubelet.ready  # somebody has pushed the image
        space.edit("qwen", pod={"annotations": {"example.com/attempt": "2"}})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        wait_until("the new image", lambda: images(stage) == [BAD], show=lambda: images(stage))


def test_a_second_mistake_before_the_first_is_judged_restores_the_engine_from_before_both(
    stage: Stage, impatient: None
) -> None:
    space = stage.space

    def decide_both(pod: Json) -> Json:
        image = pod["spec"]["containers"][0]["image"]
        return kubelet.image_pull_failed(pod) if image.startswith(BAD) else kubelet.ready(pod)

    with stage.operator(), Kubelet(space, decide_both):
        space.make_service(model={"uri": "hf://org/model"}, rollout={"maxUnavailable": 1})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        space.edit("qwen", engine={"image": BAD})
        wait_until("the first mistake's pod", lambda: images(stage) == [BAD], show=lambda: images(stage))
        space.edit("qwen", engine={"image": f"{BAD}-too"})
        space.wait_condition("qwen", "Progressing", "False", "RolledBack")
        wait_until("the old engine", lambda: images(stage) == ["example/engine:1"], show=lambda: images(stage))
        space.wait_condition("qwen", "Ready", "True", "Ready")


def test_the_failed_pod_gives_the_only_gpu_back(stage: Stage, impatient: None) -> None:
    """It holds its GPU while its image cannot be pulled, so a surge would wait for it for ever."""
    space = stage.space

    def one_gpu(pod: Json) -> Json:
        there = space.list("Pod", "conveyor.dev/inference-service=qwen")
        holder = min(there, key=lambda each: each["metadata"]["creationTimestamp"])
        return decide(pod) if holder["metadata"]["uid"] == pod["metadata"]["uid"] else kubelet.unschedulable(pod)

    with stage.operator(), Kubelet(space, kubelet.with_checks(one_gpu)):
        space.make_service(model={"uri": "hf://org/model"})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        space.edit("qwen", engine={"image": BAD})
        space.wait_condition("qwen", "Progressing", "False", "RolledBack")
        space.wait_condition("qwen", "WorkloadReady", "True", "ReplicasReady")
        wait_until("the old image", lambda: images(stage) == ["example/engine:1"], show=lambda: images(stage))
