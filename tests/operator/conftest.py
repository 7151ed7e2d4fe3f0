"""Fixtures: the operator's real process against a real API server, through a recording proxy.

No pods run there, but the controllers for Deployments, HPAs and garbage collection do; `kubelet.py` plays the
kubelet. One CRD for the whole session; every test has its own namespace and operators that serve only it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.api_proxy import ApiProxy
from tests.operator.stage import Space, Stage, install_crd

from conveyor_operator.settings import Settings
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Api:
    return Api(control_plane.kubeconfig)


@pytest.fixture(scope="session")
def crd(api: Api) -> None:
    install_crd(api)


@pytest.fixture
def space(api: Api, crd: None, namespace: str) -> Space:
    return Space(api, namespace)


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[ApiProxy]:
    with ApiProxy(control_plane.kubeconfig).running() as running:
        yield running


@pytest.fixture
def stage(space: Space, proxy: ApiProxy, tmp_path: Path) -> Iterator[Stage]:
    settings = Settings(
        engine_image="example/engine:1",
        watch_namespaces=(space.namespace,),
        kubeconfig=str(proxy.write_kubeconfig(tmp_path / "kubeconfig")),
        host="127.0.0.1",
        admin_port=0,
        metrics_api=False,
    )
    stage = Stage(space, proxy, settings)
    yield stage
    stage.close()
