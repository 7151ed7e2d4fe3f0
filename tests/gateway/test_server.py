"""Tests the process: its start, its end, and settings that cannot be used."""

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from tests.gateway.cluster import Cluster, Json, publish_gateway
from tests.gateway.engine_servers import answering_in_two, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, post

from conveyor_api.names import SYSTEM_NAMESPACE
from conveyor_api.served_name import build_served_name, root_name
from conveyor_gateway.__main__ import main
from conveyor_gateway.server import Server
from conveyor_gateway.settings import Settings
from conveyor_gateway.sources import ClusterSource
from e2e.cluster.definitions import claim_root


@pytest.fixture
async def ending(request: pytest.FixtureRequest, kubeconfig: Path, cluster: Cluster) -> AsyncIterator[Stack]:
    """A stack whose gateway the test may end. It waits 1 s for a body, holds 2400 bytes, drains for 0.5 s + 3 s."""
    drain_timeout_seconds = getattr(request, "param", 3)
    times = (
        "--drain-delay-seconds=0.5",
        f"--drain-timeout-seconds={drain_timeout_seconds}",
        "--body-timeout-seconds=1",
    )
    sizes = ("--max-request-bytes=1000", "--max-held-bytes=2400")
    gateway = GatewayProcess(kubeconfig, "--watch-namespaces", cluster.namespace, *times, *sizes)
    try:
        await asyncio.to_thread(gateway.start)
        stack = Stack(gateway, cluster)
        await stack.apply_service(batching={"maxBatchSize": 1})
        yield stack
    finally:
        gateway.kill()


