"""Measure each candidate at rising rates, and stop where the objectives are missed.

What is tuned is behind `Subject`: a service of a cluster, or an engine process of a benchmark.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from conveyor_insight.tuning.candidates import Candidate, Plan
from conveyor_load.figures import Figures
from conveyor_load.objectives import Objectives
from conveyor_load.requests import Target

MAX_TRIALS: Final = 8
"""Trials of one candidate in a search for its highest rate."""
_BISECTIONS: Final = 2
_MAX_RATE: Final = 2000.0
_TOLERANCE: Final = 0.05


class CannotRun(Exception):
    """A candidate's engines do not become ready; the sentence says why."""


class Subject(Protocol):
    """What is tuned."""

    async def apply(self, candidate: Candidate) -> Target:
        """Makes it serve so, and returns when it does. Raises CannotRun; what else it raises ends the sweep."""


Measure = Callable[[Target, Candidate, float], Awaitable[Figures]]
"""Runs the load at so many requests per second."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run at one rate."""

    rate: float
    figures: Figures
    misses: tuple[str, ...]


@dataclass(slots=True)
class Result:
    """One candidate's trials, in the order in which they ran; `problem` says why there are none."""

    candidate: Candidate
    trials: list[Trial] = field(default_factory=list)
    problem: str = ""

    @property
    def best(self) -> Trial | None:
        """The trial with the highest rate that met the objectives."""
        return max((trial for trial in self.trials if not trial.misses), key=lambda trial: trial.rate, default=None)

    @property
    def goodput(self) -> float:
        """The goodput of the best trial; 0 if none met the objectives."""
        return 0.0 if self.best is None else self.best.figures.goodput


@dataclass(frozen=True, slots=True)
class Sweep:
    """Rates: those given, or found by doubling and halving from `first_rate`, never below `least_rate`."""

    objectives: Objectives
    measure: Measure
    rates: Sequence[float] = ()
    first_rate: float = 1.0
    least_rate: float = 0.01

    async def go(self, subject: Subject, plan: Plan, results: list[Result]) -> None:
        """Adds to `results` as it goes, so that what was measured is known after a cancellation."""
        await self._try(subject, plan.current, results)
        for axis in plan.axes:
            for candidate in axis.vary(choose(results, plan.current).candidate):
                if all(result.candidate != candidate for result in results):
                    await self._try(subject, candidate, results)

    async def _try(self, subject: Subject, candidate: Candidate, results: list[Result]) -> None:
        start = max([result.best.rate for result in results if result.best is not None], default=self.first_rate)
        results.append(result := Result(candidate))
        try:
            target = await subject.apply(candidate)
        except CannotRun as error:
            result.problem = str(error)
            return
        if self.rates:
            for rate in sorted(self.rates):
                if (await self._run(target, result, rate)).misses:
                    break
        else:
            await self._find_rate(target, result, start)

    async def _find_rate(self, target: Target, result: Result, start: float) -> None:
        """Doubles or halves the rate until one rate meets the objectives and one misses them. Then tries in between."""
        rate, factor = start, 0.0
        while len(result.trials) < MAX_TRIALS and self.least_rate <= rate <= _MAX_RATE:
            holds = not (await self._run(target, result, rate)).misses
            if factor and holds != (factor > 1):
                break
            factor = 2.0 if holds else 0.5
            rate *= factor
        for _ in range(_BISECTIONS):
            held = [trial.rate for trial in result.trials if not trial.misses]
            missed = [trial.rate for trial in result.trials if trial.misses]
            if held and missed and len(result.trials) < MAX_TRIALS:
                await self._run(target, result, math.sqrt(max(held) * min(missed)))

    async def _run(self, target: Target, result: Result, rate: float) -> Trial:
        figures = await self.measure(target, result.candidate, rate)
        result.trials.append(trial := Trial(rate, figures, tuple(figures.misses(self.objectives))))
        return trial


def choose(results: Sequence[Result], current: Candidate) -> Result:
    """The result with the most goodput. Of the results within 5 % of it, the current one, otherwise the one with the
    smallest batch limit: it changes less, and leaves more of the KV cache to each request."""
    most = max(result.goodput for result in results)
    near = [result for result in results if result.goodput >= most * (1 - _TOLERANCE)]
    return min(near, key=lambda result: (result.candidate != current, result.candidate.max_batch_size))
