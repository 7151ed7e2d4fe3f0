"""Starts a separate control plane with the real metrics server and KEDA."""

from collections.abc import Iterator

import pytest
from tests.cli.kubectl.conftest import space
from tests.contract.conftest import nowhere
from tests.keda.installation import running_keda
from tests.metrics.aggregation import Aggregated
from tests.metrics.conftest import aggregated, metrics_plane, own_address, start_gateway

from e2e import keda

__all__ = ["aggregated", "metrics_plane", "nowhere", "own_address", "space", "start_gateway"]


@pytest.fixture(scope="session")
def with_keda(aggregated: Aggregated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    keda.build()
    with running_keda(aggregated.plane, tmp_path_factory.mktemp("keda"), aggregated.admin_port):
        yield