class Streams:
    """An engine whose streams end when the test allows it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        self.begun += 1
        await self.gate.wait()
        await answer.write(b"data: 2\n\n")
        return answer


async def send(http: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with http.post(url, data=b"{}") as answer:
        return answer.status, await answer.read()


@pytest.mark.slow
async def test_sigterm_ends_readiness_at_once_and_the_process_after_the_last_request(
    ending: Stack, http: aiohttp.ClientSession
) -> None:
    gateway, streams = ending.gateway, Streams()
    async with running_engine(streams.handle) as engine:
        await ending.add_engine(engine.port)
        requests = [asyncio.create_task(send(http, ending.completions)) for _ in range(3)]
        await ending.wait_demand(dispatched=2, queued=1)
        gateway.terminate()
        await ending.wait(lambda: gateway.admin("/readyz") == (503, "draining\n"))
        late = asyncio.create_task(send(http, ending.completions))  # one who does not know yet
        await ending.wait_demand(dispatched=2, queued=2)
        reader, uploading = await asyncio.open_connection("127.0.0.1", gateway.port)
        uploading.write(
            f"POST /{ending.key}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{".encode()
        )
        await ending.wait(lambda: not accepts(gateway.port))
        uploading.write(b"}")
        await ending.wait_demand(dispatched=2, queued=3)  # counted for the autoscaler to the end
        streams.gate.set()
        answers = await asyncio.gather(*requests, late)
        assert set(answers) == {(200, b"data: 1\n\ndata: 2\n\n")}
        assert b"data: 2" in await reader.read()  # to the end of the connection
        uploading.close()
        assert await asyncio.to_thread(gateway.wait_ended) == 0
    assert "ended" in gateway.log[-1]


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


async def test_what_has_not_ended_at_the_drain_timeout_is_answered_503(
    ending: Stack, http: aiohttp.ClientSession
) -> None:
    gateway, streams = ending.gateway, Streams()
    async with running_engine(streams.handle) as engine:
        await ending.add_engine(engine.port)
        running = [asyncio.create_task(send(http, ending.completions)) for _ in range(2)]
        await ending.wait(lambda: streams.begun == 2)
        queued = asyncio.create_task(send(http, ending.completions))
        await ending.wait_demand(queued=1)
        began = time.monotonic()
        gateway.terminate()
        status, body = await queued
        assert (status, json.loads(body)["error"]["code"]) == (503, "stopping")
        for status, body in await asyncio.gather(*running):
            assert status == 200
            assert json.loads(body.split(b"data: ")[-1])["error"]["code"] == "stopping"
        assert time.monotonic() - began > 3
        assert await asyncio.to_thread(gateway.wait_ended) == 0


def root_claim() -> Json:
    """Return the claim as it is at the API server."""
    claim = build_served_name(SYSTEM_NAMESPACE, root_name(SYSTEM_NAMESPACE))
    return {**claim, "metadata": {**claim["metadata"], "uid": "1", "creationTimestamp": "2026-11-25T00:00:00Z"}}


async def test_what_comes_on_an_open_connection_at_the_end_of_the_drain_is_answered_too() -> None:
    settings = Settings(host="127.0.0.1", port=0, admin_port=0, drain_delay_seconds=0, drain_timeout_seconds=60)
    source = ClusterSource(settings)
    server = Server(settings, 2**16, source)
    for state in source.states:
        state.synced, state.received_at = True, time.monotonic()
    server._catalog.claims.put(root_claim())
    await server._public.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", server._public.port)
    try:
        await server._drain(asyncio.Event())
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        head, body = (await asyncio.wait_for(reader.read(), 10)).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["code"] == "stopping"
    finally:
        writer.close()
        await server._public.close()
        await server._engines.close()


@pytest.mark.parametrize("ending", [3600], indirect=True)
async def test_the_first_answer_that_begins_while_draining_is_the_last_of_its_connection(
    ending: Stack, http: aiohttp.ClientSession
) -> None:
    long, short = Streams(), Streams()
    request = f"POST /{ending.key}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    async with running_engine(long.handle) as busy, running_engine(short.handle) as idle:
        await ending.add_engine(busy.port)
        task = asyncio.create_task(send(http, ending.completions))
        await ending.wait(lambda: long.begun == 1)
        await ending.add_engine(idle.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", ending.gateway.port)
        writer.write(request)
        assert b"Connection: close" not in await reader.readuntil(b"\r\n\r\n")
        ending.gateway.terminate()
        await ending.wait(lambda: ending.gateway.admin("/readyz")[0] == 503)
        short.gate.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(request)  # on a connection that was to be kept: it must not be lost
        last = await asyncio.wait_for(reader.read(), 20)
        assert b"\r\nConnection: close\r\n" in last
        assert b"data: 2" in last
        writer.close()
        assert not task.done()
        long.gate.set()
        assert (await task)[1] == b"data: 1\n\ndata: 2\n\n"
        assert await asyncio.to_thread(ending.gateway.wait_ended) == 0


@pytest.mark.parametrize("ending", [3600], indirect=True)
async def test_a_client_that_did_not_see_the_end_of_the_connection_may_send_one_more_request(ending: Stack) -> None:
    streams = Streams()
    request = f"POST /{ending.key}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    async with running_engine(streams.handle) as engine:
        await ending.add_engine(engine.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", ending.gateway.port)
        writer.write(request)
        assert b"Connection: close" not in await reader.readuntil(b"\r\n\r\n")
        ending.gateway.terminate()
        await ending.wait(lambda: not accepts(ending.gateway.port))
        streams.gate.set()  # nothing is held any more
        await reader.readuntil(b"0\r\n\r\n")
        await asyncio.sleep(0.2)  # a way to the client and back
        writer.write(request)
        last = await asyncio.wait_for(reader.read(), 20)
        assert last.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nConnection: close\r\n" in last
        writer.close()
        assert await asyncio.to_thread(ending.gateway.wait_ended) == 0


@pytest.mark.parametrize("ending", [3600], indirect=True)
async def test_a_second_signal_skips_the_waiting(ending: Stack, http: aiohttp.ClientSession) -> None:
    queued = asyncio.create_task(send(http, ending.completions))
    await ending.wait_demand(queued=1)
    ending.gateway.terminate()
    await ending.wait(lambda: ending.gateway.admin("/readyz")[0] == 503)
    ending.gateway.terminate()
    assert (await queued)[0] == 503
    assert await asyncio.to_thread(ending.gateway.wait_ended) == 0


@pytest.mark.parametrize("ending", [3600], indirect=True)
async def test_an_idle_kept_alive_connection_does_not_delay_the_end(ending: Stack, http: aiohttp.ClientSession) -> None:
    async with http.get(ending.gateway.url + "/healthz") as answer:
        assert answer.status == 200
    ending.gateway.terminate()
    assert await asyncio.to_thread(ending.gateway.wait_ended) == 0


async def send_900_bytes(http: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with http.post(url, data=b" " * 900) as answer:
        return answer.status, await answer.read()


def held_bytes(stack: Stack) -> float:
    return stack.gateway.metric("conveyor_gateway_held_body_bytes")


async def test_a_service_whose_requests_fill_the_memory_of_its_namespace_is_answered_503_and_others_are_not(
    ending: Stack, http: aiohttp.ClientSession
) -> None:
    other = f"{ending.cluster.namespace}/other"
    await asyncio.to_thread(ending.cluster.apply_service, "other")
    await ending.wait(lambda: ending.gateway.demand(other) is not None)
    holding = [asyncio.create_task(send_900_bytes(http, ending.completions)) for _ in range(2)]
    await ending.wait_demand(queued=2)
    status, body = await send_900_bytes(http, ending.completions)
    assert (status, json.loads(body)["error"]["code"]) == (503, "gateway_memory_full")
    url = ending.completions.replace(ending.key, other)
    request = asyncio.create_task(send_900_bytes(http, url))
    await ending.wait_demand(queued=1)
    evicted, _ = await asyncio.wait(holding, return_when=asyncio.FIRST_COMPLETED)
    assert [each.result()[0] for each in evicted] == [503]
    assert held_bytes(ending) == 1800
    assert not request.done()
    for task in (*holding, request):
        task.cancel()
    await ending.wait(lambda: held_bytes(ending) == 0)


async def test_a_body_is_held_until_an_engine_has_answered(ending: Stack, http: aiohttp.ClientSession) -> None:
    streams = Streams()
    request = asyncio.create_task(send_900_bytes(http, ending.completions))
    await ending.wait_demand(queued=1)
    assert held_bytes(ending) == 900
    async with running_engine(streams.handle) as engine:
        await ending.add_engine(engine.port)
        await ending.wait(lambda: held_bytes(ending) == 0)
        assert not request.done()
        streams.gate.set()
        assert (await request)[1] == b"data: 1\n\ndata: 2\n\n"


async def test_an_answer_for_which_there_is_no_memory_passes_as_it_comes(
    ending: Stack, http: aiohttp.ClientSession
) -> None:
    seen = asyncio.Event()
    too_much = b"1" * 2101  # of 2100 bytes that one namespace may have
    async with running_engine(answering_in_two(too_much, b"2", seen)) as engine:
        await ending.add_engine(engine.port)
        async with http.post(ending.completions, data=b"{}") as answer:
            assert set(await answer.content.readany()) == set(b"1")
            assert held_bytes(ending) == 0
            seen.set()
            assert (await answer.content.read()).endswith(b"2")


async def test_a_body_that_is_still_arriving_gives_way_to_one_that_is_here(
    ending: Stack, http: aiohttp.ClientSession
) -> None:
    uploads = [await asyncio.open_connection("127.0.0.1", ending.gateway.port) for _ in range(2)]
    head = f"POST /{ending.key}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    for _, writer in uploads:
        writer.write(head.encode() + b" " * 999)
    await ending.wait(lambda: held_bytes(ending) == 1998)
    request = asyncio.create_task(send_900_bytes(http, ending.completions))
    received = [await asyncio.wait_for(reader.read(), 20) for reader, _ in uploads]
    assert sum(b"gateway_memory_full" in each for each in received) == 1
    assert sum(b"body_too_slow" in each for each in received) == 1
    await ending.wait_demand(queued=1)
    assert held_bytes(ending) == 900
    for _, writer in uploads:
        writer.close()
    request.cancel()


async def test_a_body_that_does_not_arrive_in_time_or_turns_to_nonsense_is_answered_408(ending: Stack) -> None:
    for more in (b"", b"zz\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", ending.gateway.port)
        head = f"POST /{ending.key}/v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"2\r\n{}\r\n")
        await ending.wait(lambda: held_bytes(ending) == 2)
        writer.write(more)
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"body_too_slow" in received
    assert ending.demand()["in_flight"] == 0


def refusal(url: str) -> str:
    """Return the error of a request that finds the queue full."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, b"{}", timeout=30)
    with caught.value as error:
        return str(json.load(error)["error"]["message"])


