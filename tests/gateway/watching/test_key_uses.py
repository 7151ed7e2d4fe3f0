"""Tests which uses of keys a gateway reports, and that the operator reads each change once."""

import json

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.engine_servers import answering
from tests.gateway.keys import make_api_key, make_key
from tests.gateway.local import local_gateway
from tests.gateway.local import make_key as make_local_key

from conveyor_gateway.caller import Caller
from conveyor_gateway.errors import Code
from conveyor_gateway.watching.key_uses import KeyLog
from conveyor_gateway.watching.keys import KeyTable
from conveyor_protocol.key_uses import MAX_CHANGES, KeyUse

DAY = 86_400.0


class Clock:
    """A log, and a clock that begins on the second day of 1970."""

    def __init__(self) -> None:
        self.now = DAY
        self.log = KeyLog(lambda: self.now)

    def use(self, key: str = "team/ci") -> None:
        self.log.note_use(key, self.now)


def test_a_key_changes_once_a_day_by_uses_and_once_by_rejections() -> None:
    clock, caller = Clock(), Caller("team/ci", "team")
    for _ in range(3):
        clock.use()
        clock.log.note_error(caller, Code.RATE_LIMITED)
        clock.log.note_error(caller, Code.SERVICE_NOT_FOUND)
        clock.log.note_error(caller, Code.QUEUE_FULL)
    page = clock.log.build_page("")
    assert page.keys == [KeyUse("team", "ci", "1970-01-02", "1970-01-02", "RateLimited")]
    assert clock.log.build_page(page.cursor).keys == []
    clock.now += DAY
    clock.use()
    page = clock.log.build_page(page.cursor)
    assert page.keys == [KeyUse("team", "ci", "1970-01-03", "1970-01-02", "RateLimited")]
    clock.log.note_error(caller, Code.MODEL_NOT_FOUND)
    assert clock.log.build_page(page.cursor).keys == [KeyUse("team", "ci", "1970-01-03", "1970-01-03", "NotFound")]


def test_a_page_is_small_and_the_next_one_goes_on() -> None:
    clock, found, cursor = Clock(), [], ""
    for number in range(2 * MAX_CHANGES + 1):
        clock.use(f"team/{number}")
    for expected in (MAX_CHANGES, MAX_CHANGES, 1, 0):
        page = clock.log.build_page(cursor)
        assert len(page.keys) == expected
        found += [use.name for use in page.keys]
        cursor = page.cursor
    assert found == [str(number) for number in range(2 * MAX_CHANGES + 1)]


def test_many_keys_of_one_namespace_do_not_delay_those_of_others() -> None:
    clock = Clock()
    for number in range(100):
        clock.use(f"many/{number}")
    first = clock.log.build_page("")
    assert [use.name for use in first.keys] == [str(number) for number in range(MAX_CHANGES)]
    clock.use("few/a")
    clock.use("few/b")
    second = clock.log.build_page(first.cursor)
    assert [use.name for use in second.keys[:4]] == [str(MAX_CHANGES), "a", str(MAX_CHANGES + 1), "b"]
    assert clock.log.build_page(first.cursor) == second, "a page that was not written is read again"
    clock.log.forget("many/50")
    found, cursor = [*first.keys, *second.keys], second.cursor
    while (page := clock.log.build_page(cursor)).keys:
        found, cursor = found + page.keys, page.cursor
    assert sorted(use.name for use in found) == sorted([*map(str, range(50)), *map(str, range(51, 100)), "a", "b"])


@given(st.lists(st.one_of(st.none(), st.sampled_from(["a/1", "a/2", "a/3", "b/1", "c/1"])), max_size=200))
def test_a_reader_gets_each_last_change(events: list[str | None]) -> None:
    clock, cursor, used, seen = Clock(), "", dict[str, str](), dict[str, str]()
    for event in [*events, *[None] * 10]:
        if event is None:
            page = clock.log.build_page(cursor)
            cursor = page.cursor
            seen |= {f"{use.namespace}/{use.name}": use.used for use in page.keys}
        else:
            clock.now += DAY
            clock.use(event)
            used[event] = clock.log._today
    assert seen == used


@pytest.mark.parametrize("cursor", ["", "other:7", "x", ":", "1:1", "1:1:1", "::"])
def test_a_cursor_of_another_process_begins_from_the_start(cursor: str) -> None:
    clock = Clock()
    clock.use()
    assert len(clock.log.build_page(cursor).keys) == 1


def test_a_deleted_key_is_forgotten_and_an_expired_one_is_reported() -> None:
    table = KeyTable(lambda: DAY)
    for name, expires in (("ci", "2027-01-01T00:00:00Z"), ("old", "1970-01-01T12:00:00Z")):
        table.put(make_api_key("team", name, make_key("team", len(name)), expires=expires))
        table.find(make_key("team", len(name)))
    assert table.log.build_page("").keys == [
        KeyUse("team", "ci", "1970-01-02"),
        KeyUse("team", "old", "", "1970-01-02", "Expired"),
    ]
    table.delete(make_api_key("team", "ci"))
    table.log.note_error(Caller("team/ci", "team"), Code.RATE_LIMITED)
    assert [use.name for use in table.log.build_page("").keys] == ["old"]


async def test_the_page_has_what_clients_got() -> None:
    key, resource = make_local_key("team/ann", limits={"requestsPerMinute": 1})
    other, its_resource = make_local_key("team/bob", services=["else"])
    async with (
        local_gateway(
            answering(web.json_response, data={}), resource, its_resource, access={"mode": "Required"}
        ) as gateway,
        aiohttp.ClientSession() as http,
    ):
        for sent, status in ((key, 200), (key, 429), (other, 404)):
            async with http.post(
                f"{gateway.url}/completions", json={"prompt": "a"}, headers={"x-api-key": sent}
            ) as got:
                assert got.status == status
        async with http.get(f"{gateway.admin_url}/keys") as got:
            found = {(name, reason) for _, name, _, _, reason in json.loads(await got.read())["keys"]}
    assert found == {("ann", "RateLimited"), ("bob", "NotFound")}
