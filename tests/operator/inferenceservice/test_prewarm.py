"""Tests that a Job fetches the model into the cache before pods need it, on a real API server and Job controller."""

from datetime import timedelta
from typing import Any

import pytest
from tests.api.builders import build_full_body
from tests.operator.builders import NOW, OWNER, build, build_one, desire, make_child, make_observed
from tests.operator.kubelet import Json, Kubelet, prewarm_failed, prewarmed, prewarming, ready
from tests.operator.stage import Stage, wait_until

from conveyor_api.names import INFERENCE_SERVICE_LABEL
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice import differences, plan
from conveyor_operator.inferenceservice.differences import find_differences
from conveyor_operator.inferenceservice.memory import ServiceMemory
from conveyor_operator.loop.child import hash_of, id_of
from conveyor_operator.loop.steps import Applied, RequeueAt

MODEL: Json = {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "10Gi", "prewarm": True}}
GPU = {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}}


def is_jobs(pod: Json) -> bool:
    return str(pod["metadata"]["labels"][INFERENCE_SERVICE_LABEL]) == "qwen.prewarm"


def play(job: Any) -> Any:
    return lambda pod: job(pod) if is_jobs(pod) else ready(pod)


def uri_of_pods(stage: Stage) -> str:
    (fetch,) = stage.space.need("Deployment", "qwen-engine")["spec"]["template"]["spec"]["initContainers"]
    return str(fetch["command"][fetch["command"].index("--uri") + 1])


def job_pod(**spec: Any) -> Json:
    template: Json = build_one("Job", model=MODEL, **spec)["spec"]["template"]
    return template


