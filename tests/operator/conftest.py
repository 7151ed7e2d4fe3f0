"""Fixtures that run the operator with a real API server, through a proxy that records the calls.

No pods run there, but the controllers for Deployments, HPAs and garbage collection do; `kubelet.py` plays the
kubelet. One set of CRDs for the whole session; every test has its own namespace and operators that serve only it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.api_proxy import ApiProxy
from tests.operator.stage import Space, Stage, build_settings

from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Api:
    return Api(control_plane.kubeconfig)


@pytest.fixture(scope="session")
def crd(api: Api) -> None:
    install_definitions(api)


@pytest.fixture
def space(api: Api, crd: None, namespace: str) -> Space:
    return Space(api, namespace)


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[ApiProxy]:
    with ApiProxy(control_plane.kubeconfig).running() as running:
        yield running


@pytest.fixture
def stage(space: Space, proxy: ApiProxy, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(space, proxy, build_settings(space, proxy, tmp_path))
    yield stage
    stage.close()
