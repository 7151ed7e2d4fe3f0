"""Tests `kubectl conveyor check`, as in docs/install.md, on a real API server without and with the prerequisites."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.operator import scaled_objects

from conveyor_api import names
from conveyor_kubectl.cluster import Cluster
from conveyor_kubectl.command import main
from conveyor_kubectl.prerequisites import OLDEST_KUBERNETES, Verdict, check
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions
from e2e.cluster.paths import REPOSITORY


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as started:
        yield started


def find(kubeconfig: Path) -> dict[str, tuple[Verdict, str]]:
    return {each.subject: (each.verdict, each.sentence) for each in check(Cluster(str(kubeconfig), None))}


def build_class(name: str, **annotations: str) -> dict[str, object]:
    return {"metadata": {"name": name, "annotations": annotations}, "provisioner": "example.com/disks"}


@pytest.mark.slow
def test_what_a_cluster_has_is_reported(plane: ControlPlane, capsys: pytest.CaptureFixture[str]) -> None:
    bare = find(plane.kubeconfig)
    assert re.fullmatch(r"v1\.\d+\.\d+; 1\.34 or newer is needed", bare["Kubernetes"][1])
    assert bare["rights"][0] is Verdict.GOOD
    assert bare["GPUs"] == (Verdict.LOOK, "none of 0 nodes offers nvidia.com/*; GPUs need their vendor's device plugin")
    assert bare["custom.metrics.k8s.io"] == (Verdict.GOOD, "not registered yet; Conveyor registers it")
    assert bare["KEDA"] == (Verdict.GOOD, "not installed; only services with autoscaling.provider: KEDA need it")
    assert bare["StorageClass"][0] is Verdict.LOOK
    assert bare["CRD"] == (Verdict.GOOD, "not installed yet; the chart installs it")
    provide(Api(plane.kubeconfig))
    found = find(plane.kubeconfig)
    assert found["GPUs"] == (Verdict.GOOD, "8 nvidia.com/gpu on 1 of 2 nodes")
    assert found["custom.metrics.k8s.io"] == (
        Verdict.LOOK,
        "monitoring/adapter serves it, and Conveyor does not replace it; set autoscaling.provider: KEDA or External",
    )
    assert found["KEDA"] == (Verdict.GOOD, "installed; services with autoscaling.provider: KEDA can use it")
    assert found["StorageClass"] == (Verdict.GOOD, "fast is the default")
    assert found["CRD"] == (Verdict.GOOD, "the same as in this release")
    assert main(["check", f"--kubeconfig={plane.kubeconfig}"]) == 0
    assert "ok     GPUs                    8 nvidia.com/gpu" in capsys.readouterr().out


def provide(api: Api) -> None:
    """Create two nodes, another adapter, KEDA's definition, storage, and this release's CRD."""
    for name, capacity in (("with-gpus", {"nvidia.com/gpu": "8"}), ("without", {"cpu": "4"})):
        api.create("/api/v1/nodes", {"metadata": {"name": name}})
        status = {"status": {"capacity": capacity, "allocatable": capacity}}
        api.call("PATCH", f"/api/v1/nodes/{name}/status", status, "application/merge-patch+json")
    service = {"name": "adapter", "namespace": "monitoring"}
    spec = {"group": names.METRICS_GROUP, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100}
    more = {"service": service, "insecureSkipTLSVerify": True}
    api_service = {"metadata": {"name": f"v1beta1.{names.METRICS_GROUP}"}, "spec": spec | more}
    api.create("/apis/apiregistration.k8s.io/v1/apiservices", api_service)
    scaled_objects.install(api)
    is_default = {"storageclass.kubernetes.io/is-default-class": "true"}
    for one in (build_class("slow"), build_class("fast", **is_default)):
        api.create("/apis/storage.k8s.io/v1/storageclasses", one)
    install_definitions(api)


def test_a_crd_of_another_release_is_reported(plane: ControlPlane) -> None:
    api = Api(plane.kubeconfig)
    install_definitions(api)
    older = {"op": "remove", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/profile"}
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.CRD_NAME}"
    api.patch_json(path, [older])
    assert find(plane.kubeconfig)["CRD"][0] is Verdict.LOOK
    install_definitions(api)


def test_a_user_without_rights_gets_a_clear_error(plane: ControlPlane, capsys: pytest.CaptureFixture[str]) -> None:
    plane.issue_kubeconfig("nobody", "nobody")
    kubeconfig = plane.folder / "nobody.kubeconfig"
    found = find(kubeconfig)
    assert found["rights"][0] is Verdict.MISSING
    assert "customresourcedefinitions, clusterroles, clusterrolebindings, deployments" in found["rights"][1]
    assert found["GPUs"][0] is Verdict.LOOK
    assert found["GPUs"][1].startswith("cannot be read: nodes is forbidden")
    assert main(["check", f"--kubeconfig={kubeconfig}"]) == 1
    assert "missing" in capsys.readouterr().out


def test_the_oldest_kubernetes_is_the_charts() -> None:
    chart = yaml.safe_load((REPOSITORY / "charts" / "conveyor" / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST_KUBERNETES[0]}.{OLDEST_KUBERNETES[1]}.0-0"