def test_the_job_fetches_as_the_engine_s_pods_do_and_requests_no_device() -> None:
    pod = {"nodeSelector": {"zone": "a"}, "resourceClaims": [{"name": "gpu", "resourceClaimName": "one"}]}
    spec, whole = job_pod(resources=GPU, pod=pod)["spec"], build_one("Deployment", model=MODEL, resources=GPU, pod=pod)
    engines = whole["spec"]["template"]["spec"]
    (fetch,) = spec["containers"]
    assert fetch | {"resources": {}} == engines["initContainers"][0] | {"resources": {}}
    assert {mount["name"] for mount in fetch["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    for key in ("nodeSelector", "tolerations", "securityContext", "serviceAccountName"):
        assert spec[key] == engines[key]
    assert "resourceClaims" not in spec


def test_the_job_requests_little_beside_an_engine_and_names_what_a_quota_may_request() -> None:
    def pod_requests(**resources: Json) -> Json:
        (fetch,) = job_pod(resources=resources)["spec"]["containers"]
        return dict(fetch["resources"])

    little = {"cpu": "100m", "memory": "256Mi"}
    assert pod_requests() == {"requests": little}
    assert pod_requests(requests={"cpu": "16", "memory": "64Gi"}) == {"requests": little}
    some = pod_requests(requests={"cpu": "250m", "memory": "2Gi"}, limits={"cpu": "16", "memory": "64Gi"})
    assert some == {"requests": little, "limits": {"cpu": "4", "memory": "2Gi"}}


@pytest.mark.parametrize(
    ("request_", "limit", "expected"),
    [
        ("16", "16", ("1", "1")),
        (None, "16", ("1", "1")),  # Kubernetes takes the limit as the request
        ("4", "16", ("250m", "1")),
        ("1", "16", ("100m", "1")),
        ("300m", "1", ("300m", "1")),
        ("400m", "16", ("100m", "4")),
        ("0", "16", ("100m", "4")),
    ],
)
def test_the_job_s_limit_is_no_more_times_its_request_than_the_engine_s(
    request_: str | None, limit: str, expected: tuple[str, str]
) -> None:
    """A LimitRange with maxLimitRequestRatio refuses other pods, and policies may ask for equal amounts."""
    requests = {"cpu": request_} if request_ else {}
    (fetch,) = job_pod(resources={"requests": requests, "limits": {"cpu": limit}})["spec"]["containers"]
    assert (fetch["resources"]["requests"]["cpu"], fetch["resources"]["limits"]["cpu"]) == expected


def test_the_job_of_an_engine_with_equal_amounts_has_equal_amounts() -> None:
    whole = {"cpu": "16", "memory": "64Gi", "ephemeral-storage": "9Gi"}
    limits = whole | {"nvidia.com/gpu": 1}
    (fetch,) = job_pod(resources={"requests": whole, "limits": limits})["spec"]["containers"]
    assert fetch["resources"]["requests"] == fetch["resources"]["limits"]
    assert fetch["resources"]["limits"] == {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "2Gi"}


def test_only_these_fields_of_a_pod_are_the_job_s() -> None:
    spec = job_pod(pod=build_full_body()["spec"]["pod"] | {"resourceClaims": [{"name": "a", "resourceClaimName": "b"}]})
    assert set(spec["spec"]) == {
        "affinity", "automountServiceAccountToken", "containers", "dnsConfig", "enableServiceLinks", "hostAliases",
        "hostUsers", "imagePullSecrets", "nodeSelector", "priorityClassName", "restartPolicy", "runtimeClassName",
        "schedulerName", "securityContext", "serviceAccountName", "tolerations", "volumes",
    }  # fmt: skip


def test_another_fetch_is_another_job_and_another_engine_is_not() -> None:
    def name(**spec: Any) -> str:
        return str(build_one("Job", **{"model": MODEL, **spec})["metadata"]["name"])

    assert name() == name(batching={"maxBatchSize": 4}) == name(queue={"timeout": "90s"})
    assert (
        len(
            {
                name(),
                name(model=MODEL | {"uri": "hf://example/other"}),
                name(model=MODEL | {"secretRef": {"name": "hub"}}),
            }
        )
        == 3
    )
    assert not [kind for kind, _ in build(model={"uri": "hf://example/model"}) if kind == "Job"]


def test_where_one_node_has_the_claim_the_job_runs_there() -> None:
    required, preferred = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))
    others = {"labelSelector": {"matchLabels": {"app": "other"}}}
    rack, zone = others | {"topologyKey": "rack"}, {"weight": 1, "podAffinityTerm": others | {"topologyKey": "zone"}}
    near = {"podAffinity": {required: [rack], preferred: [zone]}}
    alone, shared = job_pod(pod={"affinity": near}), job_pod(replicas=2, pod={"affinity": near})
    assert shared["spec"]["affinity"] == near
    terms = alone["spec"]["affinity"]["podAffinity"]
    assert terms[preferred] == [zone, {"weight": 100, "podAffinityTerm": rack}], "the engine need not be one of those"
    (term,) = terms[required]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    (expression,) = term["labelSelector"]["matchExpressions"]
    assert alone["metadata"]["labels"][INFERENCE_SERVICE_LABEL] in expression["values"], "else the first would wait"
    assert "qwen" in expression["values"]


@pytest.mark.slow
def test_pods_come_when_the_job_has_brought_the_model(stage: Stage) -> None:
    space = stage.space
    with stage.operator(), Kubelet(space, play(prewarming)) as kubelet:
        space.make_service(model=MODEL)
        condition = space.wait_condition("qwen", "Ready", "False", "ModelDownloading")
        assert "a Job is downloading the model" in condition["message"]
        space.wait_condition("qwen", "Progressing", "True", "ModelDownloading")
        wait_until("it fetches", lambda: [p for p in space.list("Pod") if p["status"]["phase"] == "Running"])
        assert space.get("Deployment", "qwen-engine") is None
        slices = [s for s in space.list("EndpointSlice") if s.get("endpoints")]
        assert not slices, "nobody sends requests to the Job"
        kubelet.decide = play(prewarmed)
        space.wait_condition("qwen", "Ready", "True", "Ready")
        (job,) = space.list("Job")
    with stage.operator():
        stage.proxy.wait_quiet()
        assert [each["metadata"]["uid"] for each in space.list("Job")] == [job["metadata"]["uid"]]


