"""Tests that a real gateway and a real engine export the spans of a request as one trace, and nothing that it says.

Each test reads the spans back from a collector of these tests, and at night also from the OpenTelemetry Collector.
"""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.contract.serving import serving
from tests.engine.chat_model import CONTEXT_TOKENS, write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess
from tests.process.collector import AnyCollector, Found
from tests.process.otel_collector import COLLECTORS

from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET, KEY = "xyzzy-prompt", "cvy_xyzzy-key"
REFUSED = ("retry", {"conveyor.reason": "refused"})
OPTIONS = {"max_tokens": 20, "ignore_eos": True, "stream": True}
BODY = {"prompt": SECRET, **OPTIONS}
CHAT = {"messages": [{"role": "user", "content": SECRET}], **OPTIONS}


@pytest.fixture(scope="module", params=COLLECTORS)
def collector(request: pytest.FixtureRequest) -> Iterator[AnyCollector]:
    with pytest.MonkeyPatch.context() as patch, request.param() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


@pytest.fixture(scope="module")
def engine(collector: AnyCollector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("engine")
    with EngineServer(folder, write_chat_model(folder / "tiny"), IDLE, host="0.0.0.0", max_num_seqs=4) as started:
        yield started.wait_ready()


@pytest.fixture
def gateway(collector: AnyCollector, control_plane: ControlPlane, namespace: str) -> Iterator[GatewayProcess]:
    flags = ("--watch-namespaces", namespace, "--drain-delay-seconds", "0", "--log-level", "debug")
    with GatewayProcess(control_plane.kubeconfig, *flags) as gateway:
        yield gateway


async def post(
    gateway: GatewayProcess, service: str, path: str = "/v1/completions", body: Any = None, **headers: str
) -> None:
    body = body or (CHAT if path == "/v1/chat/completions" else BODY)
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{gateway.url}/{service}{path}", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200
        await answer.read()


def wait_for_trace(collector: AnyCollector, request_id: str) -> tuple[Found, Found, list[Found]]:
    """Return the request's span at the gateway, that at the engine, and the parts of both in order."""

    def find(spans: list[Found]) -> list[Found]:
        traces = {span.trace_id for span in spans if span.attributes.get("conveyor.request_id") == request_id}
        return [span for span in spans if span.trace_id in traces]

    wanted = {"conveyor-gateway", "conveyor-engine"}
    found = find(collector.wait(lambda spans: {span.program for span in find(spans) if span.is_server} == wanted))
    by_program = {span.program: span for span in found if span.is_server}
    parts = sorted((span for span in found if not span.is_server), key=lambda span: span.began)
    return by_program["conveyor-gateway"], by_program["conveyor-engine"], parts


@pytest.mark.parametrize(
    ("path", "operation"), [("/v1/completions", "text_completion"), ("/v1/chat/completions", "chat")]
)
async def test_a_request_is_one_trace_of_gateway_and_engine(
    collector: AnyCollector, engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str,
    path: str, operation: str,
) -> None:  # fmt: skip
    trace = operation.encode().hex().zfill(32)
    traced = {"traceparent": f"00-{trace}-{CALLER}-01", "X-Request-Id": operation, "Authorization": f"Bearer {KEY}"}
    async with serving(engine, [gateway], crd, namespace) as service:
        await post(gateway, service, path, **traced)
        outer, inner, found = wait_for_trace(collector, operation)

    assert (outer.trace_id, outer.parent_id) == (trace, CALLER)
    assert (inner.trace_id, inner.parent_id) == (trace, outer.span_id)
    parts = {part.name: part for part in found}
    assert [part.name for part in found if part.parent_id == outer.span_id] == ["read", "queue", "dispatch", "stream"]
    assert [part.name for part in found if part.parent_id == inner.span_id] == ["prepare", "wait", "prefill", "decode"]
    assert len(found) == 8
    for before, after in (("read", "queue"), ("queue", "dispatch"), ("dispatch", "stream"), ("prefill", "decode")):
        assert parts[before].ended == parts[after].began
    tolerance = 2_000_000  # each program relates its clock to Unix time by itself
    assert parts["dispatch"].began - tolerance <= inner.began <= parts["prepare"].ended <= parts["wait"].ended
    assert parts["decode"].ended <= outer.ended + tolerance

    assert (outer.name, inner.name) == (f"POST {path}", f"{operation} tiny")
    assert inner.attributes["gen_ai.request.model"] == "tiny"
    for span in (outer, inner):
        assert span.attributes["gen_ai.provider.name"] == "conveyor"
        assert span.attributes["gen_ai.usage.output_tokens"] == 20
        assert span.attributes["gen_ai.usage.input_tokens"] == inner.attributes["gen_ai.usage.input_tokens"] > 0
        assert span.attributes["gen_ai.operation.name"] == operation
        assert span.attributes["http.route"] == path
        assert not span.has_failed
    assert outer.attributes["conveyor.service"] == service
    assert outer.attributes["http.response.status_code"] == 200
    assert parts["dispatch"].attributes["conveyor.engine"].endswith(engine.url.rpartition(":")[2])
    assert [name for name, _ in outer.events] == ["first_byte"]
    assert [name for name, _ in inner.events] == ["first_token"]
    (line,) = [each for each in gateway.log if f" event=request id={operation} " in each]
    assert line.endswith(f" trace_id={trace}")
    (line,) = [each for each in gateway.log if f" event=receipt id={operation} " in each]
    (engine_ms,) = map(float, re.findall(r" engine_ms=([\d.]+) ", line))
    assert engine_ms > 0
    for span in (outer, inner):
        assert span.attributes["conveyor.engine_ms"] == pytest.approx(engine_ms, abs=1e-3)
    assert gateway.metric("conveyor_gateway_lost_spans_total") == engine.metric("conveyor_engine_lost_spans_total") == 0
    exported = b"".join(collector.read())
    assert SECRET.encode() not in exported
    assert b"xyzzy-key" not in exported


async def test_a_request_without_a_trace_begins_one_that_the_log_names(
    collector: AnyCollector, engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    async with serving(engine, [gateway], crd, namespace) as service:
        await post(gateway, service, traceparent="00-forged", tracestate="a=b", **{"X-Request-Id": "forged"})
        outer, inner, _ = wait_for_trace(collector, "forged")
    assert outer.parent_id == ""
    assert inner.parent_id == outer.span_id
    (line,) = [each for each in gateway.log if " event=request id=forged " in each]
    assert line.endswith(f" trace_id={outer.trace_id}")


async def test_a_retry_is_an_event_and_each_try_a_part(
    collector: AnyCollector, engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    async with serving(engine, [gateway], crd, namespace) as service:
        Cluster(crd, namespace).apply_engine("tiny", own_address(), 9)  # nothing listens there
        await asyncio.gather(*(post(gateway, service) for _ in range(8)))  # more than one engine has places for
        (retried, *_) = find_retried(collector.wait(lambda spans: bool(find_retried(spans))))
        outer, _, parts = wait_for_trace(collector, retried.attributes["conveyor.request_id"])
    attempts = outer.attributes["conveyor.attempts"]
    assert attempts == 1 + [name for name, _ in outer.events].count("retry") >= 2
    names = [part.name for part in parts if part.parent_id == outer.span_id]
    assert names == ["read", *["queue", "dispatch"] * attempts, "stream"]


def find_retried(spans: list[Found]) -> list[Found]:
    return [span for span in spans if REFUSED in span.events]


@pytest.mark.slow
async def test_a_preemption_is_an_event(
    collector: AnyCollector, gateway: GatewayProcess, crd: Api, namespace: str, tmp_path: Path
) -> None:
    prompts = [[each] * (CONTEXT_TOKENS // 2 - 200) for each in (65, 66)]
    model, blocks = write_chat_model(tmp_path / "tiny"), CONTEXT_TOKENS // 16  # for the prompts, not for the answers
    with EngineServer(tmp_path, model, IDLE, host="0.0.0.0", max_num_seqs=4, num_kv_blocks=blocks) as started:
        engine = started.wait_ready()
        async with serving(engine, [gateway], crd, namespace) as service:
            bodies = [{**BODY, "prompt": prompt, "max_tokens": 1_000} for prompt in prompts]
            await asyncio.gather(*(post(gateway, service, body=body) for body in bodies))
        assert engine.metric("vllm:num_preemptions_total") > 0
    collector.wait(lambda spans: any(name == "preempted" for span in spans for name, _ in span.events))


async def test_what_the_client_does_not_sample_has_no_spans(
    collector: AnyCollector, engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    unsampled = TRACE[::-1]
    async with serving(engine, [gateway], crd, namespace) as service:
        await post(gateway, service, traceparent=f"00-{unsampled}-{CALLER}-00")
        await post(gateway, service, **{"X-Request-Id": "later"})
        wait_for_trace(collector, "later")
    assert unsampled not in {span.trace_id for span in collector.spans}


@pytest.mark.parametrize(
    ("killed", "errors"),
    [
        ("engine process", {"conveyor-engine": "EngineDead", "conveyor-gateway": "EngineDead"}),
        ("server", {"conveyor-gateway": "engine_broke"}),
    ],
)
async def test_an_answer_that_breaks_off_has_failed(
    collector: AnyCollector, gateway: GatewayProcess, crd: Api, namespace: str, tmp_path: Path,
    killed: str, errors: dict[str, str],
) -> None:  # fmt: skip
    trace = killed.encode().hex().zfill(32)

    def find(spans: list[Found]) -> list[Found]:
        return [each for each in spans if each.trace_id == trace and each.program in errors and each.is_server]

    model = write_chat_model(tmp_path / "tiny")
    with EngineServer(tmp_path, model, IDLE, host="0.0.0.0", max_num_seqs=4, num_kv_blocks=8192) as started:
        engine = started.wait_ready()
        async with serving(engine, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:
            url, body = f"{gateway.url}/{service}/v1/completions", {**BODY, "max_tokens": 8_000}
            async with http.post(url, json=body, headers={"traceparent": f"00-{trace}-{CALLER}-01"}) as answer:
                assert answer.status == 200
                await answer.content.readany()
                os.kill(engine.engine_pid if killed == "engine process" else engine.process.pid, signal.SIGKILL)
                await answer.read()
            found = find(collector.wait(lambda spans: len(find(spans)) == len(errors)))
    assert all(span.has_failed for span in found)
    assert {span.program: span.attributes["error.type"] for span in found} == errors


async def test_a_request_for_no_service_has_no_span(
    collector: AnyCollector, engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    async with serving(engine, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:
        for path in (f"{namespace}/nothing/v1/completions", "v1/completions"):
            async with http.post(
                f"{gateway.url}/{path}", json={"model": "nothing", **BODY}, headers={"X-Request-Id": "lost"}
            ) as answer:
                assert answer.status == 404
        await post(gateway, service, **{"X-Request-Id": "found"})
        wait_for_trace(collector, "found")
    assert "lost" not in {span.attributes.get("conveyor.request_id") for span in collector.spans}
