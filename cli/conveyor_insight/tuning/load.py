"""Sends the load of a sweep to the tuned service, and measures it."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import aiohttp

from conveyor_insight.tuning.candidates import Candidate
from conveyor_insight.tuning.progress import Progress
from conveyor_insight.tuning.sweep import CannotRun, Subject
from conveyor_load.figures import Figures, summarise
from conveyor_load.objectives import Objectives
from conveyor_load.open_loop import Limits, run
from conveyor_load.requests import Target
from conveyor_load.sending import SendError, calibrate
from conveyor_load.traces import Trace

_ROUTE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class TestLoad:
    """The load for each candidate and rate. `trace` is stretched or compressed to the rate."""

    trace: Trace
    seconds: float
    seed: int
    objectives: Objectives
    session: aiohttp.ClientSession
    progress: Progress
    limits: Limits = field(default_factory=Limits)
    _runs: Iterator[int] = field(default_factory=itertools.count)

    async def measure(self, target: Target, candidate: Candidate, rate: float) -> Figures:
        """Run the load once and return its figures. `rate`: requests a second."""
        seconds = max(self.seconds, 2 / rate)
        trace = self.trace.at_rate(rate, seconds)
        text = f"{candidate}: {rate:.3g} requests/s"
        with self.progress.trial(text, len(trace.arrivals)) as on_sent:
            seed = self.seed * 1_000_003 + next(self._runs)  # new prompts in each run, because old ones are cached
            answers = await run(self.session, target, trace, self.limits, seed, on_sent)
        return summarise(answers, seconds, self.objectives)


class Calibrated:
    """A subject whose requests have the intended lengths in tokens.

    Tokens per word are measured with each candidate, which also shows that the engines answer. But the requests to all
    candidates are built with the first measurement, so that they are alike.
    """

    def __init__(self, subject: Subject, session: aiohttp.ClientSession) -> None:
        self._subject, self._session = subject, session
        self._words: tuple[float, float] | None = None

    async def apply(self, candidate: Candidate) -> Target:
        """Apply the candidate to the subject. Raises CannotRun also if no request is answered."""
        target = await self._subject.apply(candidate)
        measured = await self._measure(target)
        if self._words is None:
            self._words = measured.tokens_per_word, measured.extra_tokens
        return replace(target, tokens_per_word=self._words[0], extra_tokens=self._words[1])

    async def _measure(self, target: Target) -> Target:
        """Measure tokens per word. Retry for a while, because a gateway may not know a new service at once."""
        end = time.monotonic() + _ROUTE_SECONDS
        while True:
            try:
                return await calibrate(self._session, target)
            except SendError as error:
                if error.lasts or time.monotonic() > end:
                    raise CannotRun(str(error)) from error
                await asyncio.sleep(1)
