"""Starts the metrics server behind the aggregation layer of a separate real API server, and gateways that it reads.

The control plane is not the session's: while an APIService is down, namespaces of the whole cluster cannot end.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.metrics.aggregation import (
    Aggregated,
    DemandServer,
    register,
    running_server,
    unregister,
    write_serving_certificate,
)

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e.cluster.api import Api
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane

Json = dict[str, Any]


@pytest.fixture(scope="session")
def own_address() -> str:
    """An address of this machine other than the loopback, which the API server refuses in an EndpointSlice."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # UDP: sends nothing, only chooses the route
        except OSError:
            pytest.skip("this machine has no address but loopback, which no EndpointSlice may name")
        address: str = probe.getsockname()[0]
    return address


@pytest.fixture
def start_gateway(own_address: str) -> Iterator[Callable[..., DemandServer]]:
    """A function that starts a gateway, as in `start_gateway({"default/qwen": {...}})`."""
    started: list[DemandServer] = []

    def start(services: dict[str, Json]) -> DemandServer:
        server = DemandServer(own_address, services)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def metrics_plane() -> Iterator[ControlPlane]:
    with ControlPlane(hpa_sync_period_seconds=1, hpa_downscale_stabilization_seconds=2) as plane:
        api = Api(plane.kubeconfig)
        api.create("/api/v1/namespaces", {"metadata": {"name": SYSTEM_NAMESPACE}})
        yield plane


@pytest.fixture(scope="session")
def aggregated(metrics_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aggregated]:
    """The metrics server, registered as custom.metrics.k8s.io. The API is Available."""
    folder = tmp_path_factory.mktemp("metrics")
    authority = Authority(folder, "metrics-authority")
    write_serving_certificate(authority, folder)
    with running_server(metrics_plane, folder) as (process, port, admin_port):
        aggregated = Aggregated(metrics_plane, folder, authority, port, admin_port, process)
        register(aggregated.api, port, authority)
        yield aggregated
        unregister(aggregated.api)
