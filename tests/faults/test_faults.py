"""Tests faults of the API server and of the programs around it. Nothing breaks, and everything recovers.

`make faults` runs them, one after the other, and prints what each cost.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
from tests.faults.stand import BYSTANDERS, EDITED, SERVED, Client, Cost, OperatorProcess, Stand, build_clock
from tests.gateway.process import GatewayProcess
from tests.operator.api_proxy import CUT, ENDLESS, TORN, Call
from tests.operator.inferenceservice.test_contested import opponent
from tests.operator.stage import Json, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

Record = Callable[[str, Cost], None]
ALWAYS = 10**9
AWAY_SECONDS = 300.0


def is_watch(call: Call) -> bool:
    return call.verb == "watch"


def is_any(call: Call) -> bool:
    return call.resource != "leases"


@contextmanager
def failing(
    stand: Stand, matches: Callable[[Call], bool], status: int, times: int = ALWAYS, **headers: str
) -> Iterator[None]:
    fault = stand.proxy.fail(matches, status, times, **headers)
    try:
        yield
    finally:
        fault.times = 0
        stand.proxy.faults.remove(fault)
    assert fault.hits, "it was never met"


@contextmanager
def severed(stand: Stand) -> Iterator[None]:
    stand.proxy.sever()
    yield
    stand.proxy.severed = False


@contextmanager
def expired(stand: Stand) -> Iterator[None]:
    """Let no watch continue from its last resource version."""
    with severed(stand):
        time.sleep(1)
    with failing(stand, is_watch, 410, 20):
        yield


@contextmanager
def stopped_now_and_then(pid: int) -> Iterator[None]:
    """Stop the process nine tenths of the time."""
    over = threading.Event()

    def stop() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.9)
            os.kill(pid, signal.SIGCONT)
            over.wait(0.1)

    thread = threading.Thread(target=stop, name="stops etcd")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_watches_that_end_in_the_middle_of_an_event(stand: Stand, record: Record) -> None:
    with stand.logged("watch"):
        record("watches end in the middle of an event", stand.endure(failing(stand, is_watch, TORN, 12), 10))


def test_watches_that_cannot_go_on(stand: Stand, record: Record) -> None:
    with stand.logged("watch"):
        record("410: no watch can go on", stand.endure(expired(stand), 10))


def test_too_many_requests(stand: Stand, record: Record) -> None:
    patient = failing(stand, is_any, 429, Retry_After="2")
    with stand.logged("429"):
        record("429 with Retry-After: 2 for everything", stand.endure(patient, 15))


def test_a_storm_of_conflicts(stand: Stand, record: Record) -> None:
    with stand.logged("409"):
        record("409 for each write", stand.endure(failing(stand, lambda call: call.is_write, 409), 10))


def test_a_storm_of_errors(stand: Stand, record: Record) -> None:
    with stand.logged("500"):
        record("500 for everything", stand.endure(failing(stand, is_any, 500), 15))


def test_answers_that_never_come(stand: Stand, record: Record) -> None:
    endless = failing(stand, lambda call: call.verb == "patch" and is_any(call), ENDLESS, 3)
    with stand.logged("event=reconcile_failed"):
        record("three writes are never answered", stand.endure(endless, 5))


def test_connections_that_are_cut(stand: Stand, record: Record) -> None:
    record("every second call is cut", stand.endure(failing(stand, every_second(), CUT), 15))


def every_second() -> Callable[[Call], bool]:
    count = 0

    def matches(call: Call) -> bool:
        nonlocal count
        count += is_any(call)
        return is_any(call) and count % 2 == 0

    return matches


def test_half_open_connections(stand: Stand, record: Record) -> None:
    """The connections stay open, but no data passes."""
    with stand.logged("event=watch_silent"):
        record("connections are half open", stand.endure(stand.proxy.half_open(), 20))


def test_an_api_server_that_is_away_for_minutes(stand: Stand, record: Record) -> None:
    with stand.logged("watch"):
        record("the API server is away", stand.endure(severed(stand), AWAY_SECONDS))


def test_an_etcd_that_is_restored(stand: Stand, record: Record) -> None:
    """All watches lose what happened since the snapshot. The leader ends too, so the standby's store counts."""
    elected = ("--leader-elect=true", "--system-namespace=conveyor-system")
    stand.replace_operator(*elected)
    wait_until("it leads", lambda: "event=leading" in stand.operator.log.read_text())
    standby = stand.start_operator(*elected)
    job = stand.start_job(100)
    with stand.logged("event=leading"):
        record("etcd is restored, and the leader ends", stand.endure(restored(stand, standby), 10))
    assert job.wait(60) == 0, (stand.folder / "job" / "log").read_text()
    for name in (SERVED, *BYSTANDERS):
        assert not stand.created_since_leading(name)
    wait_until("the gateway knows the new service", lambda: stand.gateway_code("later") != 404)
    wait_until("the gateway has dropped the lost service", lambda: stand.gateway_code("lost") == 404)
    stand.replace_operator()


