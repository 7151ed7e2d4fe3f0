"""Compares the tokens of requests in a real gateway's log and counters with those that the engine has counted."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from tests.contract.serving import serving
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.process import GatewayProcess

from e2e.cluster.api import Api

BODY = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    folder = tmp_path_factory.mktemp("engine")
    with EngineServer(folder, model, IDLE, host="0.0.0.0", max_num_seqs=4, num_kv_blocks=8192) as started:
        yield started.wait_ready()


async def find_line(gateway: GatewayProcess, request_id: str) -> dict[str, str]:
    async with asyncio.timeout(60):
        while True:
            for line in await asyncio.to_thread(lambda: gateway.log):
                if f" event=request id={request_id} " in line:
                    return dict(pair.split("=", 1) for pair in line.split(" "))
            await asyncio.sleep(0.05)


async def test_the_gateway_logs_and_counts_what_the_engine_has_generated(
    engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    async with serving(engine, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:

        def post(request_id: str, **fields: Any) -> Any:
            headers = {"X-Request-Id": f"{namespace}-{request_id}"}
            return http.post(f"{gateway.url}/{service}/v1/completions", json=BODY | fields, headers=headers)

        async with post("whole", n=2) as answer:
            usage = (await answer.json())["usage"]
        async with post("stream", stream=True) as answer:
            body = await answer.read()
        assert body.endswith(b"data: [DONE]\n\n"), "the report is not the client's"
        async with post("left", stream=True, max_tokens=8000) as answer:
            seen = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
        lines = {each: await find_line(gateway, f"{namespace}-{each}") for each in ("whole", "stream", "left")}
        labels = {"namespace": namespace, "inference_service": "tiny"}
        counted = [
            await asyncio.to_thread(gateway.metric, f"conveyor_gateway_{name}_tokens_total", **labels)
            for name in ("prompt", "generation")
        ]

    assert lines["whole"]["prompt_tokens"] == str(usage["prompt_tokens"])
    assert lines["whole"]["completion_tokens"] == str(usage["completion_tokens"]) == "40"
    assert lines["stream"]["completion_tokens"] == "20"
    assert lines["left"]["status"] == "499"
    assert len(seen) <= int(lines["left"]["completion_tokens"]) < 8000
    assert json.loads(seen[0].removeprefix(b"data: "))["choices"]
    logged = [sum(int(line[name]) for line in lines.values()) for name in ("prompt_tokens", "completion_tokens")]
    assert counted == logged


OTHERS: dict[str, tuple[dict[str, Any], str, bytes]] = {
    "messages": ({"messages": [{"role": "user", "content": "hello"}]}, "max_tokens", b'{"type":"message_stop"}\n\n'),
    "responses": ({"input": "hello"}, "max_output_tokens", b"data: [DONE]\n\n"),
}


@pytest.mark.parametrize("path", OTHERS)
async def test_apis_that_are_translated_are_routed_and_counted_alike(
    engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str, path: str
) -> None:
    body, limit, end = OTHERS[path]
    async with serving(engine, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:

        def post(request_id: str, **fields: Any) -> Any:
            headers = {"X-Request-Id": f"{namespace}-{request_id}"}
            sent = body | {"model": service, limit: 20, "ignore_eos": True} | fields
            return http.post(f"{gateway.url}/v1/{path}", json=sent, headers=headers)  # the root: `model` routes

        async with post("whole") as answer:
            usage = (await answer.json())["usage"]
        async with post("stream", stream=True) as answer:
            assert (await answer.read()).endswith(end), "the report is not the client's"
        async with post("left", stream=True, **{limit: 8000}) as answer:
            await answer.content.readuntil(b"\n\n")
        async with post("wrong", **{limit: 0}) as answer:
            assert answer.status == 400
        lines = {each: await find_line(gateway, f"{namespace}-{each}") for each in ("whole", "stream", "left", "wrong")}
        await asyncio.to_thread(engine.wait_load, running=0, waiting=0)

    for each in ("whole", "stream"):
        assert lines[each]["prompt_tokens"] == str(usage["input_tokens"])
        assert lines[each]["completion_tokens"] == str(usage["output_tokens"]) == "20"
    assert lines["left"]["status"] == "499"
    assert 0 < int(lines["left"]["completion_tokens"]) < 8000
    assert {line["path"] for line in lines.values()} == {f"/v1/{path}"}


async def test_the_lines_of_both_programs_about_a_request_have_its_trace(
    engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    trace_id = namespace.encode().hex().ljust(32, "0")[:32]
    headers = {"X-Request-Id": f"{namespace}-traced", "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    body = BODY | {"stream": True, "max_tokens": 8000}
    async with serving(engine, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:
        async with http.post(f"{gateway.url}/{service}/v1/completions", json=body, headers=headers) as answer:
            await answer.content.readuntil(b"\n\n")
        line = await find_line(gateway, f"{namespace}-traced")
        async with asyncio.timeout(60):
            while f"trace_id={trace_id}" not in engine.log_path.read_text():  # noqa: ASYNC110  a log has no event
                await asyncio.sleep(0.05)
        async with http.post(f"{gateway.url}/{service}/v1/completions", json=BODY) as answer:
            await answer.read()
    assert line["trace_id"] == trace_id
    (told,) = [each for each in engine.log_path.read_text().splitlines() if f" trace_id={trace_id}" in each]
    assert " event=client_left " in told
