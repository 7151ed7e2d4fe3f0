"""Tests what the console requests from Prometheus, and that a server that is slow, away or hostile harms nothing.

`tests/alerts` runs the queries in a real Prometheus.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

import aiohttp
import pytest
from aiohttp import web

from conveyor_console import prometheus
from conveyor_console.past import NUM_POINTS, QUEUED, SPANS, TimeLines, build_past, parse_time
from conveyor_console.prometheus import QUERIES, Prometheus

USER, SERVICE = "ann", "team/qwen"
Answer = Callable[[dict[str, str]], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[Prometheus, list[dict[str, str]]]]:
    """Yield a reader of a server that answers in this way, and the queries that it gets."""
    asked: list[dict[str, str]] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        asked.append({name: value for name, (value,) in parse_qs(await request.text()).items()})
        return await answer(asked[-1])

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield Prometheus(session, f"http://127.0.0.1:{runner.addresses[0][1]}/"), asked
    await runner.cleanup()


def encode(*values: Any) -> web.Response:
    """Return the answer with one series."""
    series = [{"metric": {}, "values": list(values)}] if values else []
    return web.json_response({"status": "success", "data": {"resultType": "matrix", "result": series}})


async def count_up(query: dict[str, str]) -> web.StreamResponse:
    start, step = int(query["start"]), int(query["step"])
    return encode(*((start + number * step, str(number)) for number in range(NUM_POINTS)))


@pytest.mark.parametrize("span", SPANS)
async def test_a_read_has_one_query_for_each_line_of_the_service_and_the_same_number_of_points(span: str) -> None:
    async with serving(count_up) as (reader, asked):
        lines = await reader.read(USER, SERVICE, span)
        again = await asyncio.gather(*(reader.read(USER, SERVICE, span) for _ in range(20)))
    assert lines is not None
    assert all(each is lines for each in again), "viewers share a read"
    assert len(asked) == len(QUERIES)
    assert all('namespace="team",inference_service="qwen"' in each["query"] for each in asked)
    assert {(int(each["end"]) - int(each["start"])) // int(each["step"]) for each in asked} == {NUM_POINTS - 1}
    assert {int(each["end"]) - int(each["start"]) for each in asked} == {SPANS[span]}
    assert all(time.time() - SPANS[span] / (NUM_POINTS - 1) - 60 < int(each["end"]) <= time.time() for each in asked)
    assert list(lines.values[QUEUED]) == list(range(NUM_POINTS))
    past = build_past(lines, span, list(SPANS), lines.times[7], "")
    assert dict(past.state)[QUEUED] == "7"


async def test_values_that_are_none_are_left_out() -> None:
    async def answer(query: dict[str, str]) -> web.StreamResponse:
        start, step = int(query["start"]), int(query["step"])
        texts = ("NaN", "+Inf", "-1", "1e300", "x", "5")
        outside = ((start - 100 * step, "7"), (1e300, "7"), (-1e300, "7"))
        return encode(*outside, *((start + number * step, text) for number, text in enumerate(texts)))

    async with serving(answer) as (reader, _):
        lines = await reader.read(USER, SERVICE, "1h")
    assert lines is not None
    known = {place: value for place, value in enumerate(lines.values[QUEUED]) if not math.isnan(value)}
    assert known == {5: 5.0}
    assert build_past(lines, "1h", list(SPANS), None, "").charts[0].top == "5"


async def test_no_series_is_no_value() -> None:
    async def answer(_query: dict[str, str]) -> web.StreamResponse:
        return encode()

    async with serving(answer) as (reader, _):
        lines = await reader.read(USER, SERVICE, "1h")
    assert lines is not None
    assert {text for _, text in build_past(lines, "1h", list(SPANS), None, "").state} == {"–"}


async def redirect(_query: dict[str, str]) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})


async def refuse(_query: dict[str, str]) -> web.StreamResponse:
    return web.Response(status=503, text="overloaded")


async def send_other(_query: dict[str, str]) -> web.StreamResponse:
    return web.Response(body=b'{"data": {"result": [{"values": "\xff"}]}}', content_type="application/json")


async def nest(_query: dict[str, str]) -> web.StreamResponse:
    return web.Response(text='{"data":' + "[" * 30_000, content_type="application/json")


async def send_much(_query: dict[str, str]) -> web.StreamResponse:
    return web.Response(body=b" " * (8 << 20))


async def say_nothing(_query: dict[str, str]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return encode()


@pytest.mark.parametrize("answer", [redirect, refuse, send_other, nest, send_much, say_nothing])
async def test_a_server_that_is_slow_or_hostile_ends_a_read_without_lines(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "_TIMEOUT", aiohttp.ClientTimeout(total=0.5))
    async with asyncio.timeout(30), serving(answer) as (reader, asked):
        assert await reader.read(USER, SERVICE, "1h") is None
        number = len(asked)
        assert await reader.read(USER, SERVICE, "1h") is None
    assert len(asked) == number <= len(QUERIES), "the next viewers do not try again at once"


async def test_a_server_that_is_away_ends_a_read_without_lines() -> None:
    async with aiohttp.ClientSession() as session:
        assert await Prometheus(session, "http://127.0.0.1:1").read(USER, SERVICE, "7d") is None


async def test_many_slow_reads_have_few_connections_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_TOTAL_SECONDS", 1.0)
    open_now = most = 0

    async def answer(_query: dict[str, str]) -> web.StreamResponse:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        try:
            return await say_nothing(_query)
        finally:
            open_now -= 1

    async with asyncio.timeout(30), serving(answer) as (reader, _):
        reads = [asyncio.create_task(reader.read(f"user{number}", f"team/s{number}", "1h")) for number in range(50)]
        await asyncio.sleep(0.5)  # the server does not notice that a read has ended
        assert most <= 2 * len(QUERIES)
        assert set(await asyncio.gather(*reads)) == {None}


async def test_a_user_with_many_reads_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_TOTAL_SECONDS", 2.0)

    async def answer(query: dict[str, str]) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        return await count_up(query)

    async with serving(answer) as (reader, asked):
        greedy = [asyncio.create_task(reader.read("eve", f"team/s{number}", "1h")) for number in range(40)]
        await asyncio.sleep(0.1)
        for task in greedy[:20]:
            task.cancel()  # whoever leaves gets no further read
        assert await reader.read(USER, SERVICE, "1h") is not None
        assert len(asked) <= 3 * len(QUERIES)
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_a_chosen_time_stays_the_same_while_the_lines_go_on() -> None:
    values = {QUEUED: [float(number) for number in range(NUM_POINTS)]}
    for begun in (1000.0, 1025.0):
        lines = TimeLines([begun + 5 * number for number in range(NUM_POINTS)], values)
        past = build_past(lines, "15m", list(SPANS), 1101.0, "")
        assert (past.chosen, past.at) == (1100.0, "1970-01-01 00:18:20")
        assert (past.first, past.last, past.step) == (begun, begun + 900, 5)
    assert build_past(lines, "15m", list(SPANS), 7.0, "").chosen == 1025
    assert build_past(lines, "15m", list(SPANS), 1e300, "").chosen == 1925
    assert [parse_time(text) for text in ("1100", "12.5", "", "x", "nan", "inf")] == [1100, 12.5, *[None] * 4]
    fine = build_past(TimeLines([1796032096.0262773, 1796032105.6710763], {}), "15m", list(SPANS), None, "")
    slider = fine.first, fine.last, fine.step, fine.chosen
    assert slider == (1796032096.026, 1796032105.671, 9.644, 1796032105.671), "browsers reject values between steps"
    empty = build_past(TimeLines((), {}), "15m", list(SPANS), 5.0, "")
    assert (empty.at, empty.state) == ("", [])
