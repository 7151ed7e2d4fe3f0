"""Applies Kyverno's policies to what docs/governed.md installs."""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from tests.chart.conftest import build_restricted_labels
from tests.chart.installation import CHART, RELEASE, AuditedControlPlane, Json, find, helm, render
from tests.chart.policies import Breach, Judge, best_practices, pod_security
from tests.operator.builders import NOW, SETTINGS

from conveyor_api import names
from conveyor_api.names import SYSTEM_NAMESPACE
from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.desired import build_desired
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.profiles import Profiles
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.settings import Settings
from e2e.cluster.api import Api, wait_until
from e2e.cluster.paths import REPOSITORY

pytestmark = pytest.mark.nightly

PAGE = (REPOSITORY / "docs/governed.md").read_text()
VALUES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
ROW = re.compile(r"^\| (`.+?) \| (`.+?) \| .+ \|$", re.MULTILINE)
NAMESPACE = "team-a"
HUB = "hf://example/model"
CACHE = {"strategy": "PVC", "size": "10Gi", "prewarm": True, "storageClassName": "fast"}
DIGEST = "@sha256:" + "0" * 64
SERVICES: dict[str, Json] = {
    "plain": {"model": {"uri": HUB}},
    "prewarmed": {"model": {"uri": HUB, "cache": CACHE, "secretRef": {"name": "hub"}}},
    "volume": {"model": {"uri": "pvc://models/demo"}},
    "image": {"model": {"uri": f"oci://registry.example.com/models/demo{DIGEST}"}},
    "vllm": {
        "model": {"uri": HUB},
        "runtime": "VLLM",
        "engine": {"image": f"registry.example.com/vllm{DIGEST}"},
    },
    "scaled": {"model": {"uri": HUB}, "autoscaling": {"minReplicas": 2, "maxReplicas": 4}},
}
BAD_POD: Json = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "bad", "namespace": "default"},
    "spec": {
        "hostNetwork": True,
        "containers": [
            {"name": "a", "image": "busybox:latest", "securityContext": {"privileged": True, "runAsUser": 0}}
        ],
        "volumes": [{"name": "a", "hostPath": {"path": "/"}}],
    },
}


@pytest.fixture(scope="module")
def judge(chart_plane: AuditedControlPlane) -> Iterator[Judge]:
    """Kyverno's policies in a cluster that also enforces `restricted`, equal requests and limits, and a quota."""
    api = Api(chart_plane.kubeconfig)
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": build_restricted_labels()}})
    for namespace in (NAMESPACE, SYSTEM_NAMESPACE):
        path = f"/api/v1/namespaces/{namespace}"
        ratio = {"type": "Container", "maxLimitRequestRatio": {"cpu": "1", "memory": "1", "ephemeral-storage": "1"}}
        api.create(f"{path}/limitranges", {"metadata": {"name": "equal"}, "spec": {"limits": [ratio]}})
        hard = {"limits.cpu": "100", "limits.memory": "1Ti", "requests.ephemeral-storage": "1Ti"}
        api.create(f"{path}/resourcequotas", {"metadata": {"name": "quota"}, "spec": {"hard": hard}})
        wait_until("the default account", lambda: api.reachable(f"{path}/serviceaccounts/default"))  # noqa: B023
    mine = {"metadata": {"name": "inference"}, "value": 1000}
    for priority in (mine, find(render(), "PriorityClass", "conveyor")):
        api.create("/apis/scheduling.k8s.io/v1/priorityclasses", priority)
    with closing(Judge(chart_plane.kubeconfig, pod_security() | best_practices())) as judge:
        wait_until("the policies", lambda: len({each.policy for each in judge.find_breaches([BAD_POD])}) > 15)
        yield judge


def governed(folder: Path) -> list[Json]:
    """Return the chart's objects with the page's values, those of services with its profile, and their pods."""
    values = folder / "values.yaml"
    values.write_text(VALUES)
    chart = helm("template", RELEASE, CHART, "--namespace", SYSTEM_NAMESPACE, "--values", values)
    objects = [each for each in yaml.load_all(chart, yaml.CSafeLoader) if each]
    (image,) = re.findall(r"--engine-image=(\S+)", chart)
    for name, spec in SERVICES.items():
        objects += children(name, spec, replace(SETTINGS, engine_image=image))
    return [*objects, *(pod_of(each) for each in objects if "template" in each.get("spec", {}))]


def children(name: str, spec: Json, settings: Settings) -> Iterator[Json]:
    """Yield what the operator creates for a service with the page's profile."""
    metadata = {"name": name, "namespace": NAMESPACE, "uid": "uid", "generation": 1}
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": gpu | spec}
    filled, _ = Profiles(yaml.safe_load(VALUES)["profiles"]).fill(body)
    service = InferenceService.parse(filled)
    for child in build_desired(service, settings, Observed(), PodStarts(), NOW).children:
        replicas = spec.get("autoscaling", {}).get("minReplicas", 1)
        yield child | ({"spec": {"replicas": replicas, **child["spec"]}} if child["kind"] == "Deployment" else {})


def pod_of(workload: Json) -> Json:
    """Return a pod of a Deployment or Job. The workload and the pod's ServiceAccount are not there."""
    template, owner = workload["spec"]["template"], workload["metadata"]
    metadata = template["metadata"] | {"name": owner["name"], "namespace": owner.get("namespace", SYSTEM_NAMESPACE)}
    metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": workload["kind"], "name": owner["name"], "uid": "uid"}]
    spec = template["spec"] | {"serviceAccountName": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_what_breaks_a_policy_is_explained(judge: Judge, tmp_path: Path) -> None:
    breaches = judge.find_breaches(governed(tmp_path))
    rows = {
        Breach(policy, each)
        for policies, objects in ROW.findall(PAGE)
        for policy in re.findall(r"`(.+?)`", policies)
        for each in re.findall(r"`(.+?)`", objects)
    }
    used = {row for row in rows for breach in breaches if matches(row, breach)}
    assert not [breach for breach in sorted(breaches) if not any(matches(row, breach) for row in rows)]
    assert used == rows, "a row of the page that nothing needs"


def matches(row: Breach, breach: Breach) -> bool:
    return row.policy == breach.policy and fnmatch(breach.object, row.object)
