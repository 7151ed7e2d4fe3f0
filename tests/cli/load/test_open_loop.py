"""Checks that requests are sent when they are due, to a real server that responds at any speed."""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import EVENT_STREAM, Engine, running_engine

from conveyor_load.open_loop import Limits, open_session, run
from conveyor_load.requests import Target
from conveyor_load.sending import Answer, SendError, calibrate
from conveyor_load.traces import Arrival, Trace

Json = dict[str, Any]


def event(content: Json) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> Json:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


async def stream(request: web.Request) -> web.StreamResponse:
    """Stream three tokens, 50 ms apart, whatever the request asks for. The usage counts four tokens for each word."""
    body = json.loads(await request.read())
    response = web.StreamResponse(headers=EVENT_STREAM)
    await response.prepare(request)
    for number in range(3):
        await asyncio.sleep(0.05)
        await response.write(event({"choices": [{"text": str(number)}], "usage": None}))
    await response.write(event(usage(2 + 4 * len(body["prompt"].split()), 3)) + b"data: [DONE]\n\n")
    return response


def make_target(engine: Engine, task: str = "Generate") -> Target:
    return Target(f"http://{own_address()}:{engine.port}", "tiny", task)


def make_trace(number: int, rate: float, tokens: int = 20) -> Trace:
    return Trace(tuple(Arrival(each / rate, tokens, 3) for each in range(number)))


async def send_all(engine: Engine, trace: Trace, limits: Limits, task: str = "Generate") -> list[Answer]:
    async with open_session(limits) as session:
        return await run(session, make_target(engine, task), trace, limits)


async def test_times_are_those_of_the_events() -> None:
    async with running_engine(stream) as engine:
        answers = await send_all(engine, make_trace(5, 20), Limits())
    assert [answer.problem for answer in answers] == [""] * 5
    for answer in answers:
        assert answer.output_tokens == 3
        assert answer.ttft_seconds >= 0.05
        assert answer.latency_seconds >= 0.15
        first, second = answer.gaps
        assert answer.itl_seconds == pytest.approx((first + second) / 2, rel=1e-4)
        assert answer.ttft_seconds + first + second == pytest.approx(answer.latency_seconds, rel=1e-4)
    bodies = [json.loads(body) for _, body in engine.requests]
    assert {body["max_tokens"] for body in bodies} == {3}
    assert all(body["ignore_eos"] and body["stream"] for body in bodies)
    assert len({body["prompt"] for body in bodies}) == 5, "no prompt is in a prefix cache"


async def test_a_slow_server_delays_no_request() -> None:
    release = asyncio.Event()

    async def answer(_: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response({"usage": {"prompt_tokens": 1}})

    async with running_engine(answer) as engine:
        running = asyncio.create_task(send_all(engine, make_trace(8, 100), Limits(), "Embed"))
        async with asyncio.timeout(30):
            while len(engine.requests) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        release.set()
        answers = await running
    assert not any(each.problem for each in answers)


async def test_requests_beyond_the_bound_are_reported_and_not_sent() -> None:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError("it was cancelled")

    async with running_engine(never) as engine:
        answers = await send_all(engine, make_trace(10, 1000), Limits(in_flight=4, request_seconds=1), "Embed")
    assert [answer.problem for answer in answers] == ["no whole answer in time"] * 4 + ["not sent: 4 in flight"] * 6


async def test_cancellation_ends_what_is_in_flight() -> None:
    cancelled = 0

    async def never(_: web.Request) -> web.StreamResponse:
        nonlocal cancelled
        try:
            await asyncio.sleep(60)
        finally:
            cancelled += 1
        raise AssertionError("it was cancelled")

    async with running_engine(never) as engine:
        running = asyncio.create_task(send_all(engine, make_trace(3, 1000), Limits(), "Embed"))
        async with asyncio.timeout(30):
            while len(engine.requests) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            while cancelled < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def answer_with(status: int, content: bytes, **headers: str) -> Any:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=content, headers=headers)

    return answer


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (429, b'{"error": {"code": "queue_full", "message": "later"}}', "HTTP 429 queue_full"),
        (502, b"<html>", "HTTP 502"),
        (302, b"", "HTTP 302"),
        (200, event({"choices": [{"text": "a"}]}), "stream ended early"),
        (200, event({"error": {"message": "x"}}) + b"data: [DONE]\n\n", "error in the stream"),
        (200, b"data: {\n\n", "unreadable answer"),
        (200, b"data: " + b"x" * (2 << 20), "unreadable answer: an event of more than"),
    ],
)
async def test_a_wrong_answer_is_a_problem_of_its_kind(status: int, content: bytes, message: str) -> None:
    async with running_engine(answer_with(status, content)) as engine:
        (answer,) = await send_all(engine, make_trace(1, 1), Limits())
    assert answer.problem.startswith(message)


async def test_nobody_there_is_a_problem() -> None:
    async with running_engine(stream) as engine:
        target = make_target(engine)
    async with open_session(Limits()) as session:
        (answer,) = await run(session, target, make_trace(1, 1), Limits())
    assert answer.problem.startswith("connection failed")


async def test_prompts_are_as_long_as_they_should_be_for_any_tokenizer() -> None:
    async with running_engine(stream) as engine, open_session(Limits()) as session:
        target = await calibrate(session, make_target(engine))
        assert (target.tokens_per_word, target.extra_tokens) == (4, 2)
        (answer,) = await run(session, target, make_trace(1, 1, tokens=402), Limits())
    assert answer.prompt_tokens == 402


async def test_a_service_that_does_not_answer_is_reported_before_the_load() -> None:
    async with running_engine(answer_with(503, b"")) as engine, open_session(Limits()) as session:
        with pytest.raises(SendError, match=r"does not answer a request of 8 words: HTTP 503") as raised:
            await calibrate(session, make_target(engine))
        assert not raised.value.lasts
    async with running_engine(answer_with(400, b"")) as engine, open_session(Limits()) as session:
        with pytest.raises(SendError, match="HTTP 400") as raised:
            await calibrate(session, make_target(engine))
        assert raised.value.lasts
    async with (
        running_engine(answer_with(200, b"data: [DONE]\n\n")) as engine,
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises(SendError, match="does not report usage"):
            await calibrate(session, make_target(engine))


async def test_each_task_has_its_body() -> None:
    async with running_engine(answer_with(200, b'{"usage": {"prompt_tokens": 9}}')) as engine:
        for task in ("Embed", "Rerank", "Classify"):
            (answer,) = await send_all(engine, make_trace(1, 1), Limits(), task)
            assert (answer.problem, answer.prompt_tokens, answer.output_tokens) == ("", 9, 0)
            assert answer.first == answer.last <= time.monotonic()
    sent = [(request.path, sorted(json.loads(body))) for request, body in engine.requests]
    assert sent == [
        ("/v1/embeddings", ["input", "model"]),
        ("/v1/rerank", ["documents", "model", "query"]),
        ("/classify", ["input", "model"]),
    ]
