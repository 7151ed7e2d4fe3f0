"""Tests whom spread constraints and pod terms without a label selector mean, also with Kubernetes' own scheduler."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.test_pages import read_blocks
from tests.operator.builders import build_one
from tests.operator.stage import Stage, wait_until

from conveyor_api import names
from conveyor_operator.inferenceservice.profiles import Profiles
from e2e.cluster import programs
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane

Json = dict[str, Any]

REQUIRED, PREFERRED = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))
EVICTABLE = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
ENGINES = {"matchLabels": {names.INFERENCE_SERVICE_LABEL: "qwen"}}
OTHERS = {"matchLabels": {"app": "other"}}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
HOST: Json = {"topologyKey": "kubernetes.io/hostname"}
SHARED_CACHE = {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "10Gi", "prewarm": True}}


def pods_of(kind: str, **spec: Any) -> Json:
    return dict(build_one(kind, **spec)["spec"]["template"]["spec"])


@pytest.mark.parametrize(
    ("given", "meant"), [({}, ENGINES), ({"labelSelector": OTHERS}, OTHERS), ({"labelSelector": {}}, {})]
)
def test_without_a_selector_the_service_s_engines_are_meant(given: Json, meant: Json) -> None:
    spread, term, selector = SPREAD | given, HOST | given, {"labelSelector": meant}
    preference = {"weight": 7, "podAffinityTerm": term}
    rules = {REQUIRED: [term], PREFERRED: [preference]}
    nodes = {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": {"matchFields": []}}]}}
    pod = {"topologySpreadConstraints": [spread], "affinity": {"podAffinity": rules, "podAntiAffinity": rules} | nodes}
    found = pods_of("Deployment", pod=pod)
    assert found["topologySpreadConstraints"] == [SPREAD | selector]
    complete = {REQUIRED: [HOST | selector], PREFERRED: [{"weight": 7, "podAffinityTerm": HOST | selector}]}
    assert found["affinity"] == {"podAffinity": complete, "podAntiAffinity": complete} | nodes


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_job_that_fetches_the_model_keeps_no_distance_from_engines(replicas: int) -> None:
    """Else a cluster with an engine on each node, or a claim that only the engine's node mounts, has no node for it."""
    other = HOST | {"labelSelector": OTHERS}
    preference = {"weight": 7, "podAffinityTerm": HOST}
    near = {
        "podAntiAffinity": {REQUIRED: [HOST, other], PREFERRED: [preference]},
        "podAffinity": {PREFERRED: [preference]},
    }
    found = pods_of("Job", model=SHARED_CACHE, replicas=replicas, pod={"affinity": near})["affinity"]
    assert found["podAntiAffinity"] == {REQUIRED: [other], PREFERRED: []}
    assert found["podAffinity"][PREFERRED] == []


def test_the_profile_of_the_page_lets_every_volume_of_an_engine_go() -> None:
    """The Cluster Autoscaler keeps the node of a pod with a volume on the node that this annotation does not name."""
    values, service = read_blocks("docs/real-cluster.md", "Nodes that are added on demand")
    body = yaml.safe_load(service)
    adapters = [{"name": "a", "uri": "hf://example/adapter"}]
    for more in ({}, {"adapters": adapters, "model": {"uri": "pvc://models/demo"}}):
        spec = body["spec"] | more
        filled, _ = Profiles(yaml.safe_load(values)["profiles"]).fill(body | {"spec": spec})
        template = build_one("Deployment", **filled["spec"])["spec"]["template"]
        local = {volume["name"] for volume in template["spec"]["volumes"] if {"emptyDir", "hostPath"} & volume.keys()}
        assert local
        assert local <= set(template["metadata"]["annotations"][EVICTABLE].split(","))
        assert template["spec"]["topologySpreadConstraints"][0]["labelSelector"] == ENGINES


@contextmanager
def scheduling(control_plane: ControlPlane, name: str, folder: Path) -> Iterator[None]:
    """Run Kubernetes' scheduler, for pods with this schedulerName only."""
    client = {"kubeconfig": str(control_plane.issue_kubeconfig("scheduler", "system:kube-scheduler"))}
    file = folder / "scheduler.json"
    content = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": client,
        "profiles": [{"schedulerName": name}],
    }
    file.write_text(json.dumps(content))
    with (folder / "scheduler.log").open("w") as log:
        process = programs.start("kube-scheduler", f"--config={file}", "--secure-port=0", stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def nodes_of(api: Api, pool: str, **rooms: int) -> Iterator[None]:
    """Create a ready node in each zone, with room for so many pods. They have a label for the pool."""
    for zone, room in rooms.items():
        name = f"{zone}-{pool}"
        path, labels = f"/api/v1/nodes/{name}", {"zone": zone, "kubernetes.io/hostname": name, "pool": pool}
        api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        amounts = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "4Ti", "pods": str(room)}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]}
        api.call("PATCH", f"{path}/status", {"status": status}, "application/merge-patch+json")
        # The API server gives every new node the taint `not-ready`.
        api.call("PATCH", path, {"spec": {"taints": None}}, "application/merge-patch+json")
    yield
    for zone in rooms:
        api.delete(f"/api/v1/nodes/{zone}-{pool}")


@pytest.mark.parametrize(
    ("pod", "placed"),
    [
        ({"topologySpreadConstraints": [SPREAD]}, {"a": 2, "b": 1}),
        ({"affinity": {"podAntiAffinity": {REQUIRED: [HOST]}}}, {"a": 1, "b": 1}),
    ],
)
def test_the_scheduler_spreads_engines_as_a_profile_requests(
    stage: Stage, control_plane: ControlPlane, tmp_path: Path, pod: Json, placed: dict[str, int]
) -> None:
    """Zone b has room for one pod. Without the selector, all others would run in zone a."""
    space, file = stage.space, tmp_path / "profiles.yaml"
    shared = {"schedulerName": space.namespace, "nodeSelector": {"pool": space.namespace}}
    file.write_text(yaml.safe_dump({"spread": {"pod": shared | pod}}))

    def on_nodes() -> Counter[str]:
        """Return how many pods each zone has. "" is for pods that the scheduler has refused a node, for now."""
        pods = space.list("Pod")
        return Counter(
            pod["spec"].get("nodeName", "").partition("-")[0]
            for pod in pods
            if pod["spec"].get("nodeName") or "conditions" in pod["status"]
        )

    with (
        nodes_of(space.api, space.namespace, a=110, b=1),
        scheduling(control_plane, space.namespace, tmp_path),
        stage.operator(profiles=file),
    ):
        space.make_service(profile="spread", replicas=4, model={"uri": "hf://example/model"})
        expected = placed | {"": 4 - sum(placed.values())}
        wait_until("the pods are on the nodes where they should be", lambda: on_nodes() == expected, 60, on_nodes)
