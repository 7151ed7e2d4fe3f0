"""Tests which names of callers a reader sees, and the sums of what is hidden."""

from conveyor_console.callers import select_usage, select_waiting, show_caller, show_service
from conveyor_console.pages import render_usage
from conveyor_console.requests import Waiting
from conveyor_protocol.usage_rows import UsageRow

ACCOUNT = "system:serviceaccount:apps:web"
ROWS = [
    UsageRow("team/chat", "team/ann", "", 1, 10, 5, 20, 100.0),
    UsageRow("team/chat", "team/bob", "", 2, 20, 0, 40, 200.0),
    UsageRow("team/chat", ACCOUNT, "", 1, 1, 0, 1, 1.0),
    UsageRow("team/chat", "", "", 1, 2, 0, 2, 1.0),
    UsageRow("other/chat", "team/ann", "", 1, 3, 0, 3, 1.0),
    UsageRow("other/chat", "other/eve", "", 1, 9, 0, 9, 1.0),
    UsageRow("", "*", "", 7, 7, 0, 7, 7.0),
]


def describe(seen: set[str], named: set[str]) -> dict[tuple[str, str], int]:
    return {(row.service, row.caller): row.requests for row in select_usage(ROWS, seen, named)}


def test_who_may_list_services_only_sees_the_callers_of_a_namespace_as_one() -> None:
    assert describe({"team"}, set()) == {
        ("team/chat", "team/*"): 3,
        ("team/chat", "apps/*"): 1,
        ("team/chat", ""): 1,
    }
    (first, *_) = select_usage(ROWS, {"team"}, set())
    assert first == UsageRow("team/chat", "team/*", "", 3, 30, 5, 60, 300.0)


def test_who_may_list_keys_sees_their_names_and_their_use_of_other_namespaces() -> None:
    assert describe({"team"}, {"team"}) == {
        ("team/chat", "team/bob"): 2,
        ("team/chat", "team/ann"): 1,
        ("other/chat", "team/ann"): 1,
        ("team/chat", ""): 1,
        ("team/chat", "apps/*"): 1,
    }
    assert describe(set(), set()) == {}


def test_only_who_sees_all_namespaces_sees_the_sum_of_several() -> None:
    everywhere = {"", "team", "other", "apps"}
    assert len(describe(everywhere, everywhere)) == len(ROWS)


def test_rows_without_a_namespace_are_others_for_who_sees_all_services_and_no_names() -> None:
    rows = [UsageRow("", "*", "", 7), UsageRow("", "by-a-proxy", "", 1)]
    assert select_usage(rows, {""}, set()) == [UsageRow("", "*", "", 8)]


def test_clients_that_wait_are_summed_over_gateways_and_have_no_address() -> None:
    waiting = [
        Waiting("team/ann", "", 1, 2.0),
        Waiting("team/ann", "", 2, 1.0),
        Waiting("203.0.113.7", "", 1, 3.0),
        Waiting("2001:db8::/64", "", 1, 4.0),
        Waiting("by-a-proxy", "", 1, 1.0),
        Waiting("apps/*", "", 1, 1.0),
    ]
    assert select_waiting(waiting, "team/chat", {"team"}, 10) == [
        Waiting("", "", 3, 4.0),
        Waiting("team/ann", "", 3, 2.0),
        Waiting("apps/*", "", 1, 1.0),
    ]
    assert Waiting("team/*", "", 3, 2.0) in select_waiting(waiting, "team/chat", set(), 10)


def test_only_services_that_a_reader_sees_have_links() -> None:
    page = render_usage(select_usage(ROWS, {"team"}, {"team"}), {"team"}, 1, "", "ann")
    assert '<a href="/services/team/chat">' in page
    assert "other/chat" in page
    assert '<a href="/services/other/chat">' not in page
    everywhere = {"", "team", "other"}
    assert '<a href="/services/">' not in render_usage(ROWS, everywhere, 1, "", "ann")


def test_those_who_wait_longest_and_the_one_with_most_requests_are_shown() -> None:
    waiting = [Waiting(f"team/key{number}", "", 1, float(number)) for number in range(30)]
    flood = Waiting("team/flood", "", 900, 0.5)
    shown = select_waiting([flood, *waiting], "team/chat", {"team"}, 20)
    assert shown == [*waiting[:10:-1], flood]
    first = Waiting("team/first", "", 1000, 99.0)
    assert select_waiting([flood, *waiting, first], "team/chat", {"team"}, 20) == [first, *waiting[:10:-1]]
    assert select_waiting([], "team/chat", {"team"}, 20) == []


def test_names_are_those_that_people_know() -> None:
    names = [show_caller(each) for each in ("", "*", "apps/*", ACCOUNT, "team/ann", "by-a-proxy")]
    assert names == ["without a key", "others", "others of apps", "ServiceAccount apps/web", "team/ann", "by-a-proxy"]
    assert [show_service(row) for row in (ROWS[0], ROWS[-1], UsageRow("", "team/ann", ""))] == [
        "team/chat",
        "several",
        "deleted",
    ]
