"""Replaces the authority of a cluster, with every certificate that it signed, while operator and gateway run.

They connect as in a pod: with a token, and with the authority in a file, which the kubelet writes again later.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.stand import OperatorProcess
from tests.gateway.process import GatewayProcess
from tests.operator.stage import Space, wait_until

from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

NAMESPACE = "team"


class Pod:
    """The files that the kubelet gives a pod. `kubeconfig` refers to them."""

    def __init__(self, folder: Path, plane: ControlPlane) -> None:
        self._plane, self._file = plane, folder / "ca.crt"
        self.write_authority()
        api = Api(plane.kubeconfig)
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
        subjects = [{"kind": "ServiceAccount", "name": "default", "namespace": "default"}]
        bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
        api.create(bindings, {"metadata": {"name": "pod"}, "roleRef": role, "subjects": subjects})
        answer = api.create("/api/v1/namespaces/default/serviceaccounts/default/token", {"spec": {}})
        cluster = {"server": plane.server, "certificate-authority": str(self._file)}
        content = {
            "current-context": "pod",
            "contexts": [{"name": "pod", "context": {"cluster": "pod", "user": "pod"}}],
            "users": [{"name": "pod", "user": {"token": answer["status"]["token"]}}],
            "clusters": [{"name": "pod", "cluster": cluster}],
        }
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(content))

    def write_authority(self) -> None:
        self._file.write_bytes(self._plane.authority.certificate.read_bytes())


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as started:
        yield started


def test_a_cluster_whose_authority_is_replaced(tmp_path: Path, plane: ControlPlane) -> None:
    api = Api(plane.kubeconfig)
    install_definitions(api)
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    pod, space = Pod(tmp_path, plane), Space(api, NAMESPACE)
    operator = OperatorProcess(pod.kubeconfig, NAMESPACE, tmp_path / "operator.log")
    try:
        with GatewayProcess(pod.kubeconfig, "--watch-namespaces", NAMESPACE) as gateway:
            space.make_service("before")
            space.wait_observed("before")
            plane.replace_authority()
            space = Space(Api(plane.kubeconfig), NAMESPACE)
            wait_until(
                "the gateway does not trust it", lambda: any("CERTIFICATE_VERIFY" in line for line in gateway.log)
            )
            pod.write_authority()
            space.make_service("after")
            wait_until("it is reconciled", lambda: space.get("Deployment", "after-engine") is not None, 200)
            wait_until(
                "the gateway knows it", lambda: gateway.admin(f"/demand?service={NAMESPACE}/after")[0] == 200, 200
            )
            assert operator.alive
    finally:
        operator.kill()
