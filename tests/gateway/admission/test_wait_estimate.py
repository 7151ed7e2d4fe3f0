"""Compares a full queue's Retry-After with how long admitted requests really wait. In virtual time."""

from collections.abc import Iterator

import pytest
from tests.gateway.admission.queues import FAR
from tests.gateway.admission.test_queue_classes import BATCH, CHAT, VirtualTime

from conveyor_gateway.admission.ticket import Ticket, TicketState
from conveyor_gateway.admission.wait_estimate import RETRY_AFTER_SECONDS_MAX
from conveyor_gateway.errors import QueueFull
from conveyor_gateway.watching.classes import QueueClass

PLACES = 8


def seconds_announced(run: VirtualTime, request_class: QueueClass) -> int:
    """Return the Retry-After of a request that is refused now."""
    while True:
        try:
            run.queue.admit(FAR, request_class)
        except QueueFull as error:
            return int(error.headers["Retry-After"])


def overload(run: VirtualTime, request_seconds: float, seconds: int) -> Iterator[float]:
    """Run requests of this duration. Yields at each whole second, when the caller may admit others."""
    ends: dict[Ticket, float] = {}
    for step in range(seconds * 20):
        run.now = 1000 + step / 20
        for ticket in [each for each, end in ends.items() if end <= run.now]:
            del ends[ticket]
            run.queue.finish(ticket)
        if step % 20 == 0:
            yield run.now
        for ticket in run.running - ends.keys():
            ends[ticket] = run.now + request_seconds


@pytest.mark.parametrize("request_seconds", [0.5, 2.0, 4.0])
def test_retry_after_is_how_long_the_last_one_that_got_in_waits(request_seconds: float) -> None:
    with VirtualTime(CHAT, place_limit=PLACES, max_queued_requests=100) as run:
        promised: dict[Ticket, tuple[float, int]] = {}
        waits: list[tuple[int, float]] = []
        for now in overload(run, request_seconds, 200):
            seconds = seconds_announced(run, CHAT)
            last = run.queue._waiting.last()
            assert last is not None
            promised.setdefault(last, (now, seconds))
            for ticket in [each for each in promised if each.state is not TicketState.QUEUED]:
                begun, promise = promised.pop(ticket)
                waits.append((promise, now - begun))
        assert len(waits) > 20
        expected = 100 * request_seconds / PLACES
        for promise, wait in waits[len(waits) // 4 :]:
            assert promise == pytest.approx(wait, rel=0.25, abs=2) == pytest.approx(expected, rel=0.3, abs=2)


def test_a_less_urgent_class_gets_a_longer_retry_after() -> None:
    limited = QueueClass("limited", 100, max_queued_requests=50)
    best = QueueClass("best", 0, max_queued_requests=50)
    with VirtualTime(best, limited, place_limit=PLACES, max_queued_requests=1000) as run:
        for _ in overload(run, 1.0, 60):
            for _best in range(6):  # three quarters of the places
                run.queue.admit(FAR, best)
            seconds = seconds_announced(run, limited)
        assert seconds == pytest.approx(50 / 2, rel=0.25), "two places a second are left to it"
        assert seconds_announced(run, best) == pytest.approx(50 / 6, rel=0.35)


def test_a_class_with_a_share_gets_the_retry_after_of_its_share() -> None:
    shared = QueueClass("shared", 100, max_queued_requests=40, max_share_percent=25)
    with VirtualTime(CHAT, shared, place_limit=PLACES, max_queued_requests=1000) as run:
        for _ in overload(run, 1.0, 60):
            for _best in range(6):
                run.queue.admit(FAR, CHAT)
            seconds = seconds_announced(run, shared)
        assert seconds == pytest.approx(40 / 2, rel=0.25)


def test_where_no_place_came_free_the_wait_is_bounded_and_grows_with_the_time() -> None:
    with VirtualTime(BATCH, place_limit=1, max_queued_requests=3) as run:
        seconds = []
        for _ in range(40):
            seconds.append(seconds_announced(run, BATCH))
            run.now += 1
        assert seconds[0] <= 5
        assert seconds == sorted(seconds)
        assert seconds[-1] == RETRY_AFTER_SECONDS_MAX


def test_a_fast_service_says_a_second_at_least() -> None:
    with VirtualTime(CHAT, place_limit=PLACES, max_queued_requests=4) as run:
        for _ in overload(run, 0.05, 30):
            assert seconds_announced(run, CHAT) >= 1
        assert seconds_announced(run, CHAT) == 1


def test_after_slow_requests_the_estimate_follows_the_fast_ones_while_clients_obey_it() -> None:
    """Each round: as many requests as fit, and one that is refused, waits as it was told, and begins the next round."""
    promises = []
    with VirtualTime(CHAT, place_limit=1, max_queued_requests=1) as run:
        for request_seconds in (25.0, 25.0, 0.1, 0.1, 0.1, 0.1):
            run.queue.admit(FAR, CHAT)
            promises.append(seconds_announced(run, CHAT))
            for _ in range(2):
                run.now += request_seconds
                run.queue.finish(next(iter(run.running)))
            run.now += promises[-1]
    assert promises[-4] >= 10, "after the slow ones"
    assert max(promises[-3:]) <= 5
    assert max(promises[-2:]) <= 2


def test_the_rates_of_levels_that_are_gone_are_dropped() -> None:
    with VirtualTime(CHAT, BATCH, place_limit=1, max_queued_requests=10) as run:
        for _ in overload(run, 0.5, 5):
            seconds_announced(run, BATCH)
        estimate = run.queue._dispatcher._wait_estimate
        assert set(estimate._left) == {BATCH.level}
        run.queue.configure(run.queue.limits)
        assert set(estimate._left) == {BATCH.level}
        estimate.keep({CHAT.level})
        assert not estimate._left
