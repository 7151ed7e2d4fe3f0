"""Fixtures for several of these tests."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.gateway.cluster import publish_gateway
from tests.gateway.process import GatewayProcess
from tests.operator.api_proxy import ApiProxy
from tests.operator.stage import Space, Stage, build_settings

from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A kubeconfig whose server does not exist. A process that starts with it keeps running and logs that it waits."""
    entries = {
        "clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "users": [{"name": "a", "user": {}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "a", **entries}))
    return path


@pytest.fixture
def space(control_plane: ControlPlane, namespace: str) -> Space:
    api = Api(control_plane.kubeconfig)
    install_definitions(api)
    return Space(api, namespace)


@pytest.fixture
def gateway(control_plane: ControlPlane, space: Space) -> Iterator[GatewayProcess]:
    """A gateway that the operator finds as in an installation. The installation's namespace is that of the services."""
    flags = ("--host", "", "--watch-namespaces", space.namespace, "--drain-delay-seconds", "0")
    with GatewayProcess(control_plane.kubeconfig, *flags) as gateway:
        publish_gateway(space.api, space.namespace, "one", gateway.admin_port)
        yield gateway


@pytest.fixture
def stage(control_plane: ControlPlane, space: Space, gateway: GatewayProcess, tmp_path: Path) -> Iterator[Stage]:
    """A stage whose operators read the gateway's reports."""
    with ApiProxy(control_plane.kubeconfig).running() as proxy:
        settings = replace(build_settings(space, proxy, tmp_path), system_namespace=space.namespace)
        stage = Stage(space, proxy, settings)
        yield stage
        stage.close()
