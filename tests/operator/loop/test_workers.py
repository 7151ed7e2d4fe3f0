"""Tests that each key has one worker, the limit on workers, backoff and cancellation."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from conveyor_operator.errors import Refused, Unavailable
from conveyor_operator.kinds import Key, ObjectKind
from conveyor_operator.loop import workers as module
from conveyor_operator.loop.workers import Outcome, Workers, backoff_seconds
from conveyor_operator.metrics import Metrics

KEY = Key(ObjectKind("tests.conveyor.dev", "v1", "Widget", "widgets"), "default", "qwen")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_DELAY_SECONDS", 0.001)


def make(reconcile: Callable[[Key], Awaitable[Outcome]], limit: int = 8) -> tuple[Workers, Metrics]:
    metrics = Metrics()
    workers = Workers(reconcile, metrics, limit)
    workers.start()
    return workers, metrics


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110  many conditions, none with an event
            await asyncio.sleep(0.001)


async def settle() -> None:
    """Let all tasks run that do not wait for time.

    Counts turns of the event loop, which do not depend on the machine's load.
    """
    for _ in range(20):
        await asyncio.sleep(0)


async def until_done(metrics: Metrics, times: int = 1) -> None:
    """Wait until this many reconciles are done, and until reconciles that follow without a delay could begin."""
    await until(lambda: count(metrics, "done") >= times)
    await settle()


def count(metrics: Metrics, result: str) -> float:
    return metrics.registry.get_sample_value("conveyor_operator_reconciles_total", {"result": result}) or 0


async def test_a_marked_key_is_reconciled_once_and_forgotten() -> None:
    seen: list[Key] = []

    async def reconcile(key: Key) -> Outcome:
        seen.append(key)
        return Outcome()

    workers, metrics = make(reconcile)
    workers.mark(KEY)
    workers.mark(KEY)
    await until_done(metrics)
    assert seen == [KEY]
    assert count(metrics, "done") == 1


async def test_what_happens_during_a_reconcile_leads_to_one_more_and_never_to_two_at_once() -> None:
    running, rounds = 0, 0

    async def reconcile(key: Key) -> Outcome:
        nonlocal running, rounds
        assert running == 0
        running += 1
        rounds += 1
        for _ in range(3):
            if rounds == 1:
                workers.mark(KEY)
            await asyncio.sleep(0)
        running -= 1
        return Outcome()

    workers, metrics = make(reconcile)
    workers.mark(KEY)
    await until_done(metrics, 2)
    assert rounds == 2


async def test_no_more_keys_than_the_limit_are_worked_on_at_once() -> None:
    running, most = 0, 0

    async def reconcile(key: Key) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return Outcome()

    workers, metrics = make(reconcile, limit=3)
    for number in range(20):
        workers.mark(KEY._replace(namespace=str(number % 4), name=str(number)))
    await until_done(metrics, 20)
    assert most == 3


@pytest.mark.parametrize("failure", [Unavailable(503, "", ""), Refused(403, "", ""), KeyError("a bug")])
async def test_a_failure_is_tried_again_until_it_works(failure: Exception) -> None:
    rounds = 0

    async def reconcile(key: Key) -> Outcome:
        nonlocal rounds
        rounds += 1
        if rounds < 4:
            raise failure
        return Outcome()

    workers, metrics = make(reconcile)
    workers.mark(KEY)
    await until_done(metrics)
    assert rounds == 4
    assert (count(metrics, "error"), count(metrics, "done")) == (3, 1)


async def test_work_that_is_not_done_is_tried_again() -> None:
    results = [True, True, False]

    async def reconcile(key: Key) -> Outcome:
        return Outcome(refused=results.pop(0))

    workers, metrics = make(reconcile)
    workers.mark(KEY)
    await until_done(metrics)
    assert results == []
    assert count(metrics, "retry") == 2


async def test_a_failing_key_does_not_keep_others_from_the_only_slot() -> None:
    done = asyncio.Event()

    async def reconcile(key: Key) -> Outcome:
        if key == KEY:
            raise Unavailable(503, "", "", retry_after_seconds=60)
        done.set()
        return Outcome()

    workers, _ = make(reconcile, limit=1)
    workers.mark(KEY)
    workers.mark(KEY._replace(name="other"))
    async with asyncio.timeout(120):
        await done.wait()
    await workers.stop()


async def test_a_new_spec_cuts_a_backoff_short_and_other_marks_do_not() -> None:
    rounds = 0

    async def reconcile(key: Key) -> Outcome:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise Unavailable(503, "", "", retry_after_seconds=3600)
        return Outcome()

    workers, metrics = make(reconcile)
    workers.mark(KEY, generation=1)
    await until(lambda: count(metrics, "error") == 1)
    await settle()
    workers.mark(KEY)
    workers.mark(KEY, generation=1)
    await settle()
    assert rounds == 1
    workers.mark(KEY, generation=2)
    await until_done(metrics)
    assert rounds == 2


async def test_cancelling_stops_the_work_wherever_it_is() -> None:
    stopped = asyncio.Event()

    async def reconcile(key: Key) -> Outcome:
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()
        return Outcome()

    workers, _ = make(reconcile)
    workers.mark(KEY)
    await until(lambda: workers.longest_run_seconds() > 0)
    workers.cancel(KEY)
    async with asyncio.timeout(120):
        await stopped.wait()
    assert workers.longest_run_seconds() == 0


async def test_a_key_that_is_marked_after_its_cancellation_is_worked_on_anew() -> None:
    rounds = 0

    async def reconcile(key: Key) -> Outcome:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            await asyncio.sleep(3600)
        return Outcome()

    workers, metrics = make(reconcile)
    workers.mark(KEY)
    await until(lambda: rounds == 1)
    workers.cancel(KEY)
    workers.mark(KEY)
    await until_done(metrics)
    assert rounds == 2


async def test_after_stop_nothing_is_begun() -> None:
    async def reconcile(key: Key) -> Outcome:
        raise AssertionError("nothing should be begun")

    workers, metrics = make(reconcile)
    await workers.stop()
    workers.mark(KEY)
    await settle()
    assert count(metrics, "error") == 0


async def test_a_reconcile_that_requests_a_time_is_called_again_at_that_time() -> None:
    begun: list[datetime] = []
    due = datetime.now(UTC) + timedelta(seconds=0.3)

    async def reconcile(key: Key) -> Outcome:
        begun.append(datetime.now(UTC))
        return Outcome(requeue_at=due) if len(begun) == 1 else Outcome()

    workers, metrics = make(reconcile)
    workers.mark(KEY)
    await until_done(metrics, 2)
    assert begun[0] < due <= begun[1]
    assert len(begun) == 2


async def test_a_key_that_waits_for_a_time_is_reconciled_at_once_when_something_happens() -> None:
    rounds = 0

    async def reconcile(key: Key) -> Outcome:
        nonlocal rounds
        rounds += 1
        return Outcome(requeue_at=datetime.now(UTC) + timedelta(hours=1))

    workers, metrics = make(reconcile, limit=1)
    workers.mark(KEY)
    await until_done(metrics)
    assert rounds == 1
    workers.mark(KEY._replace(name="other"))
    await until_done(metrics, 2)
    assert rounds == 2, "it waits without keeping others from the only slot"
    workers.mark(KEY)
    await until_done(metrics, 3)
    assert rounds == 3
    await workers.stop()


async def test_a_time_far_away_is_looked_at_again_since_the_clock_may_have_been_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LONGEST_WAIT_SECONDS", 0.001)
    outcomes = [Outcome(requeue_at=datetime.now(UTC) + timedelta(days=1)), Outcome()]

    async def reconcile(key: Key) -> Outcome:
        return outcomes.pop(0)

    workers, metrics = make(reconcile)
    workers.mark(KEY)
    await until_done(metrics, 2)
    assert outcomes == []


async def test_a_time_that_has_passed_is_now() -> None:
    outcomes = [Outcome(requeue_at=datetime(2020, 1, 1, tzinfo=UTC)), Outcome()]

    async def reconcile(key: Key) -> Outcome:
        return outcomes.pop(0)

    workers, metrics = make(reconcile)
    workers.mark(KEY)
    await until_done(metrics, 2)
    assert outcomes == []


def test_the_backoff_doubles_to_a_minute_with_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_DELAY_SECONDS", 0.2)
    for failures, full in ((1, 0.2), (2, 0.4), (5, 3.2), (9, 51.2), (10, 60.0), (10_000, 60.0)):
        found = {backoff_seconds(failures) for _ in range(20)}
        assert len(found) > 1
        assert all(0.75 * full <= delay <= full for delay in found)


async def test_what_is_marked_before_the_start_waits_for_it_and_for_what_is_urgent_then() -> None:
    seen: list[str] = []

    async def reconcile(key: Key) -> Outcome:
        seen.append(key.name)
        return Outcome()

    metrics = Metrics()
    workers = Workers(reconcile, metrics, 1)
    for name in ("a", "b", "c", "d"):
        workers.mark(KEY._replace(name=name))
    await settle()
    assert not seen
    workers.start()
    workers.mark(KEY._replace(name="d"))
    workers.mark(KEY._replace(name="c"), urgent=False)
    await until_done(metrics, 4)
    assert seen == ["a", "d", "b", "c"], "the first slot was free when it started"
