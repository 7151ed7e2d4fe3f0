"""Replaces the authority of a cluster, with every certificate that it signed, while a metrics server runs."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.faults.pod import Pod
from tests.metrics.aggregation import (
    Aggregated,
    DemandServer,
    register,
    running_server,
    write_serving_certificate,
)
from tests.metrics.test_app import build_demand

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e.cluster.api import Api, wait_until
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_the_metrics_server_follows_a_cluster_whose_authority_is_replaced(
    tmp_path: Path, start_gateway: Callable[[Any], DemandServer]
) -> None:
    """It trusts the new certificates of the API server, and those with which the API server calls it."""
    with ControlPlane() as plane:
        api = Api(plane.kubeconfig)
        api.create("/api/v1/namespaces", {"metadata": {"name": SYSTEM_NAMESPACE}})
        pod, authority = Pod(tmp_path, plane), Authority(tmp_path, "metrics-authority")
        write_serving_certificate(authority, tmp_path)
        from_pod = cast(ControlPlane, SimpleNamespace(kubeconfig=pod.kubeconfig))
        with running_server(from_pod, tmp_path) as (process, port, admin_port):
            before = Aggregated(plane, tmp_path, authority, port, admin_port, process)
            register(api, port, authority)
            before.set_gateways(start_gateway({"default/before": build_demand(3)}))
            wait_until("a value", lambda: before.code("before") == 200)
            plane.replace_authority()
            after = Aggregated(plane, tmp_path, authority, port, admin_port, process)
            log = tmp_path / "server.log"
            wait_until("it does not trust the new authority", lambda: "CERTIFICATE_VERIFY" in log.read_text())
            pod.write_authority()
            after.set_gateways(start_gateway({"default/after": build_demand(4)}))
            wait_until("a value of a new gateway", lambda: after.code("after") == 200)
            assert process.poll() is None
