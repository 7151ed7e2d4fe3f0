"""Reads the time lines of a service from a Prometheus server, which may be slow, unreachable or hostile.

The console writes each query, with the namespace and name of a service that it has shown to the caller. A read has a
fixed number of queries, points and bytes, and ends after some seconds. Viewers of the same service share it. Each user
has one read at a time, so one who opens many pages delays no other by more than a read.
"""

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

import aiohttp
import msgspec

from conveyor_console.past import AT_ENGINES, DESIRED, FIRST_BYTE, NUM_POINTS, QUEUED, READY, SPANS, TOKENS, TimeLines
from conveyor_console.sharing import Shared
from conveyor_http.reading import AnswerTooLong, read_answer

logger = logging.getLogger(__name__)

# By the name of the line. OF becomes the labels of the service, and WINDOW the range of a rate.
QUERIES: Final[Mapping[str, str]] = {
    QUEUED: "sum(conveyor_gateway_queued_requests{OF})",
    AT_ENGINES: "sum(conveyor_gateway_dispatched_requests{OF})",
    READY: 'max(conveyor_operator_replicas{OF,of="ready"})',
    DESIRED: 'max(conveyor_operator_replicas{OF,of="desired"})',
    TOKENS: "sum(rate(conveyor_gateway_generation_tokens_total{OF}[WINDOW]))",
    FIRST_BYTE: "histogram_quantile(0.95, "
    "sum by (le) (rate(conveyor_gateway_time_to_first_byte_seconds_bucket{OF}[WINDOW])))",
}
_MIN_WINDOW_SECONDS: Final = 120  # four of the chart's scrapes
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
_TOTAL_SECONDS: Final = 10.0  # of a read, and the wait for reads of other users
_MAX_BYTES: Final = 64 << 10  # a line has about 6 KiB
_AT_ONCE: Final = 2  # reads of all users
_KEPT_SECONDS: Final = 15.0
_MAX_SHARED: Final = 64
_MAX_VALUE: Final = 1e12


class _Series(msgspec.Struct):
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Series] = []


class _Answer(msgspec.Struct):
    """https://prometheus.io/docs/prometheus/latest/querying/api/#range-queries"""

    data: _Data = msgspec.field(default_factory=_Data)


@dataclass(frozen=True, slots=True)
class _Range:
    """`NUM_POINTS` times with a distance of `step` seconds."""

    start: int
    step: int

    @property
    def end(self) -> int:
        return self.start + (NUM_POINTS - 1) * self.step


class _Unreadable(Exception):
    """Prometheus returned no time line. The message has the reason."""


class Prometheus:
    """The server at `url`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/api/v1/query_range"
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._kept = Shared[tuple[str, str], TimeLines | None](_KEPT_SECONDS, _MAX_SHARED)
        self._reads: dict[str, asyncio.Future[TimeLines | None]] = {}  # by user

    async def read(self, user: str, service: str, span: str) -> TimeLines | None:
        """Return the time lines of a service in one of SPANS; None if Prometheus does not answer.

        A read goes on if its user leaves, and delays the next one of this user until it ends.
        """
        while user in self._reads:
            await asyncio.wait((self._reads[user],))
        kept = self._kept.get((service, span), lambda: self._read(service, SPANS[span]))
        read = self._reads[user] = asyncio.ensure_future(kept)
        read.add_done_callback(lambda _: self._reads.pop(user))
        return await asyncio.shield(read)

    async def _read(self, service: str, seconds: int) -> TimeLines | None:
        step = seconds // (NUM_POINTS - 1)
        end = int(time.time()) // step * step
        times = _Range(end - (NUM_POINTS - 1) * step, step)
        lines: dict[str, asyncio.Task[array[float]]] = {}
        try:
            async with asyncio.timeout(_TOTAL_SECONDS), self._turns, asyncio.TaskGroup() as tasks:
                for name, query in QUERIES.items():
                    lines[name] = tasks.create_task(self._query(build_query(query, service, step), times))
        except* (_Unreadable, TimeoutError) as errors:
            logger.warning("event=prometheus_unreadable error=%s", str(errors.exceptions[0])[:200] or "timeout")
            lines.clear()
        if not lines:
            return None
        at = [times.start + number * step for number in range(NUM_POINTS)]
        return TimeLines(at, {name: task.result() for name, task in lines.items()})

    async def _query(self, query: str, times: _Range) -> "array[float]":
        """Return the values at each time. Raises _Unreadable."""
        body = {"query": query, "start": times.start, "end": times.end, "step": times.step, "timeout": "4s"}
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        try:
            async with self._session.post(
                self._url, data=urlencode(body), headers=headers, timeout=_TIMEOUT, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise _Unreadable(f"status {response.status}")
                return _place(msgspec.json.decode(await read_answer(response.content, _MAX_BYTES), type=_Answer), times)
        except (aiohttp.ClientError, OSError, AnswerTooLong) as error:
            raise _Unreadable(str(error) or type(error).__name__) from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise _Unreadable(f"no answer of Prometheus: {error}") from error


def build_query(query: str, service: str, step: int) -> str:
    """Return the PromQL for a service `namespace/name`. Kubernetes' names need no escape in it."""
    namespace, _, name = service.partition("/")
    labels = f'namespace="{namespace}",inference_service="{name}"'
    return query.replace("OF", labels).replace("WINDOW", f"{max(_MIN_WINDOW_SECONDS, step)}s")


def _place(answer: _Answer, times: _Range) -> "array[float]":
    """Return the first series' values at the times. What is missing, or no possible value, is NaN."""
    values = array("d", [math.nan]) * NUM_POINTS
    for at, text in answer.data.result[0].values if answer.data.result else ():
        place = (at - times.start) / times.step
        try:
            value = float(text)
        except ValueError:
            continue
        if -0.5 < place < NUM_POINTS - 0.5 and 0 <= value <= _MAX_VALUE:
            values[round(place)] = value
    return values
