"""Tests that a team's namespace with running services can be deleted. `make faults` runs it beside the other faults."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tests.faults.stand import OperatorProcess, Stand
from tests.faults.test_faults import Record
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Space, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

NAMESPACE = "leaving"
PATH = f"/api/v1/namespaces/{NAMESPACE}"
NAMES = ("one", "two", "three", "four")


def test_a_namespace_that_is_deleted_with_running_services(stand: Stand, record: Record) -> None:
    """Nothing is stuck, the gateway drops the services, and the operator's log has no warning."""
    api = stand.space.api
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    space, log = Space(api, NAMESPACE), stand.folder / "leaving.log"
    with ExitStack() as stack:
        operator = OperatorProcess(stand.folder / "kubeconfig", NAMESPACE, log)
        stack.callback(operator.kill)
        stack.enter_context(Kubelet(space, ready))
        for name in NAMES:
            space.make_service(name, autoscaling={"maxReplicas": 3})
        for name in NAMES:
            space.wait_condition(name, "Ready", "True", "Ready")
            wait_until(f"the gateway knows {name}", lambda: stand.gateway_code(name, NAMESPACE) == 200)  # noqa: B023
        before = len(log.read_text())
        record("a namespace with four services is deleted", stand.endure(deleted(stand), 5))
        assert operator.alive
        lines = log.read_text()[before:].splitlines()
    assert not [line for line in lines if "level=INFO" not in line], "\n".join(lines)


@contextmanager
def deleted(stand: Stand) -> Iterator[None]:
    api = stand.space.api
    api.delete(PATH)
    wait_until(
        "the gateway has dropped them", lambda: {stand.gateway_code(name, NAMESPACE) for name in NAMES} == {404}, 60
    )
    wait_until("the namespace is gone", lambda: not api.reachable(PATH), 120, lambda: api.get(PATH))
    time.sleep(2)
    yield
