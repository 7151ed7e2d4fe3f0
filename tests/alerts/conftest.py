"""Runs the programs whose metrics the alerts and the dashboard use: gateway, operator and metrics server."""

from collections.abc import Iterator

import pytest
from tests.contract.conftest import space, stage
from tests.gateway.cluster import publish_gateway
from tests.gateway.process import GatewayProcess
from tests.metrics.conftest import aggregated, metrics_plane, own_address, start_gateway
from tests.operator.stage import Space

from e2e.cluster.control_plane import ControlPlane

__all__ = ["aggregated", "metrics_plane", "own_address", "space", "stage", "start_gateway"]

CLIENT_HEADER = "X-Client"


@pytest.fixture
def gateway(control_plane: ControlPlane, space: Space) -> Iterator[GatewayProcess]:
    """A gateway that the operator finds, behind a proxy that names the clients."""
    flags = ("--host", "", "--watch-namespaces", space.namespace, "--drain-delay-seconds", "0")
    named = ("--trusted-proxies", "127.0.0.0/8", "--client-header", CLIENT_HEADER)
    with GatewayProcess(control_plane.kubeconfig, *flags, *named) as gateway:
        publish_gateway(space.api, space.namespace, "one", gateway.admin_port)
        yield gateway
