"""Tests the pods of a service with LoRA adapters, on a real API server too, and what is told about an adapter."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from tests.operator.builders import build, build_file, build_one, desire, ended, make_pod
from tests.operator.inferenceservice.test_image_volume import forbid_what_is_not_restricted
from tests.operator.kubelet import Json, Kubelet, fetch_failed, ready
from tests.operator.stage import Stage, wait_until

from conveyor_operator.activity.adapter_states import AdapterStates
from conveyor_operator.inferenceservice.conditions import _has_fetched
from conveyor_operator.inferenceservice.failures import find_failure
from conveyor_operator.inferenceservice.pods import ContainerState, PodState, observe_pod
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_protocol.pages import AdapterCounts

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


def listed(*adapters: Json, **spec: Any) -> Any:
    return yaml.safe_load(build_file("adapters.yaml", adapters=list(adapters), **spec))


def template_of(*adapters: Json) -> str:
    return desire(adapters=list(adapters)).template_hash


def test_the_engine_follows_a_list_with_the_folder_of_each_adapter() -> None:
    assert listed(SQL, CHAT, OTHER, IMAGE) == {
        "Chat_1.0": {"uri": CHAT["uri"], "directory": "/adapters/claims/models/adapters/chat"},
        "other": {"uri": OTHER["uri"], "directory": "/adapters/claims/team/other"},
        "sql": {"directory": "/models/adapters/hf/example/sql/v1"},
        "z": {"uri": IMAGE["uri"], "directory": "/adapters/images/z/lora"},
    }
    config = yaml.safe_load(build_file("engine.yaml", adapters=[SQL]))
    assert config["adapters_file"] == "/adapters/list/adapters.yaml"
    assert "adapters_file" not in yaml.safe_load(build_file("engine.yaml"))


@pytest.mark.parametrize(("model", "is_removable"), [(HUB, True), (CLAIM, True), (HUB | {"cache": CACHE}, False)])
def test_an_engine_removes_downloads_only_from_a_volume_of_its_pod_alone(model: Json, is_removable: bool) -> None:
    config = yaml.safe_load(build_file("engine.yaml", adapters=[CHAT], model=model))
    assert config.get("adapters_folder") == ("/models/adapters" if is_removable else None)


def test_the_list_changes_no_pods_unless_they_need_something_else() -> None:
    hub, more = {"name": "a", "uri": "hf://example/a"}, {"name": "more", "uri": "pvc://team/more"}
    assert template_of(hub) == template_of(hub | {"uri": "s3://bucket/a"}) == template_of(hub, hub | {"name": "b"})
    assert template_of(OTHER, hub) == template_of(hub, OTHER, more) == template_of(more)
    first = {"name": "Aa", "uri": "pvc://team/first"}
    assert template_of(CHAT, OTHER) == template_of(CHAT, OTHER, first), "the names have no effect on the volumes"
    needs = [(), (hub,), (OTHER,), (CHAT,), (OTHER, CHAT), (IMAGE,), (SQL,), (SQL | {"uri": "hf://example/sql@v2"},)]
    assert len({template_of(*each) for each in needs}) == len(needs)


def test_an_adapter_with_a_secret_is_fetched_with_it_before_the_engine_starts() -> None:
    more = {"name": "more", "uri": "hf://example/more"}
    model, sql = pods(more, {**SQL, "secretRef": {"name": "theirs"}}, model=HUB | {"secretRef": {"name": "hub"}})[
        "initContainers"
    ]
    assert (model["name"], sql["name"]) == ("fetch", "fetch-adapter-0")
    assert sql["command"] == [
        *("python", "-m", "conveyor_engine", "fetch", "--uri", "hf://example/sql@v1"),
        *("--target", "/models/adapters/hf/example/sql/v1"),
        *("--credentials", "/etc/conveyor-credentials/theirs", "--adapter", "sql"),
    ]
    assert [list_credentials(container) for container in (model, sql, *pods(SQL)["containers"])] == [
        ["/etc/conveyor-credentials/hub"],
        ["/etc/conveyor-credentials/theirs"],
        [],
    ]
    assert {key for key in sql if sql[key] != model[key]} == {"name", "command", "volumeMounts"}


def list_credentials(container: Json) -> list[str]:
    paths = [mount["mountPath"] for mount in container["volumeMounts"]]
    return [path for path in paths if path.startswith("/etc/conveyor-credentials")]


LIST = {"/adapters/list": ("adapter-list", True)}


def test_downloads_share_the_model_s_volume_and_its_cache() -> None:
    for cache in ({}, {"cache": CACHE}):
        template = pods(SQL, model=HUB | cache)
        assert list(find_volumes(template)) == ["models", "adapter-list"]
        assert find_mounts(template["initContainers"][1]) == {"/models": ("models", False)}
        assert find_mounts(template["containers"][0]) == {
            "/models": ("models", True),
            "/models/adapters": ("models", False),
            **LIST,
        }
        (own,) = [m for m in template["containers"][0]["volumeMounts"] if m["mountPath"] == "/models/adapters"]
        assert own["subPath"] == "adapters", "the engine cannot write the model"


def test_beside_a_mounted_model_downloads_have_a_volume_of_their_own() -> None:
    template = pods(SQL, {**SQL, "name": "more"}, model=CLAIM)
    assert find_volumes(template)["adapters"] == {"name": "adapters", "emptyDir": {"sizeLimit": "200Gi"}}
    _, *fetches = template["initContainers"]
    assert [find_mounts(fetch) for fetch in fetches] == [{"/models/adapters": ("adapters", False)}] * 2
    assert find_mounts(template["containers"][0]) == {
        "/models/pvc": ("models", True),
        "/models/adapters": ("adapters", False),
        **LIST,
    }
    assert "fsGroup" not in template["securityContext"], "the model's claim has the groups that it has"


@pytest.mark.parametrize("model", [CLAIM, HUB | {"cache": CACHE}])
def test_a_claim_is_one_volume_and_one_mount_however_many_adapters_it_has(model: Json) -> None:
    template = pods(CHAT, OTHER, {"name": "more", "uri": "pvc://team/more"}, IMAGE, model=model)
    volumes = find_volumes(template)
    (team,) = [name for name, each in volumes.items() if "team" in str(each)]
    (image,) = [name for name, each in volumes.items() if "image" in each]
    assert volumes[team]["persistentVolumeClaim"] == {"claimName": "team", "readOnly": True}
    assert volumes[image]["image"] == {"reference": "registry.example/z:1", "pullPolicy": "IfNotPresent"}
    assert [each["name"] for each in template["initContainers"]] == ["fetch"]
    mounts = {
        "/adapters/claims/models": ("models", True),
        "/adapters/claims/team": (team, True),
        "/adapters/images/z": (image, True),
    }
    assert mounts.items() < find_mounts(template["containers"][0]).items()


def test_a_job_fetches_adapters_with_secrets_before_the_model() -> None:
    model = HUB | {"cache": CACHE | {"prewarm": True}}
    more = {"name": "more", "uri": "hf://example/more", "secretRef": {"name": "hub"}}
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
    title = "container fetch-adapter-0 of adapter sql"
    assert explain(observe("fetch-adapter-0", CHAT, SQL, **waiting)) == (
        f'{title} cannot start: secret "hub" not found in namespace team-a'
    )
    assert explain(observe("fetch", CHAT, SQL, **waiting)).startswith("container fetch cannot start")
    crash = {"ended": True, "exit_code": 3, "ended_message": "boom"}
    assert explain(observe("fetch-adapter-0", CHAT, SQL, **crash)) == f"{title} ended with exit code 3: boom"
    killed = {"ended": True, "exit_code": 137, "ended_reason": "OOMKilled"}
    assert explain(observe("fetch-adapter-0", CHAT, SQL, **killed)).startswith(f"{title} used more than its memory")


def test_a_claim_that_is_missing_is_reported_with_its_adapters() -> None:
    def message_of(*adapters: Json, model: Json, claim: str) -> str:
        sentence = f'0/1 nodes are available: persistentvolumeclaim "{claim}" not found.'
        return explain(replace(observe("fetch", *adapters, model=model), unschedulable=sentence))

    missing = "namespace team-a has no PersistentVolumeClaim"
    assert message_of(OTHER, model=CLAIM, claim="team") == (
        f"{missing} team; create it, or correct the uri of the adapters in it"
    )
    assert message_of(CHAT, model=CLAIM, claim="models") == (
        f"{missing} models; create it, or correct model.uri or model.cache.claimName or the uri of the adapters in it"
    )
    assert message_of(OTHER, model=CLAIM, claim="models").endswith("or correct model.uri or model.cache.claimName")


def test_an_image_that_cannot_be_pulled_is_reported_with_its_adapter() -> None:
    cause = 'failed to pull and unpack image "registry.example/z:1": not found'
    pod = observe("fetch", IMAGE, waiting_reason="ErrImagePull", waiting_message=cause)
    assert explain(pod) == f"image registry.example/z:1 of adapter z cannot be pulled: {cause}"
    message = 'failed to generate spec: failed to mkdir "": mkdir : no such file or directory'
    pod = observe("fetch", IMAGE, waiting_reason="CreateContainerError", waiting_message=message)
    assert explain(pod) == (
        "container fetch cannot start: adapters: oci:// needs image volumes, which the node's runtime lacks "
        "(containerd 2.1 has them)"
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


FR = {"name": "fr", "uri": "hf://example/fr"}


def test_the_list_of_running_engines_changes_with_no_pod_replaced(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, counts = stage.space, dict[str, dict[str, AdapterCounts]]()
    forbid_what_is_not_restricted(space)
    monkeypatch.setattr(AdapterStates, "_read", lambda *_: answer(counts))

    def states() -> dict[str, tuple[str, int]]:
        adapters = space.need("InferenceService", "qwen")["status"].get("adapters", [])
        return {each["name"]: (each["state"], each.get("replicas", 0)) for each in adapters}

    with stage.operator(), Kubelet(space, ready):
        space.make_service(adapters=[FR, OTHER, IMAGE])
        space.wait_condition("qwen", "Ready", "True", "Ready")
        wait_until("loading", lambda: states() == dict.fromkeys(("fr", "other", "z"), ("Loading", 0)))
        (before,) = space.list("Pod")
        old = AdapterCounts(ready=1, serving=1)
        counts.update(fr={"/models/adapters/hf/example/fr/main": old}, z={"/adapters/images/z/lora": old})
        counts["other"] = {"/adapters/claims/team/other": AdapterCounts(failed=1, message="`dtype` is wrong")}
        found = {"fr": ("Ready", 1), "other": ("Failed", 0), "z": ("Ready", 1)}
        wait_until("loaded", lambda: states() == found)
        assert space.need("InferenceService", "qwen")["status"]["adapters"][1]["message"] == "engine.dtype is wrong"
        space.wait_condition("qwen", "Ready", "True", "Ready")

        space.edit("qwen", adapters=[FR | {"uri": "hf://example/fr@v2"}, IMAGE, OTHER | {"uri": "pvc://team/new"}])
        wait_until("the old one still answers", lambda: states()["fr"] == ("Loading", 1))
        files = space.need("ConfigMap", "qwen-engine-adapters")["data"]
        assert yaml.safe_load(files["adapters.yaml"])["fr"] == {
            "uri": "hf://example/fr@v2",
            "directory": "/models/adapters/hf/example/fr/v2",
        }
        counts["fr"] = {"/models/adapters/hf/example/fr/v2": old}
        wait_until("replaced", lambda: states()["fr"] == ("Ready", 1))
        assert [pod["metadata"]["uid"] for pod in space.list("Pod")] == [before["metadata"]["uid"]]

        space.edit("qwen", adapters=[FR, SQL])
        wait_until("another pod", lambda: [p for p in space.list("Pod") if len(p["spec"]["initContainers"]) == 2])
        wait_until("only that pod", lambda: len(space.list("Pod")) == 1)
        space.wait_condition("qwen", "Ready", "True", "Ready")


async def answer(counts: dict[str, dict[str, AdapterCounts]]) -> dict[str, dict[str, AdapterCounts]]:
    return {name: dict(each) for name, each in counts.items()}


def test_a_secret_that_is_missing_is_a_condition_with_the_adapter_s_name(stage: Stage) -> None:
    space = stage.space
    with (
        stage.operator(),
        Kubelet(space, lambda pod: fetch_failed(pod, "SecretNotFound", "adapter sql: no", "fetch-adapter-0")),
    ):
        space.make_service(adapters=[SQL])
        condition = space.wait_condition("qwen", "Ready", "False", "SecretNotFound")
        assert "adapter sql: no" in condition["message"]
