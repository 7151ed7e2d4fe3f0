"""What reaches the port and is no proper request."""

import asyncio
import json

import pytest
from tests.gateway.process import GatewayProcess

COMPLETIONS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
MANY_HEADERS = b"".join(b"X-%d: 1\r\n" % number for number in range(200))


async def talk(gateway: GatewayProcess, sent: bytes) -> tuple[int, dict[str, str]]:
    """Status and error of the answer to raw bytes; the connection is closed after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        writer.write(sent)
        received = await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "malformed_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "malformed_http"),
        (b"GET /v1/models HTTP/9.9\r\n\r\n", 400, "malformed_http"),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n", 400, "malformed_http"),
        (COMPLETIONS + b"Content-Length: x\r\n\r\n", 400, "malformed_http"),
        (COMPLETIONS + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "malformed_http"),
        (COMPLETIONS + MANY_HEADERS + b"\r\n", 400, "malformed_http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed_http"),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "malformed_http"),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404, "path_not_found"),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404, "path_not_found"),
        (b"GET /v1/models HTTP/1.1\r\nHost: \xff\r\nConnection: close\r\n\r\n", 421, "host_without_namespace"),
        (COMPLETIONS + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431, "headers_too_large"),
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else None,
)
async def test_what_is_malformed_is_answered_in_openais_form_and_the_connection_closed(
    gateway: GatewayProcess, sent: bytes, status: int, code: str
) -> None:
    answered, error = await talk(gateway, sent)
    assert (answered, error["code"]) == (status, code)


async def test_a_client_that_says_nothing_harms_nobody(gateway: GatewayProcess) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.close()
    assert (await asyncio.to_thread(gateway.admin, "/readyz"))[0] == 200
