"""Tests /readyz."""

from conveyor_gateway.watching.readiness import Readiness
from conveyor_kube.watch import WatchState


def make_readiness(*watches: WatchState) -> Readiness:
    return Readiness(watches, now_seconds=lambda: 200.0)


def test_not_ready_until_every_watch_has_listed_once() -> None:
    readiness = make_readiness(WatchState("services", synced=True, received_at=200), WatchState("slices"))
    assert readiness.problems() == ["not synced: slices"]
    assert not readiness.synced


def test_ready_when_all_have() -> None:
    readiness = make_readiness(WatchState("services", synced=True, received_at=199))
    assert (readiness.synced, readiness.problems(), readiness.warnings()) == (True, [], [])


def test_a_silent_api_server_is_a_warning_and_no_reason_to_leave() -> None:
    readiness = make_readiness(WatchState("services", synced=True, received_at=80))
    assert readiness.problems() == []
    assert readiness.warnings() == [
        "stale: services: no data from the API server for 120 s; serving with the last known state"
    ]


def test_not_ready_until_the_operator_has_claimed_the_names_and_ready_from_then_on() -> None:
    is_claimed = False
    watch = WatchState("services", synced=True, received_at=200)
    readiness = Readiness([watch], now_seconds=lambda: 200.0, are_names_claimed=lambda: is_claimed)
    assert readiness.problems() == ["waiting for the operator, which claims the names of services when it first runs"]
    assert not readiness.synced
    is_claimed = True
    assert readiness.synced
    is_claimed = False
    assert (readiness.synced, readiness.problems()) == (True, [])


def test_draining_is_not_ready_at_once() -> None:
    readiness = make_readiness(WatchState("services", synced=True, received_at=200))
    readiness.draining = True
    assert readiness.problems() == ["draining"]
    assert readiness.synced
