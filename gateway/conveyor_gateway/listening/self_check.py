"""Sends requests to the public port as a client would, so that /readyz fails if the port does not respond.

Run by `server`. The admin port has separate connections, so it can respond while the public port does not. Liveness
does not depend on this check: a restart would end every stream, and a gateway under load would restart again and again.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Final

from conveyor_api.names import GATEWAY_HEALTH_PATH

PERIOD_SECONDS: Final = 1.0
TIMEOUT_SECONDS: Final = 1.0
MAX_FAILURES: Final = 3  # in a row, so that a short burst of load has no effect

_REQUEST: Final = f"GET {GATEWAY_HEALTH_PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


async def check_for_ever(
    port: int, host: str, set_answers: Callable[[bool], None], *, serves_tls: bool = False
) -> None:
    """Check forever. After each check, call `set_answers`: with False after MAX_FAILURES in a row, else with True."""
    tls = _build_tls() if serves_tls else None
    num_failures = 0
    while True:
        num_failures = 0 if await _answers(host or "localhost", port, tls) else num_failures + 1
        set_answers(num_failures < MAX_FAILURES)
        await asyncio.sleep(PERIOD_SECONDS)


def _build_tls() -> ssl.SSLContext:
    """Return a context that accepts the port's certificate, which is for other names than this machine's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _answers(host: str, port: int, tls: ssl.SSLContext | None) -> bool:
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            writer.write(_REQUEST)
            return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    except (OSError, TimeoutError, ValueError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()
