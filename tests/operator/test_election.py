"""Tests two operators of a release as processes: one acts, the other takes over; one that loses the Lease exits."""

import contextlib
import signal
import time
from collections.abc import Iterator

import pytest
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Json, Stage, wait_until
from tests.operator.test_process import Process, process

from conveyor_api.names import OPERATOR_LEASE


@contextlib.contextmanager
def candidate(stage: Stage, identity: str) -> Iterator[Process]:
    flags = ("--leader-elect=true", f"--identity={identity}", f"--system-namespace={stage.space.namespace}")
    with process(stage, *flags) as running:
        yield running


@contextlib.contextmanager
def two(stage: Stage) -> Iterator[tuple[Process, Process]]:
    """The leader and an operator that stands by. Neither has anything to do yet."""
    with candidate(stage, "first") as leader:
        wait_until("it acts", lambda: leader.get("/readyz") == (200, "ready\n"), 60, lambda: leader.log)
        with candidate(stage, "second") as other:
            wait_until("it stands by", lambda: "standing_by leader=first" in "".join(other.log), 60, lambda: other.log)
            yield leader, other


def holder(stage: Stage) -> Json:
    return dict((stage.space.get("Lease", OPERATOR_LEASE) or {}).get("spec") or {})


def acted(running: Process) -> bool:
    return any("event=apply" in line for line in running.log)


@pytest.mark.slow
def test_one_acts_and_the_other_takes_over_after_a_crash(stage: Stage) -> None:
    with Kubelet(stage.space, ready), two(stage) as (leader, other):
        stage.space.make_service("before")
        stage.space.wait_condition("before", "Ready", "True", "Ready", 60)
        assert (acted(leader), acted(other)) == (True, False)
        assert other.get("/readyz") == (200, "standing by\n")
        assert "conveyor_operator_leader 1.0" in leader.get("/metrics")[1]
        assert "conveyor_operator_reconciles" not in other.get("/metrics")[1]
        leader.end(signal.SIGKILL)
        stage.space.make_service("between")
        time.sleep(2)
        assert not acted(other)
        stage.space.wait_condition("between", "Ready", "True", "Ready", 60)
        assert acted(other)
        log = "".join(other.log)
        assert log.index("event=ready") < log.index("event=leading"), "it knew the services before"
        assert holder(stage)["holderIdentity"] == "second"
        assert holder(stage)["leaseTransitions"] == 2
        assert other.end(signal.SIGTERM) == 0
        assert holder(stage)["holderIdentity"] == ""


@pytest.mark.slow
def test_one_that_is_stopped_hands_over_at_once(stage: Stage) -> None:
    with two(stage) as (leader, other):
        assert leader.end(signal.SIGTERM) == 0
        assert holder(stage)["holderIdentity"] in ("", "second")
        wait_until("it acts", lambda: other.get("/readyz") == (200, "ready\n"), 10, lambda: other.log)
        assert other.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_one_that_stands_by_ends_on_sigterm_and_leaves_the_lease(stage: Stage) -> None:
    with two(stage) as (leader, other):
        assert other.end(signal.SIGTERM) == 0, "".join(other.log)
        assert holder(stage)["holderIdentity"] == "first"
        assert leader.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_restarted_container_goes_on_under_its_pod_s_name(stage: Stage) -> None:
    with candidate(stage, "pod") as first:
        wait_until("it acts", lambda: first.get("/readyz") == (200, "ready\n"), 60, lambda: first.log)
        first.end(signal.SIGKILL)
    with candidate(stage, "pod") as again:
        wait_until("it acts", lambda: again.get("/readyz") == (200, "ready\n"), 10, lambda: again.log)
        assert holder(stage)["leaseTransitions"] == 1


def test_one_whose_lease_another_has_ends_at_once(stage: Stage) -> None:
    with candidate(stage, "first") as leader:
        wait_until("it acts", lambda: leader.get("/readyz") == (200, "ready\n"), 60, lambda: leader.log)
        stage.space.patch("Lease", OPERATOR_LEASE, {"spec": {"holderIdentity": "somebody"}})
        assert leader.popen.wait(20) == 1
        assert holder(stage)["holderIdentity"] == "somebody"


@pytest.mark.slow
def test_one_that_cannot_renew_ends_before_another_may_begin(stage: Stage) -> None:
    with candidate(stage, "first") as leader:
        wait_until("it acts", lambda: leader.get("/readyz") == (200, "ready\n"), 60, lambda: leader.log)
        stage.proxy.sever()
        cut = time.monotonic()
        assert leader.popen.wait(30) == 1
        assert time.monotonic() - cut < holder(stage)["leaseDurationSeconds"]
        assert [line for line in leader.log if "event=lease_lost holder=unknown" in line]


@pytest.mark.slow
def test_a_lease_that_somebody_deleted_is_made_again(stage: Stage) -> None:
    with candidate(stage, "first") as leader:
        wait_until("it acts", lambda: leader.get("/readyz") == (200, "ready\n"), 60, lambda: leader.log)
        stage.space.delete("Lease", OPERATOR_LEASE)
        wait_until("a new one", lambda: holder(stage).get("holderIdentity") == "first")
        assert leader.popen.poll() is None


@pytest.mark.slow
def test_one_that_was_stopped_ends_when_it_goes_on_and_writes_nothing(stage: Stage) -> None:
    with two(stage) as (leader, other):
        leader.popen.send_signal(signal.SIGSTOP)
        try:
            wait_until("it leads", lambda: other.get("/readyz") == (200, "ready\n"), 60, lambda: other.log)
            stage.space.make_service("meanwhile")
            wait_until("it acts", lambda: acted(other), 60, lambda: other.log)
        finally:
            leader.popen.send_signal(signal.SIGCONT)
        assert leader.popen.wait(20) == 1
        assert not acted(leader)
        assert holder(stage)["holderIdentity"] == "second"
