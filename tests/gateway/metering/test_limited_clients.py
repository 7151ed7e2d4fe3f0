"""Tests that clients with keys are limited over HTTP, and that OpenAI's client waits as long as it is told."""

import asyncio
import json
import time

import aiohttp
import openai
import pytest
from aiohttp import web
from tests.gateway.engine_servers import EVENT_STREAM, answering
from tests.gateway.local import local_gateway, make_key

ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "chat",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}],
    "usage": {"prompt_tokens": 30, "completion_tokens": 20, "total_tokens": 50},
}
USAGE = {"prompt_tokens": 30, "cached_tokens": 0, "completion_tokens": 20}
answer = answering(web.json_response, data=ANSWER, headers={"X-Engine-Usage": json.dumps(USAGE)})
MESSAGES = [{"role": "user", "content": "Is it so?"}]


async def test_openais_client_waits_as_long_as_it_is_told_and_then_succeeds() -> None:
    key, resource = make_key("team/ann", limits={"requestsPerMinute": 60, "concurrentRequests": 10})
    async with local_gateway(answer, resource) as gateway:
        client = openai.AsyncOpenAI(base_url=gateway.url, api_key=key, max_retries=2)
        call = client.chat.completions.with_raw_response.create
        answers = await asyncio.gather(*(call(model="chat", messages=MESSAGES) for _ in range(5)))
        assert min(int(each.headers["x-ratelimit-remaining-requests"]) for each in answers) == 55
        impatient = client.with_options(max_retries=0).chat.completions
        with pytest.raises(openai.RateLimitError) as caught:
            await asyncio.gather(*(impatient.create(model="chat", messages=MESSAGES) for _ in range(80)))
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "1"
        began = time.monotonic()
        assert (await call(model="chat", messages=MESSAGES)).parse().choices[0].message.content == "yes"
        assert 0.3 < time.monotonic() - began < 5


async def test_tokens_are_those_that_the_engine_reports_and_the_headers_say_what_is_left() -> None:
    key, resource = make_key("team/ann", limits={"tokensPerMinute": 100})
    async with local_gateway(answer, resource) as gateway, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {key}"}
        statuses, left = [], []
        for _ in range(3):
            async with http.post(
                f"{gateway.url}/chat/completions", json={"messages": MESSAGES}, headers=headers
            ) as got:
                statuses.append(got.status)
                left.append(int(got.headers["x-ratelimit-remaining-tokens"]))
        assert statuses == [200, 200, 429]
        assert left[0] > 70
        assert left[1] < 50
        async with http.post(f"{gateway.url}/chat/completions", json={"messages": MESSAGES}) as got:
            assert got.status == 200, "callers without a key have no limits here"
            assert not [name for name in got.headers if name.lower().startswith("x-ratelimit")]


async def test_a_stream_counts_while_it_runs_and_its_place_among_those_at_a_time_is_free_at_its_end() -> None:
    go_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENT_STREAM)
        await response.prepare(request)
        for number in range(40):
            await response.write(b'data: {"n": %d}\n\n' % number)
        await go_on.wait()
        await response.write_eof()
        return response

    key, resource = make_key("team/ann", limits={"tokensPerMinute": 100, "concurrentRequests": 1})
    async with local_gateway(stream, resource) as gateway, aiohttp.ClientSession() as http:
        url, headers = f"{gateway.url}/chat/completions", {"x-api-key": key}
        body = {"messages": MESSAGES, "stream": True}
        async with http.post(url, json=body, headers=headers) as running:
            await running.content.readexactly(40 * 15)
            async with http.post(url, json=body, headers=headers) as refused:
                assert refused.status == 429
                assert "requests at a time" in (await refused.json())["error"]["message"]
            go_on.set()
            await running.read()
        async with http.post(url, json=body, headers=headers) as second:
            assert (second.status, int(second.headers["x-ratelimit-remaining-tokens"]) < 40) == (200, True)


async def test_answers_of_engines_that_report_nothing_count_by_their_bytes() -> None:
    """A page of text is about a token for each four bytes, and an empty line in it is no event of a stream."""
    text = "a word \n\n" * 40
    whole = answering(web.json_response, data={**ANSWER, "choices": [{"text": text}]})
    key, resource = make_key("team/ann", limits={"tokensPerMinute": 1000})
    async with local_gateway(whole, resource) as gateway, aiohttp.ClientSession() as http:
        left = []
        for body in ({"messages": MESSAGES, "max_tokens": 500}, {"messages": MESSAGES}):
            async with http.post(f"{gateway.url}/chat/completions", json=body, headers={"x-api-key": key}) as got:
                num_bytes = len(await got.read())
                left.append(int(got.headers["x-ratelimit-remaining-tokens"]))
    assert left[0] - left[1] == pytest.approx(num_bytes / 4 + 15, abs=10)


