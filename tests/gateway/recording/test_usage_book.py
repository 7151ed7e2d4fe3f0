"""Tests the counts of callers by day, and their page."""

import json

import aiohttp
from aiohttp import web
from tests.gateway.engine_servers import answering
from tests.gateway.local import local_gateway, make_key

from conveyor_gateway.recording.usage_book import MAX_ROWS, UsageBook
from conveyor_protocol.usage import UsedTokens
from conveyor_protocol.usage_rows import UsageRow

DAY = 86_400
USED = UsedTokens(10, 4, 3)


def test_requests_of_one_caller_class_and_service_have_one_row_each_day() -> None:
    now = 20 * DAY + 100.0
    book = UsageBook(lambda: now)
    for _ in range(2):
        book.count("team/chat", "team/ann", "batch", USED)
    book.count("team/chat", "", "", None)
    now += DAY
    book.count("team/chat", "team/ann", "batch", USED)
    assert book.build_page().days == {
        "1970-01-21": [UsageRow("team/chat", "team/ann", "batch", 2, 20, 8, 6), UsageRow("team/chat", "", "", 1)],
        "1970-01-22": [UsageRow("team/chat", "team/ann", "batch", 1, 10, 4, 3)],
    }
    now += 5 * DAY
    book.count("team/chat", "team/ann", "", USED)
    assert list(book.build_page().days) == ["1970-01-22", "1970-01-27"]


def test_further_callers_of_a_namespace_are_counted_together_and_no_request_is_lost() -> None:
    book = UsageBook(lambda: 0.0)
    book.count("team/chat", "other/first", "", USED)
    for number in range(5 * MAX_ROWS):
        book.count("team/chat", f"team/{number}", "", USED)
        book.count("team/chat", "team/0", "", USED)
    book.count("team/chat", "other/last", "", USED)
    (rows,) = book.build_page().days.values()
    assert len(rows) == MAX_ROWS
    assert sum(row.requests for row in rows) == 10 * MAX_ROWS + 2
    found = {row.caller: row.requests for row in rows}
    assert (found["other/first"], found["other/last"], found["team/0"]) == (1, 1, 5 * MAX_ROWS + 1)
    assert found["team/*"] == 5 * MAX_ROWS - (MAX_ROWS - 3)
    assert len(book._today) <= 2 * MAX_ROWS


async def test_the_page_has_what_a_key_used_and_what_clients_without_one_used() -> None:
    usage = {"prompt_tokens": 30, "cached_tokens": 8, "completion_tokens": 20}
    answer = answering(web.json_response, data={}, headers={"X-Engine-Usage": json.dumps(usage)})
    key, resource = make_key("team/ann")
    async with local_gateway(answer, resource) as gateway, aiohttp.ClientSession() as http:
        for headers in ({"x-api-key": key}, {"x-api-key": key}, {}):
            async with http.post(f"{gateway.url}/completions", json={"prompt": "a"}, headers=headers) as got:
                assert got.status == 200
        async with http.get(f"{gateway.admin_url}/usage") as got:
            page = await got.json()
    ((_, rows),) = page["days"].items()
    assert sorted(rows) == [
        ["team/chat", "", "", 1, 30, 8, 20, 0.0, 0.0],
        ["team/chat", "team/ann", "", 2, 60, 16, 40, 0.0, 0.0],
    ]