@pytest.mark.slow
async def test_gateways_share_what_may_wait_for_a_service_as_they_come_and_go(
    kubeconfig: Path, cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    flags = (f"--watch-namespaces={cluster.namespace}", f"--system-namespace={cluster.namespace}")
    claim_root(cluster.api, cluster.namespace)
    with GatewayProcess(kubeconfig, *flags) as gateway:
        stack = Stack(gateway, cluster)
        await stack.apply_service(queue={"maxRequests": 4})
        requests = [asyncio.create_task(post(http, stack.completions)) for _ in range(4)]
        await stack.wait_demand(queued=4)

        async def share_is(count: int) -> None:
            await stack.wait(lambda: f"{count} requests wait" in refusal(stack.completions))

        await share_is(4)
        for name, port in (("one", gateway.admin_port), ("two", 1)):
            await asyncio.to_thread(publish_gateway, cluster.api, cluster.namespace, name, port)
        await share_is(2)
        await asyncio.to_thread(publish_gateway, cluster.api, cluster.namespace, "two", 1, serving=False)
        await share_is(4)
        for task in requests:
            task.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


def test_an_api_server_that_is_away_at_the_start_is_waited_for(tmp_path: Path, kubeconfig: Path) -> None:
    config = yaml.safe_load(kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(yaml.safe_dump(config))
    gateway = GatewayProcess(elsewhere, "--drain-delay-seconds=0")
    with pytest.raises(TimeoutError):
        gateway.start(timeout_seconds=1)
    try:
        status, text = gateway.admin("/readyz")
        assert (status, text.splitlines()) == (
            503,
            [f"not synced: {plural}" for plural in ("inferenceservices", "endpointslices", "servednames", "apikeys")],
        )
        assert gateway.admin("/healthz")[0] == 200
        assert gateway.admin("/demand")[0] == 503
        gateway.terminate()
        assert gateway.wait_ended() == 0
    finally:
        gateway.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port=x"], "`port` must be a port number from 0 to 65535, not 'x'"),
        (["--kubeconfig=/nonexistent"], "/nonexistent is not a file; set --kubeconfig"),
    ],
)
def test_settings_that_cannot_be_used_end_the_process_with_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["conveyor_gateway", *arguments])
    assert main() == 2
    text = capsys.readouterr().err
    assert words in text
    assert len(text.splitlines()) == 1
