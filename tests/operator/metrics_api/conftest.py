"""Fixtures for the chart's objects on the session's control plane, a metrics server, and another owner."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.metrics_api.adapters import (
    API_SERVICES_PATH,
    MetricsServer,
    OtherAdapter,
    other_adapter,
)
from tests.operator.metrics_api.steps import ROLE_PATH, installation
from tests.operator.stage import Space

from conveyor_api.names import METRICS_API_ROLE
from conveyor_operator.metrics_api.registration import API_SERVICES
from e2e.cluster.api import ApiError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MetricsServer]:
    server = MetricsServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def role(space: Space) -> Iterator[str]:
    """The chart's ClusterRole. If it is deleted, the objects that it owns are deleted too."""
    space.api.create(ROLE_PATH.rpartition("/")[0], {"metadata": {"name": METRICS_API_ROLE}})
    yield ROLE_PATH
    if space.api.reachable(ROLE_PATH):
        space.api.delete(ROLE_PATH)
    for name in API_SERVICES:  # the garbage collector would need a moment
        with contextlib.suppress(ApiError):
            space.api.delete(f"{API_SERVICES_PATH}/{name}")


@pytest.fixture
def installed(space: Space, server: MetricsServer, role: str) -> Iterator[Space]:
    """The chart's objects, with a metrics server whose pod is available."""
    with installation(space, server):
        yield space


@pytest.fixture
def other(installed: Space, tmp_path: Path) -> Iterator[OtherAdapter]:
    with other_adapter(installed, tmp_path) as adapter:
        yield adapter
