"""Tests that the sums of all gateways are right, however often pages are read, and stay within their bounds."""

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_operator.usage.held_pods import HeldPod, count_seconds
from conveyor_operator.usage.sums import DAYS, MAX_BYTES, MAX_PROCESSES, MAX_ROWS, PODS, Sums
from conveyor_protocol.usage_rows import Usage, UsageRow, sum_rows

TODAY = date(2026, 11, 29)


def make_page(process: int, *rows: UsageRow, day: date = TODAY) -> Usage:
    return Usage(f"{process:016x}", {day.isoformat(): list(rows)})


def make_row(caller: str = "team/ann", requests: int = 1) -> UsageRow:
    return UsageRow("team/chat", caller, "", requests, 10 * requests, 0, requests, 2.5 * requests)


def total(sums: Sums) -> UsageRow:
    (found,) = sum_rows(
        UsageRow("", "", "", row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.engine_ms)
        for day in sums.days.values()
        for rows in day.values()
        for row in rows
    )
    return found


def test_a_page_that_is_read_again_replaces_what_its_process_counted_before() -> None:
    sums = Sums()
    assert sums.add([make_page(1, make_row(requests=2)), make_page(2, make_row())], TODAY).keys() == {"2026-11-29"}
    assert sums.add([make_page(1, make_row(requests=2))], TODAY) == {}, "nothing has changed"
    sums.add([make_page(1, make_row(requests=5))], TODAY)
    assert total(sums).requests == 6


def test_a_pod_counts_from_its_start_and_not_before_the_last_count() -> None:
    pods = [
        HeldPod("team/chat", 40.0),
        HeldPod("team/chat", 90.0),
        HeldPod("team/new", 120.0),
        HeldPod("b/late", 200.0),
    ]
    assert count_seconds(pods, 60.0, 160.0) == {"team/chat": 100.0 + 70.0, "team/new": 40.0, "b/late": 0.0}


def test_the_time_of_pods_stays_beside_many_keys_and_when_its_day_is_over() -> None:
    sums = Sums()
    for _ in range(3):
        sums.add(
            [make_page(1, *(make_row(f"team/k{number}") for number in range(MAX_ROWS)))], TODAY, {"team/chat": 60.0}
        )
    sums.add([], TODAY + timedelta(days=2))
    (row,) = sums.days[TODAY.isoformat()][PODS]
    assert row == UsageRow("team/chat", "", "", pod_seconds=180.0)
    assert sums.add([], TODAY + timedelta(days=2)) == {}
    sums.add([], TODAY + timedelta(days=3), {f"team/s{number}": 60.0 for number in range(MAX_ROWS + 50)})
    rows = sums.days[(TODAY + timedelta(days=3)).isoformat()][PODS]
    assert len(rows) <= MAX_ROWS
    assert sum(each.pod_seconds for each in rows) == 60.0 * (MAX_ROWS + 50)


def test_another_operator_goes_on_with_what_was_stored() -> None:
    first, second = Sums(), Sums()
    stored = first.add([make_page(1, make_row(requests=2)), make_page(2, make_row())], TODAY)
    second.load({day: text for day, text in stored.items() if text is not None} | {"bad": "{", "2026-11-01": "{"})
    second.add([make_page(1, make_row(requests=3))], TODAY)
    assert total(second).requests == 4


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 60), st.integers(1, 5)), max_size=60))
def test_no_request_is_lost_or_counted_twice_over_restarts_and_days(events: list[tuple[int, int, int]]) -> None:
    sums, counts = Sums(), dict[tuple[int, date], int]()
    today = TODAY
    for process, pause, requests in sorted(events, key=lambda each: each[0]):
        today += timedelta(days=pause // 40)
        counts[process, today] = counts.get((process, today), 0) + requests
        sums.add([make_page(process, make_row(requests=counts[process, today]), day=today)], today)
    expected = sum(count for (_, day), count in counts.items() if day > today - timedelta(days=DAYS))
    assert (total(sums).requests if events else 0) == expected
    assert len(sums.days) <= DAYS


def test_days_that_are_over_are_removed_after_a_month() -> None:
    sums = Sums()
    sums.add([make_page(1, make_row())], TODAY)
    later = TODAY + timedelta(days=DAYS)
    assert sums.add([make_page(1, make_row(), day=later)], later) == {
        "2026-11-29": None,
        later.isoformat(): '{"0000000000000001":[["team/chat","team/ann","",1,10,0,1,2.5,0.0]]}',
    }


def test_gateways_cannot_write_other_days() -> None:
    sums = Sums()
    assert sums.add([make_page(1, make_row(), day=TODAY - timedelta(days=9))], TODAY) == {}
    assert sums.add([make_page(1, make_row(), day=TODAY + timedelta(days=9))], TODAY) == {}


@pytest.mark.parametrize("length", [6, 100, 240])
def test_a_month_is_kept_with_many_rows_and_long_names(length: int) -> None:
    sums = Sums()
    for number in range(DAYS + 1):
        day = TODAY + timedelta(days=number)
        rows = [make_row(f"team/{caller:0{length}}") for caller in range(MAX_ROWS)]
        changed = sums.add([make_page(process, *rows, day=day) for process in range(2)], day)
    assert len(sums._texts) == DAYS
    assert None in changed.values(), "only the oldest day is removed"
    stored = Sums()
    stored.load(sums._texts)
    assert total(stored).requests == DAYS * 2 * MAX_ROWS


def test_the_object_is_bounded_with_many_callers_many_days_and_many_restarts() -> None:
    sums = Sums()
    for number in range(2 * DAYS):
        day = TODAY + timedelta(days=number)
        callers = [f"team-{number}/{'x' * 40}-{caller}" for caller in range(600)]
        pages = [make_page(number * 50 + each, *map(make_row, callers), day=day) for each in range(3)]
        sums.add(pages, day)
    assert sum(map(len, sums._texts.values())) <= MAX_BYTES
    closed = sums.days[min(sums.days)]
    assert [len(rows) for rows in closed.values()] == [MAX_ROWS]
    for process in range(100):
        sums.add([make_page(process, make_row(), day=day)], day)
        assert len(sums.days[day.isoformat()]) <= MAX_PROCESSES + 1
