"""Starts a separate control plane whose HorizontalPodAutoscalers read the real metrics server, and gateways."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
from tests.contract.conftest import nowhere
from tests.metrics.aggregation import Aggregated
from tests.metrics.conftest import aggregated, metrics_plane, own_address, start_gateway
from tests.operator.stage import RunningOperator, Space

from conveyor_operator.settings import Settings
from e2e.cluster.definitions import install_definitions

__all__ = ["aggregated", "metrics_plane", "nowhere", "own_address", "start_gateway"]


@pytest.fixture
def space(aggregated: Aggregated) -> Iterator[Space]:
    """A new namespace with an operator."""
    install_definitions(aggregated.api)
    namespace = f"explained-{uuid4().hex[:8]}"
    aggregated.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    settings = Settings(
        watch_namespaces=(namespace,),
        kubeconfig=str(aggregated.plane.kubeconfig),
        host="127.0.0.1",
        admin_port=0,
        metrics_api=False,
    )
    operator = RunningOperator(settings)
    yield Space(aggregated.api, namespace)
    operator.stop()
    aggregated.api.delete(f"/api/v1/namespaces/{namespace}")
