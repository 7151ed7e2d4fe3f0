"""Tests which rows of usage are added up if there are too many."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_protocol.usage_rows import Usage, UsageRow, decode_usage, find_namespace, limit_rows


@pytest.mark.parametrize(
    ("service", "caller", "namespace"),
    [
        ("team/chat", "", "team"),
        ("team/chat", "other/ci", "other"),
        ("team/chat", "other/*", "other"),
        ("team/chat", "system:serviceaccount:apps:web", "apps"),
        ("team/chat", "ann", "team"),  # a name that a proxy gave
        ("team/chat", "proxy:other/ci", "team"),  # the same
        ("team/chat", "*", ""),
        ("", "*", ""),
    ],
)
def test_a_row_counts_for_the_callers_namespace_or_else_for_the_services(
    service: str, caller: str, namespace: str
) -> None:
    assert find_namespace(service, caller) == namespace


def test_invalid_rows_of_a_page_are_left_out_and_longest_names_are_valid() -> None:
    longest = UsageRow("team/chat", f"system:serviceaccount:{'n' * 63}:{'a' * 253}", "", 1)
    page = msgspec.json.encode(Usage("0" * 16, {"2026-11-30": [longest, UsageRow("team/chat", "x" * 500, "", 1)]}))
    usage, errors = decode_usage(page)
    assert usage == Usage("0" * 16, {"2026-11-30": [longest]})
    assert len(errors) == 1
    with pytest.raises(msgspec.DecodeError):
        decode_usage(b'{"process": "x", "days": {}}')


def test_the_namespace_with_most_rows_loses_its_smallest_ones() -> None:
    large = [UsageRow("a/chat", f"a/{number}", "", 1, number) for number in range(10)]
    small = [UsageRow("a/chat", "b/one", "", 1, 1), UsageRow("b/chat", "b/two", "batch", 1, 1)]
    found = limit_rows([*large, *small], 6)
    assert found == [*large[:6:-1], UsageRow("a/chat", "a/*", "", 7, 21), *small]
    assert limit_rows(found, 6) == found


def test_a_sum_of_several_services_has_none() -> None:
    rows = [UsageRow(f"a/{number}", "", "", 1, number) for number in range(3)]
    assert limit_rows(rows, 2) == [rows[2], UsageRow("", "a/*", "", 2, 1)]


def test_if_there_are_more_namespaces_than_rows_the_smallest_ones_are_added_up() -> None:
    rows = [UsageRow("a/chat", f"n{number}/ci", "", 1, number) for number in range(5)]
    assert limit_rows(rows, 3) == [rows[4], rows[3], UsageRow("a/chat", "*", "", 3, 3)]


ROWS = st.builds(
    UsageRow,
    st.sampled_from(["", "a/x", "a/y", "b/x"]),
    st.sampled_from(["", "*", "a/1", "a/2", "a/*", "b/1", "c/1", "ann", "system:serviceaccount:d:web"]),
    st.sampled_from(["", "batch"]),
    *[st.integers(0, 9)] * 4,
)


@given(st.lists(ROWS, max_size=40), st.integers(1, 12))
def test_the_sums_stay_and_small_namespaces_keep_their_rows(rows: list[UsageRow], most: int) -> None:
    found = limit_rows(rows, most)
    assert len(found) <= most
    assert sum(row.requests for row in found) == sum(row.requests for row in rows)
    assert sum(row.completion_tokens for row in found) == sum(row.completion_tokens for row in rows)
    namespaces = {find_namespace(row.service, row.caller) for row in rows}
    for row in rows:
        namespace = find_namespace(row.service, row.caller)
        of_one = [each for each in rows if find_namespace(each.service, each.caller) == namespace]
        if len(of_one) * len(namespaces) <= most:
            assert any(
                (each.service, each.caller, each.request_class) == (row.service, row.caller, row.request_class)
                for each in found
            )
