"""Fixtures for a console process with a real API server, and for services of two teams."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.console.process import ConsoleProcess, make_reader
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster, publish_gateway
from tests.gateway.process import GatewayProcess

from e2e.cluster.api import Api


@pytest.fixture(scope="module")
def system_namespace(crd: Api) -> str:
    """The namespace of the module's gateways."""
    name = f"system-{uuid4().hex[:8]}"
    crd.create("/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture(scope="module")
def console(crd: Api, kubeconfig: Path, system_namespace: str) -> Iterator[ConsoleProcess]:
    with ConsoleProcess(kubeconfig, system_namespace) as started:
        yield started


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    with EngineServer(tmp_path_factory.mktemp("engine"), model, IDLE, host="0.0.0.0", max_num_seqs=4) as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def gateway(crd: Api, kubeconfig: Path, system_namespace: str) -> Iterator[GatewayProcess]:
    with GatewayProcess(kubeconfig, "--host", "") as started:
        publish_gateway(crd, system_namespace, "one", started.admin_port)
        yield started


@pytest.fixture(scope="module")
def playground(kubeconfig: Path, system_namespace: str, gateway: GatewayProcess) -> Iterator[ConsoleProcess]:
    with ConsoleProcess(kubeconfig, system_namespace, "--playground-url", f"{gateway.url}/") as started:
        yield started


@pytest.fixture
def cluster(crd: Api, namespace: str) -> Iterator[Cluster]:
    cluster = Cluster(crd, namespace)
    yield cluster
    cluster.clear()


@pytest.fixture
def token(crd: Api, namespace: str) -> str:
    """The token of somebody who may list the InferenceServices of the test's namespace."""
    return make_reader(crd, namespace)
