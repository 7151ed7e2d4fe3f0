"""Tests the pods of a service with LoRA adapters, on a real API server too, and what is told about an adapter."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from tests.operator.builders import build, build_one, desire, ended, make_pod
from tests.operator.inferenceservice.test_image_volume import forbid_what_is_not_restricted
from tests.operator.kubelet import Json, Kubelet, cannot_start, fetch_failed, ready
from tests.operator.stage import Stage, wait_until

from conveyor_operator.inferenceservice.conditions import _has_fetched
from conveyor_operator.inferenceservice.failures import find_failure
from conveyor_operator.inferenceservice.pods import ContainerState, PodState, observe_pod
from conveyor_operator.inferenceservice.starts import PodStarts

HUB, CLAIM = {"uri": "hf://example/model"}, {"uri": "pvc://models/demo"}
SQL = {"name": "sql", "uri": "hf://example/sql@v1", "secretRef": {"name": "hub"}}
CHAT = {"name": "Chat_1.0", "uri": "pvc://models/adapters/chat"}
OTHER = {"name": "other", "uri": "pvc://team/other"}
IMAGE = {"name": "z", "uri": "oci://registry.example/z:1//lora"}
CACHE = {"strategy": "PVC", "claimName": "models"}


def pods(*adapters: Json, model: Json = HUB, **spec: Any) -> Json:
    template: Json = build_one("Deployment", adapters=list(adapters), model=model, **spec)["spec"]["template"]["spec"]
    return template


def find_volumes(pods: Json) -> dict[str, Any]:
    return {volume["name"]: volume for volume in pods["volumes"] if volume["name"].startswith(("models", "adapter"))}


def find_mounts(container: Json) -> dict[str, tuple[str, bool]]:
    """Return volume and whether it is read-only, by path."""
    mounts = {each["mountPath"]: (each["name"], each.get("readOnly", False)) for each in container["volumeMounts"]}
    assert len(mounts) == len(container["volumeMounts"]), "no path twice"
    return {path: mount for path, mount in mounts.items() if path.startswith(("/models", "/adapters"))}


def config(*adapters: Json, **spec: Any) -> Any:
    return yaml.safe_load(build_one("ConfigMap", adapters=list(adapters), **spec)["data"]["engine.yaml"])


def test_the_engine_gets_the_folder_of_each_adapter_in_one_order() -> None:
    assert config(SQL, CHAT, OTHER, IMAGE)["adapters"] == {
        "Chat_1.0": "/adapters/Chat_1.0/adapters/chat",
        "other": "/adapters/other/other",
        "sql": "/models/adapters/hf/example/sql/v1",
        "z": "/adapters/z/lora",
    }
    assert "adapters" not in config()
    assert desire(adapters=[SQL, CHAT]).template_hash == desire(adapters=[CHAT, SQL]).template_hash
    changed = {**SQL, "uri": "hf://example/sql@v2"}
    assert len({desire(adapters=each).template_hash for each in ([], [SQL], [changed], [SQL, CHAT])}) == 4


def test_each_adapter_is_fetched_with_the_credentials_of_its_own() -> None:
    model, sql = pods({**SQL, "secretRef": {"name": "theirs"}}, model=HUB | {"secretRef": {"name": "hub"}})[
        "initContainers"
    ]
    assert (model["name"], sql["name"]) == ("fetch", "fetch-adapter-0")
    assert sql["command"] == [
        *("python", "-m", "conveyor_engine", "fetch", "--uri", "hf://example/sql@v1"),
        *("--target", "/models/adapters/hf/example/sql/v1", "--adapter", "sql"),
    ]
    secrets = [
        [each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"] if each["name"] == "HF_TOKEN"]
        for container in (model, sql, *pods(SQL)["containers"])
    ]
    assert secrets == [["hub"], ["theirs"], []]
    assert {key for key in sql if sql[key] != model[key]} == {"name", "command", "env"}


def test_downloads_share_the_model_s_volume_and_its_cache() -> None:
    for cache in ({}, {"cache": CACHE}):
        template = pods(SQL, model=HUB | cache)
        assert list(find_volumes(template)) == ["models"]
        assert find_mounts(template["initContainers"][1]) == {"/models": ("models", False)}
        assert find_mounts(template["containers"][0]) == {"/models": ("models", True)}


def test_beside_a_mounted_model_downloads_have_a_volume_of_their_own() -> None:
    template = pods(SQL, {**SQL, "name": "more"}, model=CLAIM)
    assert find_volumes(template)["adapters"] == {"name": "adapters", "emptyDir": {"sizeLimit": "200Gi"}}
    _, *fetches = template["initContainers"]
    assert [find_mounts(fetch) for fetch in fetches] == [{"/models/adapters": ("adapters", False)}] * 2
    assert find_mounts(template["containers"][0]) == {
        "/models/pvc": ("models", True),
        "/models/adapters": ("adapters", True),
    }
    assert "fsGroup" not in template["securityContext"], "the model's claim has the groups that it has"


@pytest.mark.parametrize("model", [CLAIM, HUB | {"cache": CACHE}])
def test_a_claim_is_one_volume_however_many_adapters_it_has(model: Json) -> None:
    more = {"name": "more", "uri": "pvc://team/more"}
    template = pods(CHAT, OTHER, more, IMAGE, model=model)
    volumes = find_volumes(template)
    assert list(volumes) == ["models", "adapter-0", "adapter-1"]
    assert volumes["adapter-0"]["persistentVolumeClaim"] == {"claimName": "team", "readOnly": True}
    assert volumes["adapter-1"]["image"] == {"reference": "registry.example/z:1", "pullPolicy": "IfNotPresent"}
    _, *fetches = template["initContainers"]
    mounts = {
        "/adapters/Chat_1.0": ("models", True),
        "/adapters/more": ("adapter-0", True),
        "/adapters/other": ("adapter-0", True),
        "/adapters/z": ("adapter-1", True),
    }
    assert [find_mounts(fetch) for fetch in fetches] == [{path: mount} for path, mount in mounts.items()]
    engine = find_mounts(template["containers"][0])
    assert mounts.items() < engine.items()


def test_a_job_fetches_the_adapters_before_the_model() -> None:
    model = HUB | {"cache": CACHE | {"prewarm": True}}
    more = {"name": "more", "uri": "hf://example/more"}
    job = build_one("Job", model=model, adapters=[SQL, more], resources={"limits": {"memory": "16Gi"}})
    spec, engines = job["spec"]["template"]["spec"], pods(SQL, more, model=model)
    assert [each["name"] for each in spec["initContainers"]] == ["fetch-adapter-0", "fetch-adapter-1"]
    assert [each["name"] for each in spec["containers"]] == ["fetch"]
    assert [each["command"] for each in spec["initContainers"]] == [
        each["command"] for each in engines["initContainers"][1:]
    ]
    assert {each["resources"]["limits"]["memory"] for each in spec["initContainers"]} == {"2Gi"}
    names = {id for id in build(model=model, adapters=[more]) if id[0] == "Job"}
    assert names != {id for id in build(model=model) if id[0] == "Job"}, "another fetch is another Job"


def test_a_job_does_not_mount_a_claim_that_another_node_may_have() -> None:
    job = build_one("Job", model=HUB | {"cache": CACHE | {"prewarm": True}}, adapters=[SQL, OTHER])
    spec = job["spec"]["template"]["spec"]
    (fetch,) = spec["initContainers"]
    assert fetch["command"][-2:] == ["--adapter", "sql"]
    assert not [volume for volume in spec["volumes"] if volume["name"].startswith("adapter-")]


def observe(container: str, *adapters: Json, model: Json = HUB, **changes: Any) -> PodState:
    """Return the state of a pod whose container has these changes."""
    pod = observe_pod(
        {
            "metadata": {"name": "a", "creationTimestamp": "", "namespace": "team-a"},
            "spec": pods(*adapters, model=model),
            "status": {"initContainerStatuses": [{"name": container, "image": "example/engine:1"}]},
        }
    )
    (state,) = pod.containers
    return replace(pod, containers=(replace(state, **changes),))


def explain(pod: PodState) -> str:
    failure = find_failure(pod)
    assert failure is not None
    return failure.message


def test_a_container_that_fails_is_reported_with_its_adapter() -> None:
    waiting = {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "hub" not found'}
    title = "container fetch-adapter-1 of adapter sql"
    assert explain(observe("fetch-adapter-1", CHAT, SQL, **waiting)) == (
        f'{title} cannot start: secret "hub" not found in namespace team-a'
    )
    assert explain(observe("fetch", CHAT, SQL, **waiting)).startswith("container fetch cannot start")
    crash = {"ended": True, "exit_code": 3, "ended_message": "boom"}
    assert explain(observe("fetch-adapter-1", CHAT, SQL, **crash)) == f"{title} ended with exit code 3: boom"
    killed = {"ended": True, "exit_code": 137, "ended_reason": "OOMKilled"}
    assert explain(observe("fetch-adapter-1", CHAT, SQL, **killed)).startswith(f"{title} used more than its memory")


def test_a_claim_that_is_missing_is_reported_with_its_adapters() -> None:
    def message_of(*adapters: Json, model: Json, claim: str) -> str:
        sentence = f'0/1 nodes are available: persistentvolumeclaim "{claim}" not found.'
        return explain(replace(observe("fetch", *adapters, model=model), unschedulable=sentence))

    missing = "namespace team-a has no PersistentVolumeClaim"
    more = {"name": "more", "uri": "pvc://team/more"}
    assert message_of(OTHER, more, model=CLAIM, claim="team") == (
        f"{missing} team; create it, or correct the uri of adapter more or the uri of adapter other"
    )
    assert message_of(CHAT, model=CLAIM, claim="models") == (
        f"{missing} models; create it, or correct model.uri or model.cache.claimName or the uri of adapter Chat_1.0"
    )
    assert message_of(OTHER, model=CLAIM, claim="models").endswith("or correct model.uri or model.cache.claimName")


def test_an_image_that_cannot_be_pulled_is_reported_with_its_adapter() -> None:
    cause = 'failed to pull and unpack image "registry.example/z:1": not found'
    pod = observe("fetch", IMAGE, waiting_reason="ErrImagePull", waiting_message=cause)
    assert explain(pod) == f"image registry.example/z:1 of adapter z cannot be pulled: {cause}"
    message = 'failed to generate spec: failed to mkdir "": mkdir : no such file or directory'
    pod = observe("fetch-adapter-0", IMAGE, waiting_reason="CreateContainerError", waiting_message=message)
    assert explain(pod) == (
        "container fetch-adapter-0 of adapter z cannot start: adapters: oci:// needs image volumes, which the node's "
        "runtime lacks (containerd 2.1 has them)"
    )


def test_a_pod_has_fetched_when_the_last_adapter_is_there() -> None:
    model = ended(code=0, name="fetch", started_at="2026-11-22T08:00:10Z", ended_at="2026-11-22T08:00:20Z")
    adapter = replace(model, name="fetch-adapter-0", adapter="sql", ended_at="2026-11-22T08:00:50Z")
    running = ContainerState("fetch-adapter-0", adapter="sql", initial=True, running=True)
    assert [_has_fetched(make_pod("a", model, *more)) for more in ((), (running,), (adapter,))] == [True, False, True]
    times = {"created_at": "2026-11-22T08:00:00Z", "ready_at": "2026-11-22T08:01:00Z"}
    starts = PodStarts()
    starts.see([make_pod("a", model, adapter, uid="1", ready=True, **times)])
    assert starts.last is not None
    assert (starts.last.seconds["model"], starts.last.seconds["load"]) == (40, 10)


def test_pods_with_adapters_are_accepted_and_replaced_when_the_list_changes(stage: Stage) -> None:
    space = stage.space
    forbid_what_is_not_restricted(space)
    failing = {"fails": True}

    def decide(pod: Json) -> Json:
        if failing["fails"]:
            failed = fetch_failed(pod, "ModelDownloadFailed", "adapter sql: example/sql does not exist")
            return failed | {
                "initContainerStatuses": [{**failed["initContainerStatuses"][0], "name": "fetch-adapter-3"}]
            }
        return ready(pod)

    with stage.operator(), Kubelet(space, decide):
        space.make_service(adapters=[SQL, CHAT, OTHER, IMAGE])
        condition = space.wait_condition("qwen", "Ready", "False", "ModelDownloadFailed")
        assert "adapter sql: example/sql does not exist" in condition["message"]
        failing["fails"] = False
        space.wait_condition("qwen", "Ready", "True", "Ready")
        (before,) = space.list("Pod")
        assert [each["name"] for each in before["spec"]["initContainers"]] == [
            "fetch",
            *(f"fetch-adapter-{number}" for number in range(4)),
        ]
        space.edit("qwen", adapters=[SQL])
        wait_until("another pod", lambda: [p for p in space.list("Pod") if len(p["spec"]["initContainers"]) == 2])
        wait_until("only that pod", lambda: len(space.list("Pod")) == 1)
        space.wait_condition("qwen", "Ready", "True", "Ready")


def test_a_secret_that_is_missing_is_a_condition_with_the_adapter_s_name(stage: Stage) -> None:
    space = stage.space
    with (
        stage.operator(),
        Kubelet(space, lambda pod: cannot_start(pod, "fetch-adapter-0", 'secret "hub" not found')),
    ):
        space.make_service(adapters=[SQL])
        condition = space.wait_condition("qwen", "Ready", "False", "SecretNotFound")
        assert "of adapter sql cannot start" in condition["message"]
