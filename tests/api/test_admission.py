"""The CRD on a real API server: what is accepted, defaulted, updated, scaled and shown."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.api.bad_builders import SQL
from tests.api.builders import Json, build_body, build_full_body
from tests.api.conftest import Services, install
from tests.kubectl import kubectl

from conveyor_api import names
from conveyor_api.crd import build_crd
from conveyor_api.resource import InferenceService
from conveyor_api.status import (
    MAX_LISTED_ADAPTERS,
    Condition,
    EffectiveStatus,
    InferenceServiceStatus,
    LastFailure,
    ModelStatus,
)
from conveyor_api.text import MAX_MESSAGE_BYTES
from e2e.cluster.api import Api, ApiError, wait_until

NOW = "2026-01-02T03:04:05Z"


def build_status() -> InferenceServiceStatus:
    ready = Condition(
        type="Ready", status="True", reason="Ready", message="ok", observed_generation=1, last_transition_time=NOW
    )
    return InferenceServiceStatus(
        observed_generation=1,
        conditions=[ready],
        replicas=3,
        ready_replicas=2,
        desired_replicas=4,
        selector=names.pod_selector_string("qwen"),
        url="http://conveyor-gateway/default/qwen/v1",
        effective=EffectiveStatus(mode="Dynamic"),
        model=ModelStatus(task="Rerank"),
        last_failure=LastFailure(reason="OOMKilled", pod_name="qwen-engine-0", exit_code=137, time=NOW),
    )


def test_the_crd_is_structural_and_established(api: Api, crd: Json) -> None:
    live = api.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.CRD_NAME}")
    conditions = {condition["type"]: condition["status"] for condition in live["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}  # no NonStructuralSchema among them


@pytest.mark.parametrize(
    "body",
    [
        build_body(),
        build_body("q"),
        build_body("q" * 40),
        build_body(model={"uri": "hf://a/b.c_d-e@v1.0"}),
        build_body(model={"uri": "pvc://models.team-a/llms/qwen@2/model=8b+chat"}),
        build_body(batching={"mode": "None", "maxBatchTokens": 8}),
        build_body(batching={"mode": "Static", "window": "1h"}),
        build_body(batching={"mode": "Dynamic", "window": "1ms"}),
        build_body(kvCache={"memoryPercent": 50, "blockSize": 128}),
        build_body(kvCache={"blockBudget": 256}, engine={"maxModelLen": 4096}),
        build_body(model={"uri": "hf://a/b", "cache": {"strategy": "EmptyDir", "size": 1_000_000}}),
        build_body(rollout={"maxSurge": "50%", "maxUnavailable": "0%"}),
        build_body(autoscaling={"minReplicas": 4, "maxReplicas": 4}),
        build_body(autoscaling={"minReplicas": 0, "maxReplicas": 1}),
        build_body(autoscaling={"minReplicas": 0, "maxReplicas": 1, "idleTimeout": "168h"}),
        build_body(replicas=0),
        build_body(resources={"requests": dict.fromkeys("abcdefg", 1), "limits": dict.fromkeys("abcdefghij", 1)}),
        build_body(queue={"timeout": "1h"}, requestTimeout="24h", drain={"timeout": "0s"}),
        build_body(runtime="VLLM", engine={"image": "vllm/vllm-openai:v1", "args": ["--enable-lora", "--seed=1"]}),
        build_body(adapters=[]),
        build_body(adapters=[{"name": "a", "uri": "oci://a/b:1//c"}, {"name": "B.1_2-c", "uri": "s3://abc/b"}]),
        build_body(adapters=[SQL], resources={"limits": {"nvidia.com/gpu": "1"}}),
        build_body(adapters=[SQL], resources={"limits": {"nvidia.com/gpu": 2}}, engine={"tensorParallelSize": 1}),
        build_body(adapters=[SQL], resources={"limits": {"nvidia.com/mig-1g.5gb": 2}}),
        build_full_body(),
    ],
    ids=lambda body: f"{body['metadata']['name'][:8]} {', '.join(body['spec'])}",
)
def test_a_good_resource_is_accepted_and_defaulted_as_the_parser_does(body: Json, services: Services) -> None:
    answer = services.create(body)
    assert InferenceService.parse(answer).spec == InferenceService.parse(body).spec


def test_the_defaults_stand_in_the_answer(services: Services) -> None:
    answer = services.create(build_body(autoscaling={"maxReplicas": 4}))
    assert answer["spec"] == {
        "model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": {"strategy": "EmptyDir"}},
        "listed": False,
        "runtime": "Conveyor",
        "engine": {
            "device": "CUDA",
            "dtype": "Auto",
            "maxQueuedRequests": 256,
            "startupTimeout": "30m",
            "samplingDefaults": "Model",
            "toolParser": "Auto",
            "reasoningParser": "Auto",
        },
        "batching": {"lengthGrouping": "Auto", "eager": False},
        "kvCache": {"blockSize": 16, "dtype": "Auto"},
        "queue": {"maxRequests": 1024, "timeout": "60s", "order": "FIFO"},
        "requestTimeout": "10m",
        "autoscaling": {
            "provider": "Native",
            "minReplicas": 1,
            "maxReplicas": 4,
            "targetUtilizationPercent": 75,
        },
        "drain": {"timeout": "2m"},
    }


def test_every_field_is_kept(services: Services) -> None:
    body = build_full_body()
    assert services.create(body)["spec"] == body["spec"]


def test_an_update_is_held_to_the_same_rules(services: Services) -> None:
    services.create(build_body(batching={"mode": "Dynamic", "window": "5ms"}))
    with pytest.raises(ApiError, match="window is only for modes Static and Dynamic"):
        services.merge("qwen", {"spec": {"batching": {"mode": "Continuous"}}})
    services.merge("qwen", {"spec": {"batching": {"mode": "Continuous", "window": None}}})


def test_a_resource_from_before_a_rule_can_still_be_updated_elsewhere(api: Api, namespace: str) -> None:
    """Ratcheting: what was accepted once stays until it is touched. Tried on a copy of the CRD in another group."""
    crd = build_crd()
    crd["metadata"]["name"], crd["spec"]["group"] = "inferenceservices.ratchet.test", "ratchet.test"
    batching = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["batching"]
    rules = batching.pop("x-kubernetes-validations")
    install(api, crd)
    services = Services(api, namespace, "ratchet.test")
    body = build_body(batching={"window": "10ms"}) | {"apiVersion": f"ratchet.test/{names.VERSION}"}
    services.create(body)

    batching["x-kubernetes-validations"] = rules
    install(api, crd)
    wait_until("the new rule", lambda: not services.would_create(body | {"metadata": {"name": "new"}}))

    services.merge("qwen", {"spec": {"replicas": 2}})
    assert services.get("qwen")["spec"]["batching"]["window"] == "10ms"


def test_scale_reads_and_writes_replicas(services: Services) -> None:
    services.create(build_body(replicas=1))
    services.merge("qwen", {"status": build_status().to_manifest()}, "/status")
    scale = services.get("qwen", "/scale")
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 3, "selector": "conveyor.dev/inference-service=qwen"}

    services.merge("qwen", {"spec": {"replicas": 5}}, "/scale")
    assert services.get("qwen")["spec"]["replicas"] == 5


def test_scaling_by_hand_is_refused_with_a_sentence_while_an_autoscaler_does_it(
    services: Services, kubeconfig: Path, namespace: str
) -> None:
    services.create(build_body(autoscaling={"maxReplicas": 4}))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        kubectl(kubeconfig, namespace, "scale", "infsvc/qwen", "--replicas=2")
    assert "change autoscaling.minReplicas and autoscaling.maxReplicas" in caught.value.stderr
    with pytest.raises(ApiError, match="the HorizontalPodAutoscaler sets the replicas"):
        services.merge("qwen", {"spec": {"replicas": 2}})
    services.merge("qwen", {"spec": {"replicas": 2, "autoscaling": None}})
    services.merge("qwen", {"spec": {"replicas": 3}}, "/scale")
    assert services.get("qwen")["spec"]["replicas"] == 3, "without an autoscaler it is the number of engines"
    services.merge("qwen", {"spec": {"replicas": None, "autoscaling": {"maxReplicas": 4}}})


def test_an_edit_that_the_model_cannot_follow_is_refused_once_its_limit_is_known(services: Services) -> None:
    too_long, too_small = {"engine": {"maxModelLen": 4096}}, {"kvCache": {"blockBudget": 63}}
    uri = services.create(build_body())["spec"]["model"]["uri"]
    services.merge("qwen", {"spec": too_long})
    services.merge("qwen", {"spec": {"engine": {"maxModelLen": None}}})
    services.merge("qwen", {"status": {"model": {"uri": uri, "contextLength": 1024}}}, "/status")

    with pytest.raises(ApiError, match="maxModelLen exceeds the context length of the model"):
        services.merge("qwen", {"spec": too_long})
    with pytest.raises(ApiError, match="less than the context length of the model"):
        services.merge("qwen", {"spec": too_small})
    services.merge("qwen", {"spec": {"engine": {"maxModelLen": 1024}, "kvCache": {"blockBudget": 64}}})
    services.merge("qwen", {"spec": {"engine": {"maxModelLen": 512}, "kvCache": {"blockBudget": 32}}})
    with pytest.raises(ApiError, match="less than the context length of the model"):
        services.merge("qwen", {"spec": {"engine": {"maxModelLen": None}}})
    services.merge("qwen", {"spec": {"engine": {"maxModelLen": None}, "workload": lengths(512)}})
    with pytest.raises(ApiError, match=r"spec\.workload exceed the context length of the model"):
        services.merge("qwen", {"spec": {"kvCache": {"blockBudget": 128}, "workload": lengths(1025)}})
    services.merge("qwen", {"spec": {"engine": {"maxModelLen": 512}, "workload": None}})
    services.merge(
        "qwen", {"spec": too_long | {"model": {"uri": "hf://example/longer"}, "kvCache": {"blockBudget": 256}}}
    )


def lengths(p95: int) -> dict[str, object]:
    """Of requests with answers of at most 10 tokens, which engines size themselves by."""
    return {"inputTokens": {"p50": 10, "p95": p95 - 10}, "outputTokens": {"p50": 5, "p95": 10}}


def test_a_limit_that_becomes_known_too_late_stops_neither_status_nor_other_edits(services: Services) -> None:
    uri = services.create(build_body(engine={"maxModelLen": 4096}))["spec"]["model"]["uri"]
    services.merge("qwen", {"status": {"model": {"uri": uri, "contextLength": 1024}}}, "/status")
    services.merge("qwen", {"status": {"replicas": 1}}, "/status")
    services.merge("qwen", {"spec": {"replicas": 2}})
    with pytest.raises(ApiError, match="set at most that"):
        services.merge("qwen", {"spec": {"engine": {"maxModelLen": 2048}}})
    services.merge("qwen", {"spec": {"engine": {"maxModelLen": 1024}}})


def test_a_claim_for_one_pod_keeps_its_service_at_one(services: Services) -> None:
    cache = {"strategy": "PVC", "size": "10Gi"}
    services.create(build_body(model={"uri": "hf://a/b", "cache": cache}))
    services.merge("qwen", {"status": {"effective": {"cacheAccessMode": "ReadWriteOnce"}}}, "/status")
    more = ({"replicas": 2}, {"autoscaling": {"maxReplicas": 2}}, {"rollout": {"maxSurge": 1}})
    for spec in more:
        with pytest.raises(ApiError, match="was made for one pod"):
            services.merge("qwen", {"spec": spec})
    services.merge("qwen", {"spec": {"replicas": 0}})
    services.merge("qwen", {"spec": {"model": {"cache": {"size": None, "claimName": "shared"}}, "replicas": 2}})


@pytest.mark.parametrize("mode", ["ReadWriteMany", None])
def test_a_service_whose_claim_many_pods_may_have_grows(services: Services, mode: str | None) -> None:
    services.create(build_body(model={"uri": "hf://a/b", "cache": {"strategy": "PVC", "size": "10Gi"}}))
    services.merge("qwen", {"status": {"effective": {"cacheAccessMode": mode}}}, "/status")
    services.merge("qwen", {"spec": {"replicas": 2, "rollout": {"maxSurge": 1}}})


def test_a_claim_that_is_there_only_grows_and_keeps_its_class(services: Services) -> None:
    cache = {"strategy": "PVC", "size": "10Gi", "storageClassName": "fast"}
    services.create(build_body(model={"uri": "hf://a/b", "cache": cache}))
    services.merge("qwen", {"spec": {"model": {"cache": {"size": "20Gi"}}}})
    with pytest.raises(ApiError, match="can only grow"):
        services.merge("qwen", {"spec": {"model": {"cache": {"size": "19Gi"}}}})
    for other in ("slow", None):
        with pytest.raises(ApiError, match="storageClassName of an existing claim cannot change"):
            services.merge("qwen", {"spec": {"model": {"cache": {"storageClassName": other}}}})
    services.merge("qwen", {"spec": {"model": {"cache": None}}})
    services.merge("qwen", {"spec": {"model": {"cache": {"strategy": "PVC", "size": "1Gi"}}}})


def test_status_is_kept_whole_and_does_not_touch_the_spec(services: Services) -> None:
    created = services.create(build_body())
    status = build_status()
    answer = services.merge("qwen", {"status": status.to_manifest(), "spec": {"replicas": 9}}, "/status")
    assert answer["metadata"]["generation"] == created["metadata"]["generation"]
    assert "replicas" not in answer["spec"]
    assert InferenceService.parse(answer).status == status


def test_a_change_of_the_resource_does_not_touch_the_status(services: Services) -> None:
    services.create(build_body())
    unseen = {"observedGeneration": -1}
    assert services.merge("qwen", {"status": {"replicas": 7}})["status"] == unseen


def test_two_conditions_of_one_type_are_refused(services: Services) -> None:
    services.create(build_body())
    condition = build_status().conditions[0].to_manifest()
    with pytest.raises(ApiError, match="Duplicate value"):
        services.merge("qwen", {"status": {"conditions": [condition, condition]}}, "/status")


def test_json_of_any_depth_is_dropped_where_it_is_not_refused(api: Api, namespace: str) -> None:
    deep: Json = {}
    for _ in range(400):
        deep = {"a": deep}
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}?fieldValidation=Ignore"
    made = api.create(path, build_body(pod={"affinity": deep, "topologySpreadConstraints": []}))
    assert made["spec"]["pod"] == {"affinity": {}, "topologySpreadConstraints": []}


def test_a_thousand_adapters_with_a_full_status_fit_into_one_object(services: Services) -> None:
    name, path = "adapter-of-team-{:04}", "pvc://adapters/teams/some-team/adapters/of-a-long-name/{:04}"
    body = build_body(adapters=[{"name": name.format(n), "uri": path.format(n)} for n in range(1000)])
    created = services.create(body)
    assert len(created["spec"]["adapters"]) == 1000
    failed = [
        {"name": name.format(n), "state": "Failed", "replicas": 0, "message": "x" * MAX_MESSAGE_BYTES}
        for n in range(MAX_LISTED_ADAPTERS)
    ]
    status = {"adapters": failed, "readyAdapters": 900}
    written = services.merge(created["metadata"]["name"], {"status": status}, "/status")
    assert len(json.dumps(written)) < 1 << 20


def test_a_field_with_a_typing_error_is_refused_only_for_clients_that_want_strict_validation(
    services: Services, api: Api, namespace: str
) -> None:
    body = build_body("typed", batching={"maxBatchsize": 3})
    with pytest.raises(ApiError, match=r"unknown field.*spec\.batching\.maxBatchsize"):
        services.create(body)
    api.create(f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.PLURAL}", body)
    assert "maxBatchsize" not in services.get("typed")["spec"]["batching"]


def test_scaling_by_hand_gives_a_service_its_number(services: Services, kubeconfig: Path, namespace: str) -> None:
    services.create(build_body())
    kubectl(kubeconfig, namespace, "scale", "infsvc/qwen", "--replicas=2")
    assert services.get("qwen", "/scale")["spec"] == {"replicas": 2}


def test_kubectl_shows_the_columns(services: Services, kubeconfig: Path, namespace: str) -> None:
    services.create(build_body())
    services.merge("qwen", {"status": build_status().to_manifest()}, "/status")
    header, line = kubectl(kubeconfig, namespace, "get", names.SHORT_NAME).splitlines()
    assert header.split() == ["NAME", "READY", "REASON", "MODEL", "REPLICAS", "READYREPLICAS", "DESIRED", "AGE"]
    assert line.split()[:-1] == ["qwen", "True", "Ready", "hf://Qwen/Qwen3-0.6B", "3", "2", "4"]

    header, line = kubectl(kubeconfig, namespace, "get", names.SHORT_NAME, "--output=wide").splitlines()
    assert {"TASK", "MODE", "URL"} < set(header.split())
    assert {"Rerank", "Dynamic"} < set(line.split())
    assert "http://conveyor-gateway/default/qwen/v1" in line


def test_kubectl_get_all_leaves_services_of_models_out(services: Services, kubeconfig: Path, namespace: str) -> None:
    services.create(build_body())
    assert kubectl(kubeconfig, namespace, "get", "all") == ""


def test_kubectl_waits_for_ready(services: Services, kubeconfig: Path, namespace: str) -> None:
    services.create(build_body())
    services.merge("qwen", {"status": build_status().to_manifest()}, "/status")
    assert "condition met" in kubectl(kubeconfig, namespace, "wait", "--for=condition=Ready", "infsvc/qwen")


def test_kubectl_explains_each_field(crd: Json, kubeconfig: Path) -> None:
    text = kubectl(kubeconfig, "default", "explain", "infsvc.spec.batching")
    assert "Mode None always runs one." in " ".join(text.split())


def test_kubectl_apply_refuses_an_unknown_field(crd: Json, kubeconfig: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "service.yaml"
    manifest.write_text(yaml.safe_dump(build_body(batchng={"mode": "Static"})))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        kubectl(kubeconfig, "default", "apply", "--filename", str(manifest))
    assert 'unknown field "spec.batchng"' in caught.value.stderr


def test_entries_of_env_merge_by_name(services: Services, kubeconfig: Path, namespace: str, tmp_path: Path) -> None:
    for manager, name in (("one", "A"), ("two", "B")):
        manifest = tmp_path / f"{manager}.yaml"
        manifest.write_text(yaml.safe_dump(build_body(pod={"env": [{"name": name, "value": "1"}]})))
        kubectl(kubeconfig, namespace, "apply", "--server-side", f"--field-manager={manager}", "-f", str(manifest))
    assert [variable["name"] for variable in services.get("qwen")["spec"]["pod"]["env"]] == ["A", "B"]