@contextmanager
def restored(stand: Stand, standby: OperatorProcess) -> Iterator[None]:
    """Restore etcd from a snapshot before a service was created. Then replace the leader by the standby."""
    snapshot = stand.folder / "snapshot"
    stand.plane.snapshot(snapshot)
    stand.space.make_service("lost")
    stand.space.wait_observed("lost")
    wait_until("the gateway knows the service", lambda: stand.gateway_code("lost") != 404)
    stand.plane.restore(snapshot)
    stand.operator.kill()
    stand.operator = standby
    stand.space.make_service("later")
    stand.drop_gateway()
    yield


def test_a_slow_etcd(stand: Stand, record: Record) -> None:
    record("etcd stands still nine tenths of the time", stand.endure(stopped_now_and_then(stand.pid("etcd")), 30))


def test_an_api_server_that_takes_two_seconds(stand: Stand, record: Record) -> None:
    @contextmanager
    def slow() -> Iterator[None]:
        stand.proxy.delay_seconds = 2.0
        yield
        stand.proxy.delay_seconds = 0.0

    record("each call takes 2 s", stand.endure(slow(), 60))


def test_a_child_that_another_manager_changes_again_and_again(stand: Stand, record: Record) -> None:
    open_to_all: Json = {"spec": {"ingress": [{}]}}
    fight = opponent(stand.space, "NetworkPolicy", open_to_all, f"{EDITED}-engine")
    record("another manager changes a child after each restore", stand.endure(fight, 20))


@pytest.mark.parametrize("seconds", [3600, -3600], ids=["ahead", "back"])
def test_a_clock_that_is_stepped_by_an_hour(stand: Stand, record: Record, seconds: int) -> None:
    environment, shift = build_clock(stand.folder)
    elected = ("--leader-elect=true", "--system-namespace=conveyor-system")
    stand.replace_operator(*elected, **environment)
    stand.proxy.wait_quiet(2)  # the Lease is renewed every 5 s

    @contextmanager
    def stepped() -> Iterator[None]:
        shift(seconds)
        yield

    record(f"the operator's clock steps {seconds // 3600:+d} h", stand.endure(stepped(), 20))
    stand.replace_operator()


@pytest.mark.parametrize("seconds", [3600, -3600], ids=["ahead", "back"])
def test_clocks_of_gateway_and_metrics_server_that_are_stepped_by_an_hour(
    stand: Stand, record: Record, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    environment, shift = build_clock(stand.folder)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stand.replace_metrics_server()
    with GatewayProcess(stand.folder / "kubeconfig", "--watch-namespaces", stand.space.namespace) as gateway:
        for name in environment:
            monkeypatch.delenv(name)
        client = Client(f"{gateway.url}/{stand.space.namespace}/{SERVED}/v1/completions")
        client.start()

        @contextmanager
        def stepped() -> Iterator[None]:
            shift(seconds)
            yield

        cost = stand.endure(stepped(), 20)
        client.end()
    assert client.failed == []
    assert client.answered > 50
    record(f"the clocks of gateway and metrics server step {seconds // 3600:+d} h", cost)
    shift(0)


def test_two_releases_at_once(stand: Stand, record: Record) -> None:
    """Both operators act, and their default images differ."""

    @contextmanager
    def second() -> Iterator[None]:
        other = stand.start_operator("--engine-image=example/engine:other")
        try:
            yield
            stand.proxy.wait_quiet(2, 60)  # they do not undo each other's work
        finally:
            other.kill()

    record("two operators act", stand.endure(second(), 20))


def test_an_operator_that_is_killed_again_and_again(stand: Stand, record: Record) -> None:
    @contextmanager
    def killed() -> Iterator[None]:
        for _ in range(5):
            stand.replace_operator()
            time.sleep(1.5)
        yield

    record("the operator is killed five times", stand.endure(killed(), 1))


def test_a_metrics_server_that_is_killed_again_and_again(stand: Stand, record: Record) -> None:
    @contextmanager
    def killed() -> Iterator[None]:
        for _ in range(5):
            stand.replace_metrics_server()
            time.sleep(1.5)
        yield

    record("the metrics server is killed five times", stand.endure(killed(), 1))


def test_without_a_fault_it_costs_little(stand: Stand, record: Record) -> None:
    """This is the baseline for the other tests."""
    cost = stand.endure(nullcontext(), 10)
    record("none", cost)
    assert cost.calls < 40
