"""Tests a gateway's report about the services that may scale to zero."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from tests.gateway.builders import NeverAsked
from tests.gateway.cluster import make_endpoint, make_service, make_slice

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.pages.activity import MAX_NAMES, read_activity
from conveyor_gateway.watching.catalog import Catalog
from conveyor_protocol.pages import Activity

ZERO = {"minReplicas": 0, "maxReplicas": 2, "idleTimeout": "10s"}
QWEN = "default/qwen"
FAR = 1e9


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time the test sets."""

    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    with contextlib.closing(Clock()) as clock:
        yield clock


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def queues(catalog: Catalog, clock: Clock) -> Queues:
    queues = Queues(catalog, clock, NeverAsked(), Ledger(1), on_gone=lambda key: None)
    put_service(catalog, "qwen", 1)
    catalog.services.put(make_service("always", "default", autoscaling={"maxReplicas": 2}))
    catalog.services.put(make_service("fixed", "default"))
    return queues


def put_service(catalog: Catalog, name: str, desired_replicas: int, namespace: str = "default") -> None:
    body = make_service(name, namespace, autoscaling=ZERO)
    catalog.services.put(body | {"status": {"desiredReplicas": desired_replicas}})


def set_engines(catalog: Catalog, *addresses: str) -> None:
    endpoints = [make_endpoint(address) for address in addresses]
    catalog.slices.put(make_slice("qwen-1", "default", "qwen", 8000, *endpoints))


def test_only_services_that_may_go_to_zero_are_counted(queues: Queues) -> None:
    assert read_activity(queues) == Activity(1, frozenset(), frozenset())


def test_a_service_at_zero_is_waited_for_by_its_first_request(catalog: Catalog, queues: Queues) -> None:
    put_service(catalog, "qwen", 0)
    assert read_activity(queues).waiting == set()
    ticket = queues[QWEN].admit(FAR)
    assert read_activity(queues).waiting == {QWEN}
    queues[QWEN].finish(ticket)
    assert read_activity(queues).waiting == set()


def test_one_that_starts_already_need_not_be_woken(queues: Queues) -> None:
    """This holds however long the start takes, and even if it never succeeds."""
    for name in ("qwen", "always", "fixed"):
        queues[f"default/{name}"].admit(FAR)
    assert read_activity(queues).waiting == set()


def test_a_service_is_idle_after_its_timeout_since_its_last_request_has_ended(
    catalog: Catalog, queues: Queues, clock: Clock
) -> None:
    set_engines(catalog, "10.0.0.1")
    ticket = queues[QWEN].admit(FAR)
    clock.now += 60
    assert read_activity(queues).idle == set(), "it runs"
    queues[QWEN].finish(ticket)
    clock.now += 9
    queues[QWEN].finish(ticket)
    assert read_activity(queues).idle == set()
    clock.now += 1
    assert read_activity(queues).idle == {QWEN}, "closing it again is no request"
    queues[QWEN].admit(FAR)
    assert read_activity(queues).idle == set()


def test_the_time_of_a_start_is_not_idle_time(catalog: Catalog, queues: Queues, clock: Clock) -> None:
    """A client that gave up meanwhile can retry, and the engine that was started for it is still there."""
    queues[QWEN].finish(queues[QWEN].admit(FAR))
    clock.now += 300
    assert read_activity(queues).idle == set(), "it has no engine that could go"
    set_engines(catalog, "10.0.0.1")
    clock.now += 9
    assert read_activity(queues).idle == set()
    set_engines(catalog, "10.0.0.1", "10.0.0.2")
    clock.now += 1
    assert read_activity(queues).idle == {QWEN}, "one engine more is not the first"


def test_a_namespace_with_very_many_delays_its_own(catalog: Catalog, queues: Queues) -> None:
    """Otherwise the page exceeds the operator's limit of some megabytes, and the operator learns of no service."""
    for number in range(MAX_NAMES + 50):
        put_service(catalog, f"s{number}", 0, "a-crowd")
        queues[f"a-crowd/s{number}"].admit(FAR)
    put_service(catalog, "qwen", 0)
    queues[QWEN].admit(FAR)
    waiting = read_activity(queues).waiting
    assert len(waiting) == MAX_NAMES + 1
    assert QWEN in waiting
