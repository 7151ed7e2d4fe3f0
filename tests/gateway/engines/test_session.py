"""Tests the bytes to an engine and back, through a whole gateway."""

import asyncio
import gzip
import io
import socket
from collections.abc import Sequence

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from tests.gateway.builders import make_hold
from tests.gateway.engine_servers import (
    answering,
    answering_in_two,
    refusing_address,
    running_engine,
    running_raw_engine,
    silent_address,
)
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

from conveyor_gateway.engines import connection
from conveyor_gateway.engines import session as session_module
from conveyor_gateway.engines.exchange import EngineRefused, EngineRequest, EngineUnreachable, ends_event
from conveyor_gateway.engines.headers import build_engine_headers
from conveyor_gateway.engines.session import EngineSession

EVENTS = 'data: {"text": "h\u00e9llo \U0001f600"}\n\n: comment\n\ndata: [DONE]\n\n'.encode()


def chunked(*pieces: bytes) -> list[bytes]:
    return [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]


async def send_raw(
    stack: Stack, http: aiohttp.ClientSession, head: bytes, writes: Sequence[bytes]
) -> tuple[int, CIMultiDictProxy[str], bytes]:
    """Return what a client gets from an engine that writes `head`, and then each of `writes` as a separate packet."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in (head, *writes):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        async with http.post(stack.completions, data=b"{}") as answer:
            return answer.status, answer.headers, await answer.read()


@pytest.mark.parametrize(
    ("head", "writes", "body"),
    [
        pytest.param(
            b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n",
            chunked(*(EVENTS[i : i + 1] for i in range(len(EVENTS)))),
            EVENTS,
            id="events one byte at a time, cut inside characters",
        ),
        pytest.param(
            b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n",
            [b"".join(chunked(EVENTS, EVENTS))],
            EVENTS * 2,
            id="events in one packet",
        ),
        pytest.param(
            b"Content-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n",
            [b"00", b"3;name=value\r\n", b"d", b"at\r", b"\n0\r\n\r", b"\n"],
            b"dat",
            id="chunks with extensions, cut inside their frames",
        ),
        pytest.param(
            b"Content-Type: text/event-stream\r\nConnection: close\r\n",
            [EVENTS[:7], EVENTS[7:]],
            EVENTS,
            id="events until the connection closes",
        ),
        pytest.param(
            b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n", chunked(), b"", id="no event at all"
        ),
        pytest.param(
            b"Content-Type: application/json\r\nContent-Length: 12\r\n",
            [b'{"a"', b': "\\n"}x'],
            b'{"a": "\\n"}x',
            id="JSON",
        ),
        pytest.param(
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n",
            chunked(b"{", b"}"),
            b"{}",
            id="chunked JSON",
        ),
        pytest.param(
            b"Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n"
            % len(gzip.compress(b"{}", mtime=0)),
            [gzip.compress(b"{}", mtime=0)],
            gzip.compress(b"{}", mtime=0),
            id="compressed",
        ),
        pytest.param(b"Content-Length: 256\r\n", [bytes(range(256))], bytes(range(256)), id="binary without a type"),
        pytest.param(b"Content-Length: 0\r\n", [], b"", id="empty"),
    ],
)
async def test_an_answers_bytes_pass_exactly(
    stack: Stack, http: aiohttp.ClientSession, head: bytes, writes: list[bytes], body: bytes
) -> None:
    assert (await send_raw(stack, http, b"HTTP/1.1 200 OK\r\n" + head + b"\r\n", writes))[2] == body


async def test_a_large_answer_that_is_no_stream_passes_exactly(stack: Stack, http: aiohttp.ClientSession) -> None:
    body = bytes(range(256)) * (3 << 12)  # 3 MiB: more than the gateway collects
    async with running_engine(answering(web.Response, body=body)) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}") as answer:
            assert await answer.read() == body


async def test_an_answer_too_large_to_be_collected_begins_before_it_ends(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    seen = asyncio.Event()
    async with running_engine(answering_in_two(b"1" * (2 << 20), b"2", seen)) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}") as answer:
            assert set(await answer.content.readany()) == set(b"1")
            seen.set()
            assert (await answer.content.read()).endswith(b"12")


async def test_the_keywords_that_an_answer_might_not_follow_pass(stack: Stack, http: aiohttp.ClientSession) -> None:
    warning = '299 - "the answer might not follow these keywords of the JSON schema: uniqueItems at #/properties/a"'
    head = f"HTTP/1.1 200 OK\r\nWarning: {warning}\r\nContent-Length: 2\r\n\r\n"
    assert (await send_raw(stack, http, head.encode(), [b"{}"]))[1]["Warning"] == warning


async def test_the_status_passes_and_the_engine_s_words_for_it_do_not(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    head = b"HTTP/1.1 418 \x1b[31mteapot\r\nContent-Length: 2\r\nX-Request-Id: of-the-engine\r\nRetry-After: 7\r\n\r\n"
    status, headers, _ = await send_raw(stack, http, head, [b"{}"])
    assert status == 418
    assert headers["Retry-After"] == "7"
    assert len(headers.getall("X-Request-Id")) == 1
    assert headers["X-Request-Id"] != "of-the-engine"


STREAM_HEADERS = {"cache-control", "x-accel-buffering"}
ORIGIN_HEADERS = [
    ("Access-Control-Allow-Origin", "*"),
    ("Alt-Svc", 'h3=":443"'),
    ("Content-Location", "/team-a"),
    ("Link", "</x>; rel=preload"),
    ("Location", "http://evil"),
    ("Refresh", "0; url=http://evil"),
    ("Server", "evil"),
    ("Set-Cookie", "a=b"),
    ("WWW-Authenticate", "Basic"),
    ("X-Accel-Redirect", "/secret"),
    ("X-RateLimit-Remaining", "0"),
    ("X-Twice", "1"),
]


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_what_an_engine_sets_beside_its_answer_reaches_no_client(
    stack: Stack, http: aiohttp.ClientSession, kind: str
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in ORIGIN_HEADERS)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: 2\r\n{lines}\r\n"
    _, headers, _ = await send_raw(stack, http, head.encode(), [b"{}"])
    assert {name.lower() for name in headers} - {"content-length", "transfer-encoding"} - STREAM_HEADERS == {
        "content-security-policy",
        "content-type",
        "date",
        "server",
        "x-content-type-options",
        "x-request-id",
    }
    assert headers["Server"] != "evil"


@pytest.mark.parametrize(
    ("given", "gets"),
    [
        ("application/json", "application/json"),
        ("Application/JSON; charset=utf-7", "application/json"),
        ("text/plain", "text/plain; charset=utf-8"),
        ("text/event-stream", "text/event-stream; charset=utf-8"),
        ("text/event-streams", "application/octet-stream"),
        ("text/html", "application/octet-stream"),
        ("application/json, text/html", "application/octet-stream"),
        ("image/svg+xml", "application/octet-stream"),
        ("application/xhtml+xml", "application/octet-stream"),
        ("\xff", "application/octet-stream"),
    ],
)
async def test_no_answer_is_a_page_that_a_browser_shows(
    stack: Stack, http: aiohttp.ClientSession, given: str, gets: str
) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {given}\r\nContent-Length: 2\r\n\r\n".encode("latin-1")
    _, headers, body = await send_raw(stack, http, head, [b"{}"])
    assert headers.getall("Content-Type") == [gets]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'; sandbox"
    assert body == b"{}"


async def test_proxies_before_the_gateway_get_a_header_that_forbids_buffering_of_streams(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Accel-Buffering: yes\r\n\r\n"
    _, headers, _ = await send_raw(stack, http, head, [EVENTS])
    assert headers.getall("X-Accel-Buffering") == ["no"]
    assert headers.getall("Cache-Control") == ["no-cache"]


@pytest.mark.parametrize("size", [0, 1, 300_000, 3 << 20])
async def test_a_requests_bytes_and_path_pass_exactly_and_its_query_does_not(
    stack: Stack, http: aiohttp.ClientSession, size: int
) -> None:
    body = (b"\x00\xff\r\n" * (size // 4 + 1))[:size]
    async with running_engine(answering(web.Response, body=b"{}")) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions + "?a=%20b&c", data=io.BytesIO(body)) as answer:
            assert answer.status == 200
    request, received = engine.requests[0]
    assert received == body
    assert request.raw_path == "/v1/completions"
    assert request.headers["Content-Length"] == str(size)


async def test_all_requests_to_engines_name_their_service_as_host(stack: Stack, http: aiohttp.ClientSession) -> None:
    """Meshes find the route by this header. With the address of the pod, Istio would send plain text."""
    async with running_engine(answering(web.Response, text="{}")) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}") as answer:
            assert answer.status == 200
        async with http.get(f"{stack.url}/health") as answer:
            await answer.read()
    assert len({request.path for request, _ in engine.requests}) > 1
    namespace, _, name = stack.key.partition("/")
    assert {request.headers["Host"] for request, _ in engine.requests} == {
        f"{name}-engine.{namespace}.svc:{engine.port}"
    }


async def test_a_chunked_compressed_request_is_decompressed(stack: Stack, http: aiohttp.ClientSession) -> None:
    packed = gzip.compress(b"{}")

    async def pieces():  # type: ignore[no-untyped-def]
        yield packed[:5]
        yield packed[5:]

    async with running_engine(answering(web.Response, body=b"{}")) as engine:
        await stack.add_engine(engine.port)
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with http.post(stack.completions, data=pieces(), headers=headers) as answer:
            assert answer.status == 200
    request, received = engine.requests[0]
    assert received == b"{}"
    assert "Content-Encoding" not in request.headers
    assert request.headers["Content-Length"] == "2"


async def test_a_client_that_expects_100_continue_gets_it(stack: Stack, gateway: GatewayProcess) -> None:
    async with running_engine(answering(web.Response, body=b"{}")) as engine:
        await stack.add_engine(engine.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = (
            f"POST /{stack.key}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        writer.write(head.encode())
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert engine.requests[0][1] == b"{}"


async def test_an_event_reaches_the_client_before_the_next_is_made(stack: Stack, http: aiohttp.ClientSession) -> None:
    seen = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await seen.wait()
        await answer.write(b"data: 2\n\n")
        return answer

    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}") as answer:
            assert await answer.content.readany() == b"data: 1\n\n"
            seen.set()
            assert await answer.content.read() == b"data: 2\n\n"


def test_an_engine_that_acknowledges_nothing_is_given_up_after_half_a_minute() -> None:
    with connection._open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 8000))) as opened:
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


async def test_an_engine_that_accepts_no_connection_in_time_is_distinguished_from_one_that_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "_CONNECT_SECONDS", 0.2)
    client = EngineSession()
    request = EngineRequest("/v1/completions", CIMultiDict(), b"{}", make_hold(), is_coming=bool)
    try:
        for absent, error in ((silent_address, EngineUnreachable), (refusing_address, EngineRefused)):
            with absent() as (host, port), pytest.raises(EngineRefused) as raised:
                await client.send(f"{host}:{port}", request, remaining_seconds=60)
            assert raised.type is error
    finally:
        await client.close()


async def test_connecting_leaves_time_for_another_engine() -> None:
    client = EngineSession()
    request = EngineRequest("/v1/completions", CIMultiDict(), b"{}", make_hold(), is_coming=bool)
    try:
        with silent_address() as (host, port), pytest.raises(EngineRefused) as raised:
            async with asyncio.timeout(1):
                await client.send(f"{host}:{port}", request, remaining_seconds=1)
        assert raised.type is EngineRefused  # in so short a time it is no judgement of the engine
    finally:
        await client.close()


def test_an_engine_gets_what_it_needs_of_a_request_and_nothing_else_of_its_client() -> None:
    passed = [
        ("Accept", "text/event-stream"),
        ("Accept", "*/*"),
        ("Content-Type", "application/json"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("User-Agent", "OpenAI/Python 3.54.0"),
    ]
    dropped = [
        ("Host", "qwen.default"),
        ("api-key", "x"),
        ("Authorization", "Bearer x"),
        ("Cookie", "session=1"),
        ("OpenAI-Organization", "org"),
        ("X-Api-Key", "x"),
        ("X-Auth-Request-Access-Token", "x"),
        ("X-Engine-Place", "granted"),
        ("X-Forwarded-For", "10.0.0.1"),
        ("Connection", "keep-alive, tracestate"),
        ("tracestate", "ends=here"),
        ("Accept-Encoding", "\x1b[2J"),
        ("Content-Encoding", "\udcff"),
        ("Transfer-Encoding", "chunked"),
        ("Upgrade", "h2c"),
        ("Content-Length", "5"),
        ("x-request-id", "old"),
        ("X-Request-Timeout-Seconds", "9999"),
        ("X-Anything-Else", "1"),
    ]
    kept = build_engine_headers(CIMultiDictProxy(CIMultiDict(passed + dropped)), "new", "key")
    assert list(kept.items()) == [*passed, ("X-Request-Id", "new"), ("X-Engine-Usage", "key")]


@pytest.mark.parametrize(
    ("tail", "is_end"),
    [
        (b"}\n\n", True),
        (b"\r\n\r\n", True),
        (b"\r\r", True),
        (b"}\n", False),
        (b"\r\n", False),
        (b"x", False),
        (b"", False),
    ],
)
def test_an_event_ends_with_an_empty_line(tail: bytes, is_end: bool) -> None:
    assert ends_event(tail) is is_end
