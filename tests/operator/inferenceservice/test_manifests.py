"""Tests the manifests that are built from a spec, with single checks and with properties of many specs."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.builders import build_full_body
from tests.operator.builders import (
    NOW,
    OWNER,
    SCRATCH,
    SETTINGS,
    build,
    build_config,
    build_container,
    build_one,
    build_template,
    desire,
    make_resource,
)

from conveyor_api import names
from conveyor_operator.inferenceservice.desired import build_desired
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.replicas import Replicas, with_replicas
from conveyor_operator.inferenceservice.starts import PodStarts


def test_the_children_of_a_plain_service_have_the_contracts_names() -> None:
    (config_map,) = [name for kind, name in build() if kind == "ConfigMap"]
    assert set(build()) == {
        ("ServiceAccount", "qwen-engine"),
        ("ConfigMap", config_map),
        ("Service", "qwen-engine"),
        ("Service", "qwen"),
        ("Deployment", "qwen-engine"),
        ("NetworkPolicy", "qwen-engine"),
        ("PodDisruptionBudget", "qwen-engine"),
    }
    assert len(config_map) == len("qwen-engine-") + 8


def test_the_engine_gets_every_setting_in_its_own_words() -> None:
    rendered = build_config(
        model={"uri": "hf://example/model@refs/pr/1", "name": "served"},
        engine={
            "device": "Auto",
            "dtype": "BFloat16",
            "maxModelLen": 512,
            "samplingDefaults": "OpenAI",
            "maxQueuedRequests": 9,
        },
        batching={"mode": "Dynamic", "maxBatchSize": 8, "window": "20ms", "maxBatchTokens": 64},
        kvCache={"blockBudget": 4096, "blockSize": 16},
        requestTimeout="30s",
        drain={"timeout": "7s"},
    )
    assert rendered == {
        "model": "/models/hf/example/model/refs--pr--1",
        "served_model_name": "served",
        "device": "auto",
        "dtype": "bfloat16",
        "max_model_len": 512,
        "sampling_defaults": "openai",
        "batching_mode": "dynamic",
        "max_num_seqs": 8,
        "batching_window_seconds": 0.02,
        "max_num_batched_tokens": 64,
        "max_num_queued_requests": 9,
        "num_kv_blocks": 4096,
        "block_size": 16,
        "request_timeout_seconds": 30,
        "drain_timeout_seconds": 7,
        "port": 8000,
    }


def test_what_the_spec_leaves_open_is_left_to_the_engine() -> None:
    rendered = build_config()
    assert "max_model_len" not in rendered
    assert "num_kv_blocks" not in rendered
    assert "kv_memory_fraction" not in rendered
    assert "kv_cache_dtype" not in rendered


def test_the_pods_name_the_configuration_that_they_run() -> None:
    (name,) = [name for kind, name in build() if kind == "ConfigMap"]
    pod = build_template()
    assert name == f"qwen-engine-{pod['metadata']['annotations'][names.CONFIG_HASH_ANNOTATION]}"
    assert {"name": "config", "configMap": {"name": name}} in pod["spec"]["volumes"]


def test_the_pods_meet_the_restricted_standard() -> None:
    pod = build_template()["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in (*pod["initContainers"], *pod["containers"]):
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert each["terminationMessagePolicy"] == "FallbackToLogsOnError"
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert SCRATCH in each["volumeMounts"]


def test_on_a_platform_that_sets_the_user_the_pods_set_none() -> None:
    settings = replace(SETTINGS, user_id=0)
    children = build_desired(make_resource(), settings, Observed(), PodStarts(), NOW).children
    (deployment,) = [child for child in children if child["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroupChangePolicy": "OnRootMismatch",
    }


@pytest.mark.parametrize(
    ("given", "requests"),
    [
        ({}, {"cpu": "500m", "memory": "1Gi"}),
        ({"limits": {"nvidia.com/gpu": 1}}, {"cpu": "500m", "memory": "1Gi"}),
        ({"limits": {"memory": "16Gi"}}, {"cpu": "500m"}),
        ({"requests": {"cpu": 2, "memory": "8Gi"}}, {"cpu": 2, "memory": "8Gi"}),
        ({"limits": {"cpu": 2, "memory": "8Gi"}}, None),
    ],
)
def test_no_pod_is_without_a_request(given: dict[str, Any], requests: dict[str, Any] | None) -> None:
    for name in ("engine", "fetch"):
        assert build_container(name, resources=given)["resources"].get("requests") == requests
    effective = desire(resources=given).effective.resources
    assert effective is not None
    assert effective.requests == {name: str(amount) for name, amount in (requests or {}).items()}


def test_the_classes_of_the_queue_are_reported_in_order_with_their_bounds() -> None:
    classes = [
        {"name": "batch", "level": 102, "timeout": "10s", "onTimeout": "Reject"},
        {"name": "chat", "level": 2},
        {"name": "tools", "level": 3, "timeout": "5s", "onTimeout": "Delay"},
    ]
    settled = desire(queue={"classes": classes, "timeout": "30s"}).effective.queue_classes or []
    assert [(each.name, each.level, each.timeout, each.overtaken_for) for each in settled] == [
        ("chat", 2, "30s", "30s"),
        ("tools", 3, "30s", "6030s"),  # delayed it is as the least urgent class
        ("batch", 102, "10s", "6030s"),
    ]
    assert desire().effective.queue_classes is None


def test_no_folder_of_a_pod_can_fill_the_node() -> None:
    folders = [volume["emptyDir"] for volume in build_template()["spec"]["volumes"] if "emptyDir" in volume]
    assert len(folders) == 3
    assert all("sizeLimit" in folder for folder in folders)


def test_nobody_but_gateways_and_prometheus_reaches_an_engine() -> None:
    spec, labels = build_one("NetworkPolicy")["spec"], build_template()["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["policyTypes"] == ["Ingress"]
    (rule,) = spec["ingress"]
    (port,) = build_container("engine")["ports"]
    assert rule["ports"] == [{"protocol": port["protocol"], "port": port["containerPort"]}]
    gateways, prometheus = rule["from"]
    assert gateways["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "conveyor-system"}}
    assert gateways["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "conveyor-gateway"}}
    assert prometheus == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def test_the_engine_has_its_probes_and_time_to_drain() -> None:
    pod, engine = build_template(drain={"timeout": "59s500ms"})["spec"], build_container("engine")
    assert pod["terminationGracePeriodSeconds"] == 5 + 60 + 10
    assert engine["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert engine["startupProbe"]["httpGet"]["path"] == engine["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert engine["livenessProbe"]["httpGet"]["path"] == "/livez"
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800
    assert startup["initialDelaySeconds"] == 2 * startup["periodSeconds"], "an engine is ready as soon as without it"


def test_a_model_that_loads_for_long_gets_the_time_that_its_service_names() -> None:
    startup = build_container("engine", engine={"startupTimeout": "3h"})["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3 * 3600
    deadline = build_one("Deployment", engine={"startupTimeout": "3h"})["spec"]["progressDeadlineSeconds"]
    assert deadline > 3 * 3600, "the rollout is no failure while an engine may still start"


def test_pods_that_request_a_gpu_tolerate_its_taint_and_others_do_not() -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    own = {"key": "team", "operator": "Exists"}
    with_gpu = {"limits": {"nvidia.com/gpu": 1}}
    assert build_template(resources=with_gpu, pod={"tolerations": [own]})["spec"]["tolerations"] == [taint, own]
    claim = {"name": "gpu", "resourceClaimTemplateName": "h200"}
    for other in (build_template(), build_template(pod={"resourceClaims": [claim]})):
        assert "tolerations" not in other["spec"]


def test_the_users_environment_comes_with_ours() -> None:
    endpoint = {"name": "HF_ENDPOINT", "value": "http://hub"}
    for name in ("fetch", "engine"):
        env = build_container(name, pod={"env": [endpoint]})["env"]
        assert endpoint in env
        assert {"name": "TERMINATION_LOG", "value": "/dev/termination-log"} in env
        assert len({variable["name"] for variable in env}) == len(env)
    assert {"name": "HOME", "value": "/elsewhere"} in build_container(
        "engine", pod={"env": [{"name": "HOME", "value": "/elsewhere"}]}
    )["env"]


def test_what_says_where_vllms_image_has_its_programs_is_kept_from_the_fetch() -> None:
    """The fetch uses another image, with another Python."""
    of_the_image = ["PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD"]
    of_both = ["HF_TOKEN", "HTTPS_PROXY", "AWS_ENDPOINT_URL", "SSL_CERT_FILE"]
    env = [{"name": name, "value": "/vllm"} for name in (*of_the_image, *of_both)]
    vllm = {"runtime": "VLLM", "engine": {"image": "vllm/vllm-openai:v0.11.0", "maxModelLen": 512}}
    cache = {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "1Gi", "prewarm": True}}
    spec = vllm | {"model": cache, "pod": {"env": env}}
    (job,) = build_one("Job", **spec)["spec"]["template"]["spec"]["containers"]
    for fetch in (build_container("fetch", **spec), job):
        assert [variable["name"] for variable in fetch["env"] if variable["value"] == "/vllm"] == of_both
    assert all(variable in build_container("engine", **spec)["env"] for variable in env)
    assert all(variable in build_container("fetch", pod={"env": env})["env"] for variable in env)


def test_scheduling_and_pull_secrets_reach_the_pods() -> None:
    scheduling = {"nodeSelector": {"gpu": "a100"}, "priorityClassName": "high", "runtimeClassName": "nvidia"}
    pod = build_template(pod=scheduling | {"imagePullSecrets": [{"name": "registry"}]})["spec"]
    assert pod["nodeSelector"] == {"gpu": "a100"}
    assert pod["priorityClassName"] == "high"
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_what_the_spec_says_of_the_pods_comes_beside_what_is_ours() -> None:
    given = build_full_body()["spec"]["pod"]
    pods = build_template(pod=given)
    spec = pods["spec"]
    assert pods["metadata"]["labels"] == given["labels"] | names.child_labels("qwen")
    assert given["annotations"].items() < pods["metadata"]["annotations"].items()
    assert spec["serviceAccountName"] == "models"
    assert spec["automountServiceAccountToken"] is False
    assert given["securityContext"].items() < spec["securityContext"].items()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert [volume for volume in spec["volumes"] if volume["name"] not in names.POD_VOLUMES] == given["volumes"]
    assert spec["resourceClaims"] == given["resourceClaims"]
    assert build_container("engine", pod=given)["resources"]["claims"] == [{"name": "gpu"}]
    assert "claims" not in build_container("fetch", pod=given)["resources"]
    for name in ("fetch", "engine"):
        assert build_container(name, pod=given)["volumeMounts"][-2:] == given["volumeMounts"]


def test_the_volumes_that_may_not_be_named_are_those_that_are_there() -> None:
    assert {volume["name"] for volume in build_template()["spec"]["volumes"]} == set(names.POD_VOLUMES)


def test_an_empty_dir_of_the_spec_replaces_ours_of_the_same_name_at_its_mount_points() -> None:
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    scratch = {"name": "scratch", "emptyDir": {"sizeLimit": "20Gi"}}
    pods = build_template(pod={"volumes": [memory, scratch]})["spec"]
    assert {volume["name"]: volume for volume in pods["volumes"]} == {
        **{volume["name"]: volume for volume in build_template()["spec"]["volumes"]},
        "shared-memory": memory,
        "scratch": scratch,
    }
    assert len(pods["volumes"]) == len(names.POD_VOLUMES)
    (engine,) = pods["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    assert (mounts["shared-memory"], mounts["scratch"]) == ("/dev/shm", "/tmp")


def test_pods_are_replaced_as_the_spec_says() -> None:
    strategy = build_one("Deployment", rollout={"maxSurge": "25%", "maxUnavailable": 0})["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}}


def test_no_version_is_in_the_template_that_would_roll_pods_on_an_upgrade() -> None:
    assert set(build_template()["metadata"]["labels"]) == set(names.child_labels("qwen"))
    assert set(build_template()["metadata"]["annotations"]) == {names.CONFIG_HASH_ANNOTATION}


uris = st.sampled_from([{"uri": "hf://a/b"}, {"uri": "hf://a/b@c", "name": "n"}, {"uri": "pvc://claim/path"}])
engines = st.fixed_dictionaries({"dtype": st.sampled_from(["Auto", "Float32"])}, optional={"image": st.just("x/y:1")})
modes = st.sampled_from(["None", "Static", "Dynamic", "Continuous"])
drains = st.integers(0, 3600).map("{}s".format)
fixed = st.fixed_dictionaries({}, optional={"replicas": st.integers(0, 1000)})
bounds = st.fixed_dictionaries({"minReplicas": st.integers(0, 5), "maxReplicas": st.integers(5, 9)})
autoscaled = st.fixed_dictionaries({"autoscaling": bounds})
parts = st.fixed_dictionaries(
    {"model": uris},
    optional={
        "engine": engines,
        "batching": st.fixed_dictionaries({"mode": modes, "maxBatchSize": st.integers(1, 1024)}),
        "drain": st.fixed_dictionaries({"timeout": drains}),
        "resources": st.sampled_from([{}, {"limits": {"nvidia.com/gpu": 1}}, {"requests": {"cpu": "1"}}]),
    },
)
specs = st.builds(dict[str, Any].__or__, parts, fixed | autoscaled)


@given(specs)
def test_equal_specs_give_equal_children_with_our_labels_and_owner(spec: dict[str, Any]) -> None:
    first = list(desire(**spec).children)
    second = list(desire(**json.loads(json.dumps(spec))).children)
    assert first == second
    assert json.loads(json.dumps(first)) == first, "only what JSON can say, no None that would become null"
    assert "null" not in json.dumps(first)
    for child in first:
        assert child["metadata"]["labels"] == names.child_labels("qwen")
        assert [o["uid"] for o in child["metadata"]["ownerReferences"]] == [OWNER.uid]
    ids = [(child["kind"], child["metadata"]["name"]) for child in first]
    assert len(set(ids)) == len(ids)


@given(specs)
def test_a_deployment_never_carries_replicas_by_itself(spec: dict[str, Any]) -> None:
    deployment = next(c for c in desire(**spec).children if c["kind"] == "Deployment")
    assert "replicas" not in deployment["spec"]
    assert "replicas" not in with_replicas(deployment, Replicas(None))["spec"]
    assert with_replicas(deployment, Replicas(3))["spec"]["replicas"] == 3
