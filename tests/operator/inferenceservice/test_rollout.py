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
from conveyor_operator.inferenceservice.conditions import judge_all
from conveyor_operator.inferenceservice.observed import ClaimModes, Observed
from conveyor_operator.inferenceservice.rollout import PATIENCE, Rollout, plan_rollout
from conveyor_operator.inferenceservice.situation import Situation
from e2e.cluster.volumes import host_path_claim

ONE_MORE = Rollout(1, 0)
NO_ROOM = Rollout(0, 1, because="there is no room for one more pod")
FULL = "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't match Pod's node affinity/selector."
Json = dict[str, Any]


def plan(
    observed: Observed = Observed(),  # noqa: B008
    made: tuple[str, str] | None = None,
    modes: ClaimModes | None = None,
    **spec: Any,
) -> Rollout:
    return plan_rollout(make_resource(**spec).spec, made, modes, observed, NOW)


def lone(claim: str) -> Rollout:
    return Rollout(0, 1, because=f"claim {claim}")


def rolling(waited_seconds: float | None = None, message: str = FULL, **changes: Any) -> Observed:
    """Return an old pod, and a new one that has found no node for this long, as the scheduler says."""
    state = {"replicas": 2, "updated_replicas": 1, "max_surge": 1, **changes}
    since = (NOW - timedelta(seconds=waited_seconds)).isoformat() if waited_seconds is not None else ""
    new = make_pod("new", unschedulable=message if since else "", unschedulable_at=since)
    return make_observed(deployment=make_deployment(1, **state), pods=(make_pod("old"), new))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"maxSurge": "25%", "maxUnavailable": 0}, Rollout("25%", 0)),
        ({"maxSurge": 2}, Rollout(2, 1)),
        ({"maxUnavailable": 3}, Rollout(0, 3)),
    ],
)
def test_what_the_spec_says_holds(spec: Json, expected: Rollout) -> None:
    for observed in (Observed(), rolling(3600)):
        assert plan(observed, rollout=spec) == expected


def test_a_rollout_that_is_left_open_brings_one_more() -> None:
    at_rest = make_observed(deployment=make_deployment(1, max_surge=1))
    for observed in (Observed(), at_rest, rolling()):
        assert plan(observed) == ONE_MORE


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"uri": "pvc://theirs/demo"}},
        {"adapters": [{"name": "sql", "uri": "pvc://theirs/sql"}]},
        {"model": {"uri": "hf://a/b", "cache": {"strategy": "PVC", "claimName": "theirs"}}},
        {"pod": {"volumes": [{"name": "more", "persistentVolumeClaim": {"claimName": "theirs"}}]}},
    ],
)
def test_the_modes_of_a_bound_claim_say_whether_pods_of_two_nodes_may_have_it(spec: Json) -> None:
    for modes in (("ReadWriteMany",), ("ReadOnlyMany",), ("ReadWriteOnce", "ReadWriteMany")):
        assert plan(modes={"theirs": modes}, **spec) == ONE_MORE
    for mode in ("ReadWriteOnce", "ReadWriteOncePod"):
        assert plan(modes={"theirs": (mode,)}, **spec) == lone(f"theirs is {mode}")
    assert plan(modes={"theirs": ()}, **spec) == lone("theirs is not bound yet")
    assert plan(modes={}, **spec) == ONE_MORE, "no pod can mount a claim that does not exist"


def test_one_claim_of_several_is_enough_to_make_room() -> None:
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in ("shared", "lone")]
    modes = {"models": ("ReadOnlyMany",), "shared": ("ReadWriteMany",), "lone": ("ReadWriteOnce",)}
    found = plan(modes=modes, model={"uri": "pvc://models/demo"}, pod={"volumes": volumes})
    assert found == lone("lone is ReadWriteOnce")


def test_claims_that_were_not_read_change_nothing() -> None:
    """An operator that starts reads no claims of services whose pods do not change."""
    for surge in (0, 1):
        at_rest = make_observed(deployment=make_deployment(1, max_surge=surge))
        assert plan(at_rest, model={"uri": "pvc://models/demo"}).max_surge == surge


