"""Replaces the authority of a cluster, with every certificate that it signed, while operator and gateway run.

They connect as in a pod: with a token, and with the authority in a file, which the kubelet writes again later.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.pod import Pod
from tests.faults.stand import OperatorProcess
from tests.gateway.process import GatewayProcess
from tests.operator.stage import Space, wait_until

from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

NAMESPACE = "team"


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
