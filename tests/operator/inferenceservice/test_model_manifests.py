"""Tests how the model of a spec comes to its pods: the fetch, its credentials, the cache, and a mounted claim."""

from typing import Any

import pytest
from tests.operator.builders import SCRATCH, build, build_config, build_container, build_template


def test_a_hub_model_is_fetched_into_the_cache_with_the_token_of_its_secret() -> None:
    model = {"uri": "hf://example/model@v1", "secretRef": {"name": "hub", "key": "mine"}}
    fetch = build_container("fetch", model=model)
    assert fetch["command"][-6:-2] == ["--uri", "hf://example/model@v1", "--target", "/models/hf/example/model/v1"]
    assert fetch["command"][-2:] == ["--credentials", "/etc/conveyor-credentials/hub"]
    assert fetch["volumeMounts"] == [{"name": "models", "mountPath": "/models"}, SCRATCH, credentials_mount("hub")]
    assert items_of_secret("hub", model=model) == [{"key": "mine", "path": "HF_TOKEN"}]
    assert "credentials" not in str(build_container("engine", model=model))


def test_a_draft_model_is_fetched_beside_the_model_with_the_same_secret() -> None:
    spec: dict[str, Any] = {
        "model": {"uri": "hf://example/model@v1", "secretRef": {"name": "hub"}},
        "speculation": {"method": "Draft", "draft": {"uri": "hf://example/small"}, "maxTokens": 4},
        "engine": {"device": "Auto"},
    }
    model, draft = build_template(**spec)["spec"]["initContainers"]
    assert draft["name"] == "fetch-draft"
    assert draft["command"][4:8] == ["--uri", "hf://example/small", "--target", "/models/hf/example/small/main"]
    assert {key for key in draft if draft[key] != model[key]} == {"name", "command", "volumeMounts"}
    found = build_config(**spec)
    assert (found["speculation"], found["draft_model"]) == ("draft", "/models/hf/example/small/main")
    assert found["speculation_tokens"] == 4


def test_a_draft_model_in_the_model_s_claim_is_in_its_mount() -> None:
    draft = {"method": "Draft", "draft": {"uri": "pvc://weights/small"}}
    spec: dict[str, Any] = {"model": {"uri": "pvc://weights/a"}, "speculation": draft, "engine": {"device": "Auto"}}
    assert build_config(**spec)["draft_model"] == "/models/pvc/small"
    assert len(build_template(**spec)["spec"]["volumes"]) == len(
        build_template(model={"uri": "pvc://weights/a"})["spec"]["volumes"]
    )


def test_a_bucket_s_model_is_fetched_into_the_cache_with_the_keys_of_its_secret() -> None:
    model = {"uri": "s3://models/team/qwen", "secretRef": {"name": "bucket"}}
    pod = {"env": [{"name": "AWS_ENDPOINT_URL", "value": "https://s3.example.com"}]}
    fetch = build_container("fetch", model=model, pod=pod)
    target = "/models/s3/models/team/qwen/~model"
    assert fetch["command"][-6:-2] == ["--uri", "s3://models/team/qwen", "--target", target]
    assert fetch["command"][-2:] == ["--credentials", "/etc/conveyor-credentials/bucket"]
    keys = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"]
    assert items_of_secret("bucket", model=model, pod=pod) == [{"key": key, "path": key} for key in keys]
    assert pod["env"][0] in fetch["env"]
    assert "credentials" not in str(build_container("engine", model=model, pod=pod))
    assert fetch["volumeMounts"] == [{"name": "models", "mountPath": "/models"}, SCRATCH, credentials_mount("bucket")]


def credentials_mount(secret: str) -> dict[str, Any]:
    path = f"/etc/conveyor-credentials/{secret}"
    return {"name": "conveyor-credentials-fetch", "mountPath": path, "readOnly": True}


def items_of_secret(name: str, **spec: Any) -> Any:
    (volume,) = (each["secret"] for each in build_template(**spec)["spec"]["volumes"] if "secret" in each)
    assert (volume["secretName"], volume["optional"]) == (name, True)
    return volume["items"]


def test_a_model_on_a_claim_is_mounted_for_reading_only() -> None:
    model = {"uri": "pvc://weights/a/b"}
    volume = next(v for v in build_template(model=model)["spec"]["volumes"] if v["name"] == "models")
    assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    assert build_container("fetch", model=model)["volumeMounts"] == [
        {"name": "models", "mountPath": "/models/pvc", "readOnly": True},
        SCRATCH,
    ]
    assert "fsGroup" not in build_template(model=model)["spec"]["securityContext"]
    assert build_config(model=model)["model"] == "/models/pvc/a/b"


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({}, {"emptyDir": {"sizeLimit": "200Gi"}}),
        ({"size": "10Gi"}, {"emptyDir": {"sizeLimit": "10Gi"}}),
        ({"strategy": "PVC", "claimName": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}),
        ({"strategy": "PVC", "size": "10Gi"}, {"persistentVolumeClaim": {"claimName": "qwen-models"}}),
    ],
)
def test_the_cache_is_where_the_spec_wants_it(cache: dict[str, Any], volume: dict[str, Any]) -> None:
    model = {"uri": "hf://example/model", "cache": cache}
    assert {"name": "models", **volume} in build_template(model=model)["spec"]["volumes"]
    assert (("PersistentVolumeClaim", "qwen-models") in build(model=model)) == (volume == {
        "persistentVolumeClaim": {"claimName": "qwen-models"}
    })  # fmt: skip


def test_the_fetch_requests_the_pods_share_without_devices() -> None:
    resources = {"requests": {"cpu": 2}, "limits": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": 1}}
    assert build_container("fetch", resources=resources)["resources"] == {
        "requests": {"cpu": 2},
        "limits": {"cpu": "4", "memory": "8Gi"},
    }
    assert build_container("engine", resources=resources)["resources"]["limits"]["nvidia.com/gpu"] == 1
