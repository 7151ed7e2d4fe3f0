"""`--load`: a burst of requests that scales a service up, and its picture. Used by `running`.

Each client sends its next request when the last one is answered, until all engines that the autoscaler may add are
ready. Then the burst ends, and this module waits until the service is back at its fewest engines.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from conveyor_insight.simulate.plot import build_svg
from conveyor_insight.simulate.run import Sample
from conveyor_load.figures import summarise
from conveyor_load.objectives import Objectives
from conveyor_load.open_loop import Limits, open_session
from conveyor_load.requests import PATHS, Target
from conveyor_load.sending import Answer, SendError, calibrate, send
from conveyor_load.traces import Arrival
from conveyor_local.service import Service

_INPUT_TOKENS, _OUTPUT_TOKENS = 12, 140  # of the demo
_UP_SECONDS, _DOWN_SECONDS, _STEADY_SECONDS = 240.0, 180.0, 3.0
_SAMPLE_SECONDS: Final = 0.5


@dataclass(slots=True)
class Burst:
    """A burst of `clients` at once for one service."""

    service: Service
    clients: int
    report: Callable[[str], None]
    samples: list[Sample] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    async def run(self, root: str, picture: Path) -> str:
        """Run the burst, print its figures and write its picture. Returns the problem, or ""."""
        task = self.service.service.task or "Generate"
        if task not in PATHS:
            return f"--load has requests for the tasks {', '.join(PATHS)}, not for {task}"
        target = Target(f"{root}/{self.service.key}", self.service.service.served_model_name, task)
        answers: list[Answer] = []
        async with open_session(Limits(self.clients, 600)) as session:
            try:
                target = await calibrate(session, target)
            except SendError as error:
                return f"--load: {error}"
            self._began = time.monotonic()
            self.report(f"burst: {self.clients} clients, until {self._most} engines are ready")
            stop = asyncio.Event()
            sending = [asyncio.create_task(self._send(session, target, stop, answers, n)) for n in range(self.clients)]
            await self._watch(lambda: len(self.service.ready_pods) >= self._most, _UP_SECONDS)
            await self._watch(lambda: False, _STEADY_SECONDS)
            stop.set()
            await asyncio.gather(*sending)
        sent_seconds = time.monotonic() - self._began
        self.report("burst over")
        await self._watch(lambda: len(self.service.pods) <= self._fewest, _DOWN_SECONDS)
        return self._summarise(answers, sent_seconds, picture)

    @property
    def _most(self) -> int:
        return self.service.service.spec.most_replicas if self.service.scales else self.service.replicas

    @property
    def _fewest(self) -> int:
        return self.service.service.spec.first_replicas

    async def _send(
        self, session: aiohttp.ClientSession, target: Target, stop: asyncio.Event, answers: list[Answer], client: int
    ) -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            answers.append(answer := Answer(time.monotonic()))
            seed = (client << 32) + number
            await send(session, target, Arrival(0, _INPUT_TOKENS, _OUTPUT_TOKENS), answer, seed)
            if answer.problem:
                await asyncio.sleep(0.1)

    async def _watch(self, is_done: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not is_done() and time.monotonic() < until:
            demand = self.service.demand
            self.samples.append(
                Sample(
                    time.monotonic() - self._began,
                    self.service.replicas,
                    len(self.service.ready_pods),
                    demand.requests if demand else 0,
                    demand.waiting if demand else 0,
                )
            )
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _summarise(self, answers: list[Answer], sent_seconds: float, picture: Path) -> str:
        title = f"{self.service.key}: {self.clients} clients, at most {self._most} engines"
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(build_svg(title, self.samples), encoding="utf-8")
        found = summarise(answers, sent_seconds, Objectives())
        peak = max(sample.ready for sample in self.samples)
        self.report(
            f"{found.requests} requests, {found.failed} failed; {found.output_tokens:.0f} tokens/s; "
            f"time to first token P50 {found.ttft.p50:.2f} s, P95 {found.ttft.p95:.2f} s; {self._fewest} -> {peak} -> "
            f"{len(self.service.ready_pods)} engines; picture: {picture}"
        )
        problems = ", ".join(f"{problem} ({count})" for problem, count in found.problems[:3])
        return f"--load: {found.failed} of {found.requests} requests failed: {problems}" if found.failed else ""
