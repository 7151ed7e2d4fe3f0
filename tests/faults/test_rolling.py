"""Upgrades and downgrades operator and gateways, from and to an earlier commit, with 100 services under load.

The earlier commit is $CONVEYOR_FORMER, by default the newest that is a day old. Its programs run from a checkout of
its own, in this environment. A client sends requests to the gateways that are ready, as a Service would.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from tests.commits import PRESENT, Checkout, checked_out
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.faults.stand import SERVED, Client
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess
from tests.operator.stage import Json, Space, make_service, wait_until

from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import claim_root
from e2e.cluster.paths import REPOSITORY

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

NAMESPACE = "team"
SERVICES = [SERVED, *(f"service-{number}" for number in range(99))]


def install_definitions(release: Checkout, api: Api) -> None:
    for file in sorted((release.folder / "crds").glob("*.yaml")):
        crd = yaml.safe_load(file.read_text())
        api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}", crd)


@dataclass
class Rolled:
    """The running operator and gateways. `roll` replaces them."""

    api: Api
    space: Space
    kubeconfig: Path
    client: Client | None = None
    _operator: subprocess.Popen[bytes] | None = None
    _gateways: list[GatewayProcess] = field(default_factory=list)

    def roll(self, release: Checkout) -> None:
        """Replace everything as Helm does: the CRDs, the operator, and the gateways one after the other."""
        install_definitions(release, self.api)
        self.stop_operator()
        with release.active():
            command = [sys.executable, "-m", "conveyor_operator", f"--kubeconfig={self.kubeconfig}"]
            command += ["--host=127.0.0.1", "--admin-port=0", f"--watch-namespaces={NAMESPACE}", "--metrics-api=false"]
            self._operator = subprocess.Popen([*command, "--log-level=warning"])
            formers: list[GatewayProcess | None] = [*self._gateways] or [None, None]
            for former in formers:
                gateway = GatewayProcess(self.kubeconfig, "--host", "0.0.0.0", "--drain-delay-seconds", "2")
                gateway.start()
                self._gateways.append(gateway)
                self._notify_client()
                if former is not None:
                    self._gateways.remove(former)
                    self._notify_client()
                    former.terminate()
                    assert former.wait_ended() == 0, former.log[-5:]

    @property
    def urls(self) -> Sequence[str]:
        return tuple(f"{gateway.url}/{NAMESPACE}/{SERVED}/v1/completions" for gateway in self._gateways)

    def _notify_client(self) -> None:
        if self.client is not None:
            self.client.urls = tuple(self.urls)

    def stop_operator(self) -> None:
        if self._operator is not None:
            self._operator.terminate()
            assert self._operator.wait(60) == 0
            self._operator = None

    def close(self) -> None:
        self.stop_operator()
        for gateway in self._gateways:
            gateway.kill()

    def templates(self) -> dict[str, Json]:
        """Return each Deployment's pod template. A changed template would restart its engines."""
        return {body["metadata"]["name"]: body["spec"]["template"] for body in self.space.list("Deployment")}

    def wait_settled(self) -> None:
        """Wait until each service has a Deployment and a current status, and nothing has changed for 5 s."""
        wait_until("all services are observed", lambda: len(self._observed()) == len(SERVICES), 180, self._observed)
        before: dict[str, str] = {}
        while before != (now := self._observed()):
            before = now
            time.sleep(5)

    def _observed(self) -> dict[str, str]:
        """Return the resource versions of the services whose status is current."""
        metadata = {
            body["metadata"]["name"]: body["metadata"]
            for body in self.space.list("InferenceService")
            if body.get("status", {}).get("observedGeneration") == body["metadata"]["generation"]
        }
        return {name: each["resourceVersion"] for name, each in metadata.items()}


@pytest.fixture
def former() -> Iterator[Checkout]:
    log = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%H", "--before=1 day ago"]
    commit = os.environ.get("CONVEYOR_FORMER") or subprocess.check_output(log, text=True).strip()
    if not commit:
        pytest.skip("this checkout has no earlier commit")
    with checked_out(commit) as checkout:
        yield checkout


def test_an_upgrade_and_a_downgrade_fail_no_request_and_restart_no_engine(former: Checkout, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(ControlPlane())
        api, space = Api(plane.kubeconfig), Space(Api(plane.kubeconfig), NAMESPACE)
        api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        install_definitions(former, api)
        wait_until("the CRDs", lambda: api.reachable("/apis/conveyor.dev/v1alpha1/servednames"))
        claim_root(api)
        for name in SERVICES:
            space.create("InferenceService", make_service(name))
        engine = EngineServer(tmp_path / "engine", write_chat_model(tmp_path / "model"), IDLE, host="0.0.0.0")
        stack.enter_context(engine).wait_ready()
        Cluster(api, NAMESPACE).apply_engine(SERVED, own_address(), int(engine.url.rpartition(":")[2]))
        rolled = Rolled(api, space, plane.kubeconfig)
        stack.callback(rolled.close)
        rolled.roll(former)
        rolled.wait_settled()
        before = rolled.templates()
        rolled.client = client = Client(*rolled.urls)
        client.start()
        stack.callback(client.end)
        for release in (PRESENT, former, PRESENT):
            answered = client.answered
            rolled.roll(release)
            rolled.wait_settled()
            assert client.failed == []
            assert client.answered > answered + 20
            assert rolled.templates() == before, release.name