def test_the_claim_that_conveyor_makes_says_whether_two_may_have_it() -> None:
    cache = {"model": {"uri": "hf://a/b", "cache": {"strategy": "PVC", "size": "1Gi"}}}
    assert plan(made=("qwen-models", "ReadWriteOnce"), **cache) == lone("qwen-models is ReadWriteOnce")
    assert plan(made=("qwen-models", "ReadWriteMany"), **cache) == ONE_MORE


def test_a_pod_that_finds_no_node_is_waited_for_a_while() -> None:
    assert plan(rolling(10)) == Rollout(1, 0, NOW + timedelta(seconds=20))
    assert plan(rolling(PATIENCE.total_seconds())) == NO_ROOM


@pytest.mark.parametrize(
    "message",
    [
        "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. preemption: 0/2 nodes are "
        "available: 2 Preemption is not helpful for scheduling.",
        "0/2 nodes are available: 1 node(s) had untolerated taint {gpu: true}, 1 node(s) were unschedulable.",
        '0/2 nodes are available: persistentvolumeclaim "modles" not found.',
    ],
)
def test_no_old_pod_is_removed_for_one_that_would_not_fit_in_its_place(message: str) -> None:
    stuck = rolling(3600, message)
    assert plan(stuck) == ONE_MORE
    found = judge_all(Situation(make_resource().spec, stuck))
    assert {each.reason for each in found if each.type == "Progressing"} <= {"Unschedulable", "ClaimNotFound"}


def test_a_pod_that_has_no_quota_is_not_waited_for() -> None:
    deployment = make_deployment(1, updated_replicas=0, max_surge=1)

    def refused(message: str) -> Observed:
        return make_observed(deployment=deployment, replica_sets=(replace(NEWEST, refused=message),))

    assert plan(refused('pods "new" is forbidden: exceeded quota: gpus')) == NO_ROOM
    assert plan(refused("violates PodSecurity")) == ONE_MORE, "it would be refused in the old one's place as well"


def test_without_old_pods_there_is_nobody_to_make_room() -> None:
    assert plan(rolling(3600, updated_replicas=2)) == ONE_MORE, "it scales"


def test_a_rollout_that_goes_without_keeps_to_it_until_it_is_over() -> None:
    assert plan(rolling(max_surge=0)) == NO_ROOM, "the new pod has found its node"
    over = make_observed(deployment=make_deployment(1, max_surge=0))
    assert plan(over) == ONE_MORE


def engines(stage: Stage) -> list[Json]:
    return stage.space.list("Pod", "conveyor.dev/inference-service=qwen")


def replicas(stage: Stage) -> tuple[int, int]:
    """Return the numbers of all pods and of pods with the current spec."""
    status = stage.space.need("Deployment", "qwen-engine").get("status") or {}
    return status.get("replicas", 0), status.get("updatedReplicas", 0)


def test_a_lone_replica_on_the_only_gpu_makes_room_for_its_successor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "PATIENCE", timedelta(seconds=2))

    def one_gpu(pod: Json) -> Json:
        pods = sorted(engines(stage), key=lambda each: each["metadata"]["creationTimestamp"])
        has_it = pods[0]["metadata"]["uid"] == pod["metadata"]["uid"]
        if has_it:
            return kubelet.ready(pod)
        waits = kubelet.unschedulable(pod)
        waits["conditions"][0]["lastTransitionTime"] = pod["metadata"]["creationTimestamp"]
        return waits

    with stage.operator(), Kubelet(stage.space, kubelet.with_checks(one_gpu)):
        stage.space.make_service(model={"uri": "hf://org/model"})
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        (old,) = stage.space.list("Pod")
        stage.space.edit("qwen", drain={"timeout": "7s"})
        wait_until("a second pod waits", lambda: replicas(stage) == (2, 1))
        assert stage.space.condition("qwen", "Ready")["status"] == "True", "the old one answers"

        def rolled() -> bool:
            pods = engines(stage)
            return len(pods) == 1 and pods[0]["metadata"]["uid"] != old["metadata"]["uid"]

        wait_until("the old one made room", rolled, show=lambda: replicas(stage))
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        stage.space.wait_condition("qwen", "Ready", "True", "Ready")
        effective = stage.space.need("InferenceService", "qwen")["status"]["effective"]
        assert (effective["maxSurge"], effective["maxUnavailable"]) == (1, 0), "the next one tries again"
        reasons = [event["reason"] for event in stage.space.list("Event")]
        assert reasons.count("InsufficientGPU") <= 1, "between the end of the old one and the place of the new one"


