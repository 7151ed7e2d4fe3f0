"""Runs a trace against a service in an open loop: each request is sent when it is due, however slow the answers are.

The number of requests in flight is limited. A request that would exceed the limit is not sent and counts as failed.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from conveyor_load.requests import Target
from conveyor_load.sending import Answer, send
from conveyor_load.traces import Trace


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on requests in flight, and on the seconds of one request."""

    in_flight: int = 1024
    request_seconds: float = 120.0


@asynccontextmanager
async def open_session(
    limits: Limits, tls: ssl.SSLContext | None = None, proxy: str | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session with connections for the requests in flight, without cookies.

    `tls` replaces the system's TLS context.
    """
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limits.in_flight, ssl=True if tls is None else tls),
        timeout=aiohttp.ClientTimeout(total=limits.request_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        proxy=proxy,
    ) as session:
        yield session


async def run(
    session: aiohttp.ClientSession,
    target: Target,
    trace: Trace,
    limits: Limits,
    seed: int = 0,
    on_sent: Callable[[int], None] = lambda _: None,
) -> list[Answer]:
    """Send the requests of a trace, and return the answers in the trace's order when all have ended.

    A cancellation cancels the requests that still run.
    """
    begin, answers = time.monotonic(), list[Answer]()
    running = set[asyncio.Task[None]]()
    try:
        for number, arrival in enumerate(trace.arrivals):
            await asyncio.sleep(max(0.0, begin + arrival.at - time.monotonic()))
            answers.append(answer := Answer(begin + arrival.at))
            on_sent(number + 1)
            if len(running) >= limits.in_flight:
                answer.problem = f"not sent: {limits.in_flight} in flight"
                continue
            task = asyncio.create_task(send(session, target, arrival, answer, (seed << 32) + number))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return answers
