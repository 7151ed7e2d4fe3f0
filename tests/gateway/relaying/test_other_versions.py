"""Tests clients that use HTTP/1.0, and clients that offer HTTP/2."""

import asyncio

import pytest
from aiohttp import web
from tests.gateway.engine_servers import Handle, answering, begin_stream, running_engine
from tests.gateway.stack import Stack

UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
EVENTS = (b"data: 1\n\n", b"data: [DONE]\n\n")


async def stream(request: web.Request) -> web.StreamResponse:
    return await begin_stream(request, *EVENTS)


@pytest.mark.parametrize(
    ("handle", "body"),
    [
        pytest.param(answering(web.Response, body=b'{"a": 1}'), b'{"a": 1}', id="whole"),
        pytest.param(stream, b"".join(EVENTS), id="stream"),
    ],
)
async def test_http_1_0_gets_an_answer_without_chunks_that_ends_with_the_connection(
    stack: Stack, handle: Handle, body: bytes
) -> None:
    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        writer.write(f"POST /{stack.key}/v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        head, _, received = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.0 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert received == body


async def test_a_body_behind_an_offer_of_http_2_arrives(stack: Stack) -> None:
    """Java's HttpClient makes this offer by default."""
    bodies = b'{"prompt": "a"}', b'{"prompt": "bb"}'
    async with running_engine(answering(web.Response, body=b"{}")) as engine:
        await stack.add_engine(engine.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        for body in bodies:  # the second one on the same connection
            head = (
                f"POST /{stack.key}/v1/completions HTTP/1.1\r\nHost: x\r\n{UPGRADE}Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n{}"), 20)
            assert answer.startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert tuple(body for _, body in engine.requests) == bodies
    assert "Upgrade" not in engine.requests[0][0].headers
