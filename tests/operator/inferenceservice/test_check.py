"""Tests that a Job tries a new image and configuration before a rollout removes an engine for them."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator import kubelet
from tests.operator.builders import NOW, build_one, desire, ended, make_child, make_deployment, make_observed, make_pod
from tests.operator.inferenceservice.test_rollout import engines, make_claim
from tests.operator.kubelet import Json, Kubelet
from tests.operator.stage import Stage, wait_until

from conveyor_operator.inferenceservice import check
from conveyor_operator.inferenceservice.check import Check, judge_check
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.pods import PodState
from conveyor_operator.loop.child import Child

BAD = "example/engine:nope"
JOB = {"kind": "Job", "metadata": {"name": "qwen-check-1"}}
FULL = "0/1 nodes are available: 1 Insufficient cpu."
CACHE = {"uri": "hf://a/b", "cache": {"strategy": "PVC", "size": "1Gi"}}


def removing(**spec: Any) -> Json:
    """Return the Job of a rollout that is about to remove the only engine, because the cache is ReadWriteOnce."""
    observed = make_observed(deployment=make_deployment(1, template_hash="old"))
    (job,) = (child for child in desire(observed, model=CACHE, **spec).children if child["kind"] == "Job")
    return dict(job)


def test_the_job_has_the_engine_s_image_and_configuration_and_requests_no_device_and_no_claim() -> None:
    spec: Json = {
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}},
        "pod": {"nodeSelector": {"zone": "a"}, "imagePullSecrets": [{"name": "registry"}]},
    }
    pods = removing(**spec)["spec"]["template"]["spec"]
    engines_pods = build_one("Deployment", model=CACHE, **spec)["spec"]["template"]["spec"]
    (container,), (engine,) = pods["containers"], engines_pods["containers"]
    assert container["command"] == ["python", "-m", "conveyor_engine", "check", "--config", "/etc/conveyor/engine.yaml"]
    assert (container["image"], container["env"]) == (engine["image"], engine["env"])
    assert container["resources"]["limits"] == {"memory": "2Gi"}
    assert not [volume for volume in pods["volumes"] if "persistentVolumeClaim" in volume]
    assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pods["volumes"]}
    for key in ("nodeSelector", "tolerations", "imagePullSecrets", "securityContext", "automountServiceAccountToken"):
        assert pods[key] == engines_pods[key]
    assert container["securityContext"] == engine["securityContext"]


def test_only_a_rollout_that_is_about_to_remove_an_engine_has_the_job() -> None:
    def has_job(spec: Json, **state: Any) -> bool:
        observed = make_observed(deployment=make_deployment(1, **{"template_hash": "old", **state}))
        return any(child["kind"] == "Job" for child in desire(observed, **spec).children)

    cache = {"model": CACHE}
    assert has_job(cache)
    assert not has_job(cache, available_replicas=0), "nothing is left to remove"
    assert not has_job(cache | {"rollout": {"maxUnavailable": 1}}), "the spec says so"
    assert not has_job({}), "a new pod comes first"
    now = desire(make_observed(deployment=make_deployment(1)), **cache).template_hash
    assert not has_job(cache, template_hash=now), "it has begun, or no pod changes"


def judge(seconds: float, *pods: PodState, **job: Any) -> Check:
    child: Child = replace(make_child("Job", "qwen-check-1"), **job)
    observed: Observed = make_observed(child, check_pods=pods)
    return judge_check(JOB, observed, NOW + timedelta(seconds=seconds))


def test_a_job_that_gets_no_pod_or_no_node_does_not_stop_the_rollout() -> None:
    full = make_pod("qwen-check-1-x", unschedulable=FULL, unschedulable_at=NOW.isoformat())
    nowhere = replace(
        full, unschedulable="0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    )
    podless = {"without_pods_since": NOW.isoformat()}
    assert judge(0, done=True) == Check(ended=True)
    assert judge(29, full) == judge(29, **podless) == Check(look_again_at=NOW + timedelta(seconds=30))
    for found, why in ((judge(30, full), "found no node"), (judge(30, **podless), "got no pod")):
        assert found.ended
        assert found.skipped.endswith(f"Job qwen-check-1 {why}")
    assert judge(3600, nowhere) == Check(), "the engine would find no node either"
    assert judge(3600, replace(full, name="qwen-check-2-x")) == Check(), "it is another Job's"


def test_an_image_without_the_command_is_not_tried() -> None:
    last = "python -m conveyor_engine: argument COMMAND: invalid choice: 'check' (choose from serve, fetch, version)"
    old = make_pod("qwen-check-1-x", ended(last, code=2))
    assert judge(0, old).skipped.endswith("the image is of an earlier release")


def is_bad(pod: Json) -> bool:
    return bool(pod["spec"]["containers"][0]["image"] == BAD)


def try_image(pod: Json) -> Json:
    return kubelet.check_failed(pod) if is_bad(pod) else kubelet.checked(pod)


def uids(stage: Stage) -> list[str]:
    return [pod["metadata"]["uid"] for pod in engines(stage)]


def test_a_wrong_image_leaves_the_only_engine_where_only_one_node_may_mount_its_claim(stage: Stage) -> None:
    space = stage.space
    make_claim(stage, "ReadWriteOnce")
    with stage.operator(), Kubelet(space, kubelet.with_checks(kubelet.ready, try_image)):
        space.make_service(model={"uri": "pvc://models/demo"})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        old = uids(stage)
        space.edit("qwen", engine={"image": BAD})
        space.wait_condition("qwen", "Progressing", "False", "ImagePullFailed")
        ready = space.wait_condition("qwen", "Ready", "True", "ImagePullFailed")
        assert ready["message"].startswith("1 of 1 engines are ready; image ")
        assert "(pod qwen-check-" in ready["message"]
        stage.proxy.wait_quiet()
        assert uids(stage) == old
    with stage.operator(), Kubelet(space, kubelet.with_checks(kubelet.ready, try_image)):
        stage.proxy.wait_quiet()
        assert uids(stage) == old, "another operator waits for the Job too"
        space.edit("qwen", engine={"image": "example/engine:2"})
        condition = space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        wait_until("another engine", lambda: uids(stage) and uids(stage) != old, show=lambda: condition)
        wait_until("no Job is left", lambda: not space.list("Job"))
        assert space.condition("qwen", "Ready")["status"] == "True"


def test_a_wrong_image_leaves_the_only_engine_on_the_only_gpu(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conveyor_operator.inferenceservice.rollout.PATIENCE", timedelta(seconds=2))
    space = stage.space

    def one_gpu(pod: Json) -> Json:
        first = min(engines(stage), key=lambda each: each["metadata"]["creationTimestamp"])
        if first["metadata"]["uid"] == pod["metadata"]["uid"]:
            return kubelet.ready(pod)
        waits = kubelet.unschedulable(pod)
        waits["conditions"][0]["lastTransitionTime"] = pod["metadata"]["creationTimestamp"]
        return waits

    with stage.operator(), Kubelet(space, kubelet.with_checks(one_gpu, try_image)):
        space.make_service(model={"uri": "hf://org/model"})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        (old,) = uids(stage)
        space.edit("qwen", engine={"image": BAD})
        space.wait_condition("qwen", "Progressing", "False", "ImagePullFailed")
        stage.proxy.wait_quiet()
        assert old in uids(stage)
        assert space.condition("qwen", "Ready")["status"] == "True"
        space.edit("qwen", engine={"image": "example/engine:2"})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        wait_until("another engine", lambda: old not in uids(stage))
        wait_until("no Job is left", lambda: not space.list("Job"))


def test_a_namespace_without_room_for_the_job_rolls_out_as_before(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "PATIENCE", timedelta(seconds=2))
    space = stage.space
    make_claim(stage, "ReadWriteOnce")
    with stage.operator(), Kubelet(space, kubelet.ready):
        space.make_service(model={"uri": "pvc://models/demo"})
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        old = uids(stage)
        space.create("ResourceQuota", {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "1"}}})
        wait_until("it counts", lambda: "status" in space.need("ResourceQuota", "full"))
        space.edit("qwen", drain={"timeout": "7s"})
        wait_until("another engine", lambda: uids(stage) and old[0] not in uids(stage))
        space.wait_condition("qwen", "Progressing", "False", "UpToDate")
