"""Tests with operator and gateway that no team can take another team's name, or its requests, at the gateway's root."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from tests.gateway.process import GatewayProcess
from tests.operator.api_proxy import ApiProxy
from tests.operator.stage import Space, Stage, build_settings, wait_until

from e2e.cluster.control_plane import ControlPlane

MODEL = {"uri": "hf://org/model"}


class Installation:
    """Two namespaces. Gateway and operator are in the first one."""

    def __init__(self, a: Space, b: Space, stage: Stage, gateway: GatewayProcess) -> None:
        self.a = a
        self.b = b
        self.gateway = gateway
        self._stage = stage

    def start_operator(self) -> None:
        self._stage.start()

    def start_gateway(self) -> None:
        self.gateway.start()

    def find_owner(self, model: str) -> str:
        """Return `namespace/name` of the service that got a request for `model`, by the gateway's log; `-` for none."""
        before = len(self.requests())
        self.gateway.knows_model(model)
        wait_until("the line of the request", lambda: len(self.requests()) > before)
        return self.requests()[-1]

    def requests(self) -> list[str]:
        return re.findall(r"event=request .*? service=(\S+)", "\n".join(self.gateway.log))


@pytest.fixture
def installation(control_plane: ControlPlane, space: Space, tmp_path: Path) -> Iterator[Installation]:
    other = Space(space.api, f"{space.namespace}-b")
    space.api.create("/api/v1/namespaces", {"metadata": {"name": other.namespace}})
    namespaces = (space.namespace, other.namespace)
    flags = (f"--watch-namespaces={','.join(namespaces)}", f"--system-namespace={space.namespace}")
    gateway = GatewayProcess(control_plane.kubeconfig, *flags)
    with ApiProxy(control_plane.kubeconfig).running() as proxy, killed(gateway.kill):
        settings = build_settings(space, proxy, tmp_path)
        settings = replace(settings, watch_namespaces=namespaces, system_namespace=space.namespace)
        stage = Stage(space, proxy, settings)
        yield Installation(space, other, stage, gateway)
        stage.close()


@contextmanager
def killed(kill: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    finally:
        kill()


@pytest.fixture
def name() -> str:
    return f"llama-{uuid4().hex[:8]}"


def serve(space: Space, service: str, name: str) -> None:
    space.make_service(service, model=MODEL | {"name": name})


def test_an_older_service_does_not_get_a_name_nor_its_requests_by_an_edit(
    installation: Installation, name: str
) -> None:
    a, b = installation.a, installation.b
    installation.start_operator()
    serve(b, "old", f"{name}-old")
    serve(a, "good", name)
    a.wait_condition("good", "NameClaimed", "True", "NameClaimed")
    installation.start_gateway()
    assert installation.find_owner(name) == f"{a.namespace}/good"
    b.edit("old", model={"name": name})
    b.wait_condition("old", "NameClaimed", "False", "NameTaken")
    assert installation.find_owner(name) == f"{a.namespace}/good"
    assert installation.find_owner(f"{b.namespace}/old") == f"{b.namespace}/old"


def test_who_waits_for_a_name_does_not_get_it_when_its_holder_replaces_the_service(
    installation: Installation, name: str
) -> None:
    a, b = installation.a, installation.b
    installation.start_operator()
    serve(a, "good", name)
    a.wait_condition("good", "NameClaimed", "True", "NameClaimed")
    serve(b, "squat", name)
    b.wait_condition("squat", "NameClaimed", "False", "NameTaken")
    installation.start_gateway()
    assert installation.find_owner(name) == f"{a.namespace}/good"
    a.delete("InferenceService", "good")
    wait_until("the gateway sees it go", lambda: installation.gateway.demand(f"{a.namespace}/good") is None)
    assert installation.find_owner(name) == "-"
    serve(a, "good", name)
    wait_until("the gateway sees it", lambda: installation.gateway.demand(f"{a.namespace}/good"))
    assert installation.find_owner(name) == f"{a.namespace}/good"
    assert b.condition("squat", "NameClaimed")["reason"] == "NameTaken"


def test_a_gateway_of_the_first_release_with_claims_is_ready_when_it_knows_all_names(
    installation: Installation, name: str
) -> None:
    """During an upgrade, new gateways may run with the old operator. They must wait, or names are lost."""
    for number in range(20):
        serve(installation.b, f"s{number}", f"{name}-{number}")
    with pytest.raises(TimeoutError):
        installation.gateway.start(timeout_seconds=0)
    wait_until("it waits for the names", lambda: "waiting for the op" in installation.gateway.admin("/readyz")[1])
    installation.start_operator()
    wait_until("it is ready", lambda: installation.gateway.admin("/readyz")[0] == 200)
    owners = {installation.find_owner(f"{name}-{number}") for number in range(20)}
    assert owners == {f"{installation.b.namespace}/s{number}" for number in range(20)}