async def test_the_pieces_of_a_long_answer_that_is_no_stream_count_by_their_bytes() -> None:
    async def send_text(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        for _ in range(10):
            await response.write(b"\n\n" * 100_000)
        await response.write_eof()
        return response

    key, resource = make_key("team/ann", limits={"tokensPerMinute": 300})
    async with local_gateway(send_text, resource) as gateway, aiohttp.ClientSession() as http:
        url, headers = f"{gateway.url}/chat/completions", {"x-api-key": key}
        for expected in (284, 218):
            async with http.post(url, json={"messages": MESSAGES, "max_tokens": 50}, headers=headers) as got:
                await got.read()
                assert int(got.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(expected, abs=15)


async def test_requests_that_engines_only_refuse_use_nothing_and_are_no_usage() -> None:
    key, resource = make_key("team/ann", limits={"tokensPerDay": 300, "requestsPerMinute": 2})
    headers = {"x-api-key": key, "X-Request-Timeout-Seconds": "0.3"}
    refusals = []

    async def refuse(request: web.Request) -> web.StreamResponse:
        refusals.append(request)
        return web.Response(status=503)

    async with local_gateway(refuse, resource) as gateway, aiohttp.ClientSession() as http:
        for _ in range(4):
            body = {"messages": [{"role": "user", "content": "word " * 200}]}
            async with http.post(f"{gateway.url}/chat/completions", json=body, headers=headers) as got:
                assert got.status == 504
        assert len(refusals) >= 4
        async with http.get(f"{gateway.admin_url}/usage") as got:
            assert (await got.json())["days"] == {}
        async with http.get(f"{gateway.admin_url}/metrics") as got:
            assert "conveyor_gateway_client_requests_total{" not in await got.text()


async def test_rejected_requests_use_nothing_of_a_day() -> None:
    key, resource = make_key("team/ann", limits={"tokensPerDay": 300})
    headers = {"x-api-key": key, "X-Request-Timeout-Seconds": "0.05"}
    async with local_gateway(answer, resource) as gateway, aiohttp.ClientSession() as http:
        gateway.server._catalog.slices.delete({"metadata": {"namespace": "team", "name": "engine"}})
        for _ in range(10):
            body = {"messages": [{"role": "user", "content": "word " * 50}]}
            async with http.post(f"{gateway.url}/chat/completions", json=body, headers=headers) as got:
                assert got.status == 504


async def test_all_keys_of_another_namespace_have_one_share_of_the_queue() -> None:
    """In a full queue, the client with most requests loses one. With a share for each key, the newcomer would be it."""
    go_on, made = asyncio.Event(), [make_key(f"other/{number}", services=["team/chat"]) for number in range(8)]

    async def wait(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response(ANSWER)

    spec = {"batching": {"maxBatchSize": 1}, "queue": {"maxRequests": 3}, "access": {"keyNamespaces": ["other"]}}
    async with (
        local_gateway(wait, *(resource for _, resource in made), **spec) as gateway,
        aiohttp.ClientSession() as http,
    ):

        async def send(headers: dict[str, str]) -> int:
            async with http.post(
                f"{gateway.url}/chat/completions", json={"messages": MESSAGES}, headers=headers
            ) as got:
                return got.status

        many = [asyncio.create_task(send({"x-api-key": key})) for key, _ in made]
        await asyncio.sleep(0.3)
        one = asyncio.create_task(send({}))
        await asyncio.sleep(0.3)
        go_on.set()
        assert await one == 200
        assert sorted(await asyncio.gather(*many))[-4:] == [429] * 4


async def test_a_keys_max_class_lowers_a_more_urgent_class() -> None:
    key, resource = make_key("team/ann", maxClass="batch")
    classes = [{"name": "chat", "level": 0}, {"name": "batch", "level": 5}]
    seen = []

    async def note_level(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["X-Request-Level"])
        return web.json_response(ANSWER)

    async with (
        local_gateway(note_level, resource, queue={"classes": classes}) as gateway,
        aiohttp.ClientSession(headers={"X-Request-Class": "chat"}) as http,
    ):
        for headers in ({"x-api-key": key}, {}):
            await http.post(f"{gateway.url}/chat/completions", json={"messages": MESSAGES}, headers=headers)
    assert seen == ["5", "0"]
