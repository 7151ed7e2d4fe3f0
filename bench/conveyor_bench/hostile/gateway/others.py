"""Measures the gateway as another client, in a separate process, beside a hostile client or engine.

`hostile.others` starts this process for the command. The process calls one service all the time, reads streams of this
service, calls the probes, and reads the HPA's metric, on new connections. It has no attack and no bar.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp

from conveyor_bench.hostile.bars import NEVER
from e2e.cluster.api import Api


@dataclass(frozen=True, slots=True)
class Targets:
    """What to measure. `service` and `probes` (with `/demand`) are URLs; `value` is the path of the HPA's metric."""

    service: str
    probes: list[str]
    kubeconfig: str
    value: str


@dataclass(slots=True)
class Taken:
    """Times in seconds; infinite if the answer was not 200. `values` are the answers to the HPA's request."""

    requests: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class Measurement:
    """A measurement from one line of the standard input to the next."""

    def __init__(self, targets: Targets, session: aiohttp.ClientSession) -> None:
        self._targets, self._session = targets, session
        self._api = Api(Path(targets.kubeconfig))
        self.taken = Taken()
        self._event_at = time.perf_counter()

    async def run(self, ended: asyncio.Event) -> Taken:
        self.taken = Taken()
        await asyncio.gather(self._query_service(ended), self._query_probes(ended), self._query_value(ended))
        self.taken.gaps.append(time.perf_counter() - self._event_at)  # counts a stream that has stopped, too
        return self.taken

    async def _query_service(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            await self._query(self.taken.requests, "POST", self._targets.service)
            await asyncio.sleep(0.02)

    async def _query_probes(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            await asyncio.gather(*(self._query(self.taken.probes, "GET", url) for url in self._targets.probes))
            await asyncio.sleep(0.2)

    async def _query_value(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            began = time.perf_counter()
            answered = await asyncio.to_thread(self._api.reachable, self._targets.value)
            self.taken.values.append(time.perf_counter() - began if answered else NEVER)
            await asyncio.sleep(0.2)

    async def _query(self, taken: list[float], method: str, url: str) -> None:
        began, status = time.perf_counter(), 0
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.request(method, url, data=b"good" if method == "POST" else None) as answer:
                await answer.read()
                status = answer.status
        taken.append(time.perf_counter() - began if status == 200 else NEVER)

    async def read_streams(self) -> None:
        """Read streams until cancelled. A broken connection counts as a request without an answer."""
        no_end = aiohttp.ClientTimeout(total=None)
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.post(self._targets.service, data=b"tokens", timeout=no_end) as stream:
                    self._event_at = time.perf_counter()
                    async for line in stream.content:
                        if line.startswith(b"data:"):
                            now = time.perf_counter()
                            self.taken.gaps.append(now - self._event_at)
                            self._event_at = now
            self.taken.requests.append(NEVER)
            await asyncio.sleep(0.1)


async def measure(targets: Targets, read_line: Callable[[], str]) -> None:
    connector = aiohttp.TCPConnector(force_close=True)  # a new connection each time
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=10)) as session:
        measurement = Measurement(targets, session)
        streams = asyncio.create_task(measurement.read_streams())
        while True:
            ended = asyncio.Event()
            taking = asyncio.create_task(measurement.run(ended))
            line = await asyncio.to_thread(read_line)
            ended.set()
            taken = await taking
            if not line:
                break
            print(json.dumps(asdict(taken)), flush=True)
        streams.cancel()


if __name__ == "__main__":
    asyncio.run(measure(Targets(**json.loads(sys.argv[1])), sys.stdin.readline))