def make_claim(stage: Stage, mode: str) -> None:
    """Create the claim `models` with a volume, and wait until the controller has bound them."""
    volume, claim = host_path_claim(stage.space.namespace, "models", "/models")
    for each in (volume, claim):
        each["spec"]["accessModes"] = [mode]
    stage.space.api.create("/api/v1/persistentvolumes", volume)
    stage.space.create("PersistentVolumeClaim", claim)

    def is_bound() -> bool:
        return stage.space.need("PersistentVolumeClaim", "models")["status"].get("accessModes") == [mode]

    wait_until("a bound claim", is_bound)


def fail_image(bad: str) -> kubelet.Decide:
    def decide(pod: Json) -> Json:
        image = pod["spec"]["containers"][0]["image"]
        return kubelet.image_pull_failed(pod) if image == bad else kubelet.ready(pod)

    return decide


def test_a_wrong_image_leaves_the_only_engine_where_two_nodes_may_mount_its_claim(stage: Stage) -> None:
    make_claim(stage, "ReadWriteMany")
    with stage.operator(), Kubelet(stage.space, fail_image("example/engine:nope")):
        stage.space.make_service(model={"uri": "pvc://models/demo"})
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        effective = stage.space.need("InferenceService", "qwen")["status"]["effective"]
        assert (effective["maxSurge"], effective["maxUnavailable"]) == (1, 0)
        (old,) = stage.space.list("Pod")
        stage.space.edit("qwen", engine={"image": "example/engine:nope"})
        stage.space.wait_condition("qwen", "Progressing", "False", "ImagePullFailed")
        ready = stage.space.wait_condition("qwen", "Ready", "True", "ImagePullFailed")
        assert ready["message"].startswith("1 of 1 engines are ready; image ")
        assert old["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in stage.space.list("Pod")}
        stage.space.edit("qwen", engine={"image": None})
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        messages = [each["message"] for each in stage.space.list("Event") if each["reason"] == "RollingOut"]
        assert "0 of 1 pods run the current spec, 1 are ready" in messages, "before the new pod existed"
        assert not [message for message in messages if message.startswith("1 of 1")]


def test_the_removal_of_the_only_engine_is_reported_with_its_claim(stage: Stage) -> None:
    make_claim(stage, "ReadWriteOnce")
    with stage.operator(), Kubelet(stage.space, kubelet.ready) as node:
        stage.space.make_service(model={"uri": "pvc://models/demo"})
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        node.decide = kubelet.with_checks(lambda pod: None)
        stage.space.edit("qwen", drain={"timeout": "7s"})
        held_message = stage.space.wait_condition("qwen", "Progressing", "True", "RollingOut")["message"]
        why = "removes the only engine first, because claim models is ReadWriteOnce"
        assert held_message.endswith(f"{why}; rollout: {{maxSurge: 1, maxUnavailable: 0}} changes this")
        node.decide = kubelet.with_checks(kubelet.ready)
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        messages = [each["message"] for each in stage.space.list("Event") if each["reason"] == "RollingOut"]
        assert messages[0].startswith("0 of "), "before the new pod existed"
        assert all(why in message for message in messages), messages


def test_claims_are_read_when_pods_change_and_at_no_other_time(stage: Stage) -> None:
    make_claim(stage, "ReadWriteMany")

    def reads() -> int:
        return sum(call.verb == "get" and call.resource == "persistentvolumeclaims" for call in stage.proxy.calls)

    with stage.operator(), Kubelet(stage.space, kubelet.ready):
        stage.space.make_service(model={"uri": "pvc://models/demo"})
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        stage.proxy.wait_quiet()
        assert reads() == 1
        stage.space.edit("qwen", queue={"timeout": "90s"})
        stage.space.wait_observed("qwen")
        stage.space.edit("qwen", drain={"timeout": "7s"})
        stage.space.wait_condition("qwen", "Progressing", "True", "RollingOut")
        stage.space.wait_condition("qwen", "Progressing", "False", "UpToDate")
        stage.proxy.wait_quiet()
        assert reads() == 2
    with stage.operator():
        stage.proxy.wait_quiet()
        assert reads() == 2
