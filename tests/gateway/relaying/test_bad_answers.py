"""Tests answers that are no HTTP, never end, or come in tiny chunks."""

import asyncio

import aiohttp
import pytest
from tests.gateway.engine_servers import (
    running_raw_engine,
)
from tests.gateway.stack import Stack, post


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" * 2_000, id="interim answers without end"),
        pytest.param(b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" * 9, id="nine interim answers"),
        pytest.param(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", id="101"),
        pytest.param(b"HTTP/1.1 700 Odd\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", id="700"),
    ],
)
async def test_what_is_no_answer_to_a_request_is_a_lost_engine(
    stack: Stack, http: aiohttp.ClientSession, sent: bytes
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await reader.read()  # until the gateway hangs up

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        status, body, _ = await post(http, stack.completions)
    assert (status, body["error"]["code"]) == (502, "engine_lost")


async def test_a_few_interim_answers_are_none(stack: Stack, http: aiohttp.ClientSession) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 8 + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read()

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        assert (await post(http, stack.completions))[:2] == (200, {})


def in_chunks(content_type: bytes, num_chunks: int) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % content_type
    return head + b"1\r\na\r\n" * num_chunks


async def test_an_engine_that_answers_in_tiny_chunks_is_cut_off(stack: Stack, http: aiohttp.ClientSession) -> None:
    """Each chunk is parsed alone, so they would cost the event loop a hundred times as much as other answers."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(in_chunks(b"application/json", 500_000))
        await reader.read()

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        status, body, _ = await post(http, stack.completions)
        assert (status, body["error"]["code"]) == (502, "engine_broke")
        assert "too many tiny chunks" in body["error"]["message"]


async def test_a_stream_of_tiny_chunks_without_end_ends_with_an_error(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(in_chunks(b"text/event-stream", 500_000))
        await reader.read()

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        async with http.post(stack.completions, data=b"{}") as answer:
            received = await answer.read()
    assert b'"code": "engine_broke"' in received
    assert received.startswith(b"a" * 100)


@pytest.mark.parametrize("content_type", [b"application/json", b"text/event-stream"])
async def test_an_answer_may_have_some_tiny_chunks(
    stack: Stack, http: aiohttp.ClientSession, content_type: bytes
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(in_chunks(content_type, 900) + b"10000\r\n" + b"b" * 65_536 + b"\r\n0\r\n\r\n")
        await reader.read()

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        async with http.post(stack.completions, data=b"{}") as answer:
            assert await answer.read() == b"a" * 900 + b"b" * 65_536
