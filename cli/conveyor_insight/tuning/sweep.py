"""Measures each candidate at several rates, to find the highest rate that meets the objectives.

A `Subject` is what is tuned: a service in a cluster, or an engine process of a benchmark.
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
"""Maximum number of trials of one candidate in the search for its highest rate."""
_BISECTIONS: Final = 2
_MAX_RATE: Final = 2000.0
_TOLERANCE: Final = 0.05


class CannotRun(Exception):
    """The service does not run with a candidate. The message has the reason."""


class Subject(Protocol):
    """A service whose settings are tuned."""

    async def apply(self, candidate: Candidate) -> Target:
        """Apply the candidate, and return when the service runs with it.

        Raises CannotRun. Other errors end the sweep.
        """


Measure = Callable[[Target, Candidate, float], Awaitable[Figures]]
"""Runs the load at a rate in requests a second."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run at one rate."""

    rate: float
    figures: Figures
    misses: tuple[str, ...]


@dataclass(slots=True)
class Result:
    """One candidate's trials in the order in which they ran. `problem`: why there are no trials."""

    candidate: Candidate
    trials: list[Trial] = field(default_factory=list)
    problem: str = ""

    @property
    def best(self) -> Trial | None:
        """The trial with the highest rate that met the objectives; None if no trial met them."""
        return max((trial for trial in self.trials if not trial.misses), key=lambda trial: trial.rate, default=None)

    @property
    def goodput(self) -> float:
        """The goodput of the best trial; 0 if none met the objectives."""
        return 0.0 if self.best is None else self.best.figures.goodput


@dataclass(frozen=True, slots=True)
class Sweep:
    """Measures candidates at `rates`.

    Without rates, it doubles or halves the rate, but not below `least_rate`. The first candidate starts at
    `first_rate`, and later ones at the best rate so far.
    """

    objectives: Objectives
    measure: Measure
    rates: Sequence[float] = ()
    first_rate: float = 1.0
    least_rate: float = 0.01

    async def go(self, subject: Subject, plan: Plan, results: list[Result]) -> None:
        """Run the sweep. Adds each result to `results` immediately, so that the caller has it after a cancellation."""
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
        """Double or halve the rate until one rate meets the objectives and one misses them.

        Then try rates in between.
        """
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
    """Return the result with the most goodput.

    If several results are within 5 % of the most goodput, the current candidate's result wins. If the current candidate
    is not among them, the smallest batch limit wins, because it leaves more of the KV cache for each request.
    """
    most = max(result.goodput for result in results)
    near = [result for result in results if result.goodput >= most * (1 - _TOLERANCE)]
    return min(near, key=lambda result: (result.candidate != current, result.candidate.max_batch_size))
