"""A failure that has passed is not told: for each reason that comes from pods or ReplicaSets its cause, its mend, and
the first status after it, on a real API server.

The mends are edits that leave the engine's configuration as it is, and the failed pods stay while their successors
start: a rollout takes no pod away before another one is ready.
"""

from collections.abc import Callable
from functools import partial

import pytest
from tests.operator import kubelet
from tests.operator.kubelet import Kubelet
from tests.operator.stage import Json, Stage, wait_until

from conveyor_api.conditions import MODEL_FAILURES, POD_FAILURES, Reason

ENGINE_REPORTS = ("InvalidConfig", "NoDevice", "KVBudgetTooLarge", "KVBudgetTooSmall", "OutOfMemory", "EngineError")
NO_CLAIM = '0/1 nodes are available: persistentvolumeclaim "models" not found.'
CAUSES: dict[str, Callable[[Json], Json]] = {
    "OOMKilled": kubelet.oom_killed,
    "ImagePullFailed": kubelet.image_pull_failed,
    "InsufficientGPU": kubelet.unschedulable,
    "Unschedulable": partial(kubelet.unschedulable, message="0/3 nodes are available: 3 Insufficient memory."),
    "ClaimNotFound": partial(kubelet.unschedulable, message=NO_CLAIM),
    "ContainerConfigInvalid": partial(kubelet.cannot_start, container="fetch", message='configmap "x" not found'),
    "CrashLoop": partial(kubelet.crashed, code=3, last_lines="boom"),
    **{reason: partial(kubelet.fetch_failed, reason=reason, message="no") for reason in sorted(MODEL_FAILURES)},
    **{reason: partial(kubelet.engine_failed, reason=reason, message="no") for reason in ENGINE_REPORTS},
}
BY_OTHER_TESTS = {
    Reason.CHILD_REFUSED, Reason.CHILD_NOT_OWNED,  # test_refused_children, test_not_adopted
    Reason.PODS_REFUSED, Reason.PROGRESS_DEADLINE_EXCEEDED,  # below
    Reason.CONTESTED,  # test_contested
    Reason.NODE_LOST,  # test_conditions: the kubelet that plays here cannot be lost
}  # fmt: skip
QUICK = ("OOMKilled", "ImagePullFailed")


def test_every_failure_of_a_pod_has_its_fix_here() -> None:
    assert CAUSES.keys() | BY_OTHER_TESTS == set(POD_FAILURES)


@pytest.mark.parametrize(
    "reason", [pytest.param(reason, marks=() if reason in QUICK else pytest.mark.slow) for reason in CAUSES]
)
def test_a_failure_is_gone_from_the_first_status_after_its_fix(stage: Stage, reason: str) -> None:
    with stage.operator(), Kubelet(stage.space, CAUSES[reason]) as node:
        stage.space.make_service(model={"uri": "hf://org/model"})  # from a volume two pods at a time might not mount
        stage.space.wait_condition("qwen", "Ready", "False", reason)
        node.decide = lambda pod: None if is_fixed(pod) else CAUSES[reason](pod)
        edit(stage)
        stage.space.wait_observed("qwen")
        assert reason not in reasons(stage)
        wait_until("old and new pods are there", lambda: len(stage.space.list("Pod")) == 2, timeout=30)
        stage.proxy.wait_quiet()
        assert reason not in reasons(stage), "the pod of the former template is still there"
        node.decide = lambda pod: kubelet.ready(pod) if is_fixed(pod) else CAUSES[reason](pod)
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        assert reason not in reasons(stage)


def test_the_refusal_of_a_former_replica_set_is_not_reported(stage: Stage) -> None:
    hard = {"limits.memory": "10Gi", "requests.nvidia.com/gpu": "0"}
    stage.space.create("ResourceQuota", {"metadata": {"name": "gpus"}, "spec": {"hard": hard}})
    wait_until("it counts", lambda: "status" in stage.space.need("ResourceQuota", "gpus"))
    gpu = {"nvidia.com/gpu": "1"}
    with stage.operator():
        stage.space.make_service(resources={"limits": gpu})
        refusal = stage.space.wait_condition("qwen", "Ready", "False", "PodsRefused")["message"]
        assert "must specify limits.memory" in refusal
        stage.space.edit("qwen", resources={"limits": gpu | {"memory": "1Gi"}})
        stage.space.wait_observed("qwen")
        assert "limits.memory" not in stage.space.condition("qwen", "Ready")["message"]
        wait_until(
            "its own refusal", lambda: "exceeded quota: gpus" in message_of(stage), show=lambda: message_of(stage)
        )
        stage.space.edit("qwen", resources={"limits": {"nvidia.com/gpu": None}})
        stage.space.wait_observed("qwen")
        assert "PodsRefused" not in reasons(stage)
        wait_until("a pod", lambda: stage.space.list("Pod"))
        stage.proxy.wait_quiet()
        assert "PodsRefused" not in reasons(stage)


def test_a_deadline_that_a_former_template_exceeded_is_not_reported(stage: Stage) -> None:
    """The deadline would take two hours, so the test writes its condition as the Deployment's controller would."""
    exceeded = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out"}
    with stage.operator(), Kubelet(stage.space, lambda pod: None):
        stage.space.make_service()
        wait_until("a pod", lambda: stage.space.list("Pod"))
        stage.proxy.wait_quiet()
        deployment = stage.space.need("Deployment", "qwen-engine")
        others = [c for c in deployment["status"]["conditions"] if c["type"] != "Progressing"]
        stage.space.patch("Deployment", "qwen-engine", {"status": {"conditions": [exceeded, *others]}}, "status")
        stage.space.wait_condition("qwen", "Ready", "False", "ProgressDeadlineExceeded")
        edit(stage)
        stage.space.wait_observed("qwen")
        assert "ProgressDeadlineExceeded" not in reasons(stage)
        stage.proxy.wait_quiet()
        assert "ProgressDeadlineExceeded" not in reasons(stage)


def edit(stage: Stage) -> None:
    stage.space.edit("qwen", pod={"annotations": {"mended": "yes"}})


def is_fixed(pod: Json) -> bool:
    return "mended" in pod["metadata"]["annotations"]


def reasons(stage: Stage) -> set[str]:
    return {condition["reason"] for condition in stage.space.need("InferenceService", "qwen")["status"]["conditions"]}


def message_of(stage: Stage) -> str:
    return str(stage.space.condition("qwen", "Ready").get("message", ""))
