"""Tests what the operator gives engines that answer only gateways: accounts, the cluster's keys, and their mount."""

import json
from datetime import UTC, datetime
from typing import Any

from tests.kubectl import kubectl
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Json, Stage, make_service, wait_until

from conveyor_api.resource import InferenceService
from conveyor_kube.issuer import KEYS_PATH, Issuer
from conveyor_operator.inferenceservice.desired import build_desired
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.settings import Settings
from e2e.cluster.control_plane import ControlPlane

KEY = {"kid": "a", "kty": "RSA", "alg": "RS256", "n": "x", "e": "AQAB"}


def build_children(issuer: Issuer | None, **spec: Any) -> dict[str, Json]:
    body = make_service(**spec)
    body["metadata"] |= {"namespace": "team", "uid": "1", "generation": 1}
    service = InferenceService.parse(body)
    settings = Settings(gateway_account="gate")
    starts = PodStarts(service.status, [])
    desired = build_desired(service, settings, Observed(), starts, datetime.now(UTC), issuer=issuer)
    return {f"{child['kind']}/{child['metadata']['name']}": child for child in desired.children}


def test_engines_get_the_accounts_and_keys_as_a_file() -> None:
    plain, children = build_children(None), build_children(Issuer("https://issuer", (KEY,)))
    assert children.keys() - plain.keys() == {"ConfigMap/qwen-engine-callers"}
    content = json.loads(children["ConfigMap/qwen-engine-callers"]["data"]["callers.json"])
    accounts = ["system:serviceaccount:conveyor-system:gate", "system:serviceaccount:team:qwen-engine"]
    assert content == {"issuer": "https://issuer", "audience": "conveyor/team", "accounts": accounts, "keys": [KEY]}
    pod = children["Deployment/qwen-engine"]["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    assert {"name": "conveyor-callers", "configMap": {"name": "qwen-engine-callers"}} in pod["volumes"]
    mount = {"name": "conveyor-callers", "mountPath": "/etc/conveyor-callers", "readOnly": True}
    assert mount in engine["volumeMounts"]
    file = {"name": "CONVEYOR_ENGINE_CALLERS_FILE", "value": "/etc/conveyor-callers/callers.json"}
    assert file in engine["env"]
    assert "ServiceAccount/qwen-engine" in children


def test_new_keys_change_no_pod() -> None:
    first, second = (build_children(Issuer("https://issuer", (KEY | {"kid": kid},))) for kid in "ab")
    assert {name for name in first if first[name] != second[name]} == {"ConfigMap/qwen-engine-callers"}


def test_vllm_stays_open() -> None:
    spec = {"runtime": "VLLM", "engine": {"image": "vllm/vllm-openai:v1"}}
    assert build_children(Issuer("https://issuer", (KEY,)), **spec) == build_children(None, **spec)


def test_an_operator_writes_the_keys_that_the_cluster_publishes(stage: Stage, control_plane: ControlPlane) -> None:
    space = stage.space
    published = json.loads(kubectl(control_plane.kubeconfig, space.namespace, "get", "--raw", KEYS_PATH))

    def find_callers() -> list[Json]:
        return [each for each in space.list("ConfigMap") if each["metadata"]["name"] == "qwen-engine-callers"]

    with Kubelet(space, ready):
        with stage.operator(gateway_account="conveyor-gateway"):
            space.make_service()
            space.wait_condition("qwen", "Ready", "True", "Ready")
            (made,) = find_callers()
            assert json.loads(made["data"]["callers.json"])["keys"] == published["keys"]
        with stage.operator():
            wait_until("their end", lambda: not find_callers(), 60)