def test_a_job_that_fails_is_reported_with_its_reason_and_another_spec_is_another_job(stage: Stage) -> None:
    space = stage.space

    def fail(pod: Json) -> Json:
        missing = "hf://example/model" in pod["spec"]["containers"][0]["command"]
        return prewarm_failed(pod, "ModelNotFound", "there is no such model") if missing else prewarmed(pod)

    with stage.operator(), Kubelet(space, play(fail)):
        space.make_service(model=MODEL)
        for type in ("Progressing", "ModelAvailable", "Ready"):
            condition = space.wait_condition("qwen", type, "False", "ModelNotFound")
        assert "there is no such model (pod qwen-prewarm-" in condition["message"]
        assert space.get("Deployment", "qwen-engine") is None
        (failed,) = space.list("Job")
        space.edit("qwen", model={"uri": "hf://example/other"})
        space.wait_condition("qwen", "Ready", "True", "Ready")
        wait_until(
            "the other is gone",
            lambda: [j["metadata"]["name"] for j in space.list("Job")] != [failed["metadata"]["name"]],
        )
        wait_until("one is left", lambda: len(space.list("Job")) == 1)
        assert space.need("InferenceService", "qwen")["status"]["lastFailure"]["reason"] == "ModelNotFound"


@pytest.mark.slow
def test_while_another_model_is_fetched_the_pods_stay_as_they_are(stage: Stage) -> None:
    space = stage.space
    with stage.operator(), Kubelet(space, play(prewarmed)) as kubelet:
        space.make_service(model=MODEL)
        space.wait_condition("qwen", "Ready", "True", "Ready")
        kubelet.decide = play(prewarming)
        space.edit("qwen", model={"uri": "hf://example/other"}, batching={"maxBatchSize": 4})
        space.wait_condition("qwen", "Progressing", "True", "ModelDownloading")
        assert space.condition("qwen", "Ready")["status"] == "True"
        assert uri_of_pods(stage) == "hf://example/model"
        space.edit("qwen", replicas=2, model={"cache": {"claimName": "mine", "size": None}})
        wait_until("replicas do not wait", lambda: space.need("Deployment", "qwen-engine")["spec"]["replicas"] == 2)
        stage.proxy.wait_quiet()
        assert uri_of_pods(stage) == "hf://example/model"
        claim = space.need("PersistentVolumeClaim", "qwen-models")
        assert "deletionTimestamp" not in claim["metadata"], "pods of the former spec have it"
        kubelet.decide = play(prewarmed)
        wait_until("the pods are of the new spec", lambda: uri_of_pods(stage) == "hf://example/other")
        assert space.need("Deployment", "qwen-engine")["spec"]["replicas"] == 2
        space.edit("qwen", replicas=1)
        wait_until("replicas are ours again", lambda: space.need("Deployment", "qwen-engine")["spec"]["replicas"] == 1)


def test_a_job_that_gets_no_pod_is_reported(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "PATIENCE", timedelta(seconds=3))
    space = stage.space
    space.create("ResourceQuota", {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    with stage.operator(), Kubelet(space, play(prewarmed)):
        space.make_service(model=MODEL)
        for type in ("Progressing", "ModelAvailable", "Ready"):
            condition = space.wait_condition("qwen", type, "False", "PodsRefused")
        (job,) = space.list("Job")
        assert f"kubectl describe job {job['metadata']['name']} shows why" in condition["message"]
        space.delete("ResourceQuota", "none")
        space.wait_condition("qwen", "Ready", "True", "Ready")


def test_a_job_s_pod_is_given_time() -> None:
    desired = desire(model=MODEL)
    (job,) = (child for child in desired.children if child["kind"] == "Job")

    def left(seconds: float, **status: int) -> tuple[str, list[Any]]:
        made = {"uid": "made", "creationTimestamp": (NOW - timedelta(seconds=seconds)).isoformat()}
        there = make_observed(*(make_child(*id_of(child)) for child in desired.children))
        there = there.with_child(job | {"metadata": job["metadata"] | made, "status": status})
        applied = {id_of(c): Applied(hash_of(c), there.children[id_of(c)].fingerprint) for c in desired.children}
        memory = ServiceMemory(OWNER.uid, applied=applied)
        steps = plan.plan(desired, there, memory, Activity.STEADY, NOW)
        return find_differences(desired, there, memory).name_podless_job(NOW), steps

    assert left(20) == ("", [RequeueAt(NOW + timedelta(seconds=10))])
    assert left(20, active=1) == left(40, active=1) == ("", [])
    name, steps = left(40)
    assert name.startswith("qwen-prewarm-")
    assert not steps, "it is told by now"
