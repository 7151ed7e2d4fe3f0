"""Tests what operator and gateway do while a CRD is deleted: one sentence, no end, no calls at full speed."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.stand import OperatorProcess
from tests.gateway.process import GatewayProcess
from tests.operator.api_proxy import ApiProxy
from tests.operator.stage import Space, wait_until

from conveyor_api import names
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ALL = (names.CRD_NAME, names.SERVED_NAME_CRD_NAME, names.API_KEY_CRD_NAME)


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    """A control plane of its own, because other tests need the CRD."""
    with ControlPlane() as plane:
        install_definitions(Api(plane.kubeconfig))
        yield plane


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [ALL[:1], pytest.param(ALL, marks=pytest.mark.nightly)], ids=["one", "all"])
def test_a_deleted_crd_is_reported_in_one_sentence_until_it_is_back(
    plane: ControlPlane, tmp_path: Path, deleted: tuple[str, ...]
) -> None:
    api = Api(plane.kubeconfig)
    api.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    space = Space(api, "team")
    with ApiProxy(plane.kubeconfig).running() as proxy, GatewayProcess(plane.kubeconfig) as gateway:
        operator = OperatorProcess(proxy.write_kubeconfig(tmp_path / "kubeconfig"), "team", tmp_path / "log")
        try:
            space.make_service("first")
            space.wait_children("first")
            proxy.wait_quiet()
            calls = len(proxy.calls)
            for crd in deleted:
                api.delete(f"{DEFINITIONS}/{crd}")
            time.sleep(10)
            lines = operator.log.read_text()
            assert lines.count("the CRD inferenceservices.conveyor.dev was deleted") == 1
            assert "Traceback" not in lines
            assert "ERROR" not in lines
            assert operator.alive
            assert len([call for call in proxy.calls[calls:] if call.resource == names.PLURAL]) <= 10
            log = [line for line in gateway.log if "watch_failed watch=inferenceservices " in line]
            assert 1 <= len(log) <= 2
            assert f"does not serve /apis/{names.API_VERSION}/{names.PLURAL}; install its CRD" in log[-1]
            install_definitions(api)
            space.make_service("second", model={"uri": "pvc://models/demo", "name": "second"})
            space.wait_children("second", timeout=30)
            wait_until("the gateway knows the service", lambda: gateway.knows_model("second"), 30)
        finally:
            operator.kill()
