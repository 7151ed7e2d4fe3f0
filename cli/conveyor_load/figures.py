"""Computes the figures of a load run: rates, percentiles, and the share within the objectives. Pure."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from conveyor_load.objectives import PERCENT, Objectives
from conveyor_load.percentiles import percentile
from conveyor_load.sending import Answer

_FAILED_SHARE = 0.01
_BEGUN_SHARE = 0.9


class Spread(NamedTuple):
    """Percentiles, in seconds; all 0 if there are no values."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run.

    offered: requests per second. goodput: requests per second that were within all objectives.
    input_tokens, output_tokens: tokens per second, over the time until the last answer.
    begun_share: share of requests whose first token came before the last request was due. It falls if a queue grows.
    """

    offered: float
    requests: int
    failed: int
    problems: tuple[tuple[str, int], ...]
    seconds: float
    goodput: float
    input_tokens: float
    output_tokens: float
    ttft: Spread
    itl: Spread
    latency: Spread
    begun_share: float

    def misses(self, objectives: Objectives) -> list[str]:
        """Return each objective that the run missed, as a phrase; empty if it met all."""
        spreads = {"timeToFirstToken": self.ttft, "interTokenLatency": self.itl, "latency": self.latency}
        found = []
        if self.failed > self.requests * _FAILED_SHARE:
            problems = ", ".join(f"{problem} ({count})" for problem, count in self.problems[:3])
            found.append(f"{self.failed} of {self.requests} requests failed: {problems}")
        if self.failed == self.requests:
            return found
        for name, seconds in objectives.items():
            if spreads[name].p95 > seconds:
                found.append(f"{name} P95 {spreads[name].p95 * 1000:.0f} ms")
        bounds_the_wait = objectives.ttft_seconds is not None or objectives.latency_seconds is not None
        if not bounds_the_wait and self.begun_share < _BEGUN_SHARE:
            found.append(f"only {self.begun_share:.0%} began before the last request came: the queue grows")
        return found


def summarise(answers: Sequence[Answer], sent_seconds: float, objectives: Objectives) -> Figures:
    """Compute the figures of a run with at least one request. `sent_seconds`: the time in which requests were due."""
    whole = [answer for answer in answers if not answer.problem]
    problems = Counter(answer.problem for answer in answers if answer.problem)
    begin, last_due = answers[0].due, answers[-1].due
    end = max([last_due, *(answer.last for answer in whole)])
    seconds, offered = max(end - begin, sent_seconds), len(answers) / sent_seconds
    good = sum(_is_good(answer, objectives) for answer in whole)
    return Figures(
        offered=offered,
        requests=len(answers),
        failed=sum(problems.values()),
        problems=tuple(problems.most_common()),
        seconds=seconds,
        goodput=offered * good / len(answers),
        input_tokens=sum(answer.prompt_tokens for answer in whole) / seconds,
        output_tokens=sum(answer.output_tokens for answer in whole) / seconds,
        ttft=spread(answer.ttft_seconds for answer in whole),
        itl=spread(array("f", chain.from_iterable(answer.gaps for answer in whole))),
        latency=spread(answer.latency_seconds for answer in whole),
        begun_share=sum(answer.first <= last_due for answer in whole) / len(answers),
    )


def _is_good(answer: Answer, objectives: Objectives) -> bool:
    pairs = (
        (answer.ttft_seconds, objectives.ttft_seconds),
        (answer.itl_seconds, objectives.itl_seconds),
        (answer.latency_seconds, objectives.latency_seconds),
    )
    return all(limit is None or value <= limit for value, limit in pairs)


def spread(values: Iterable[float]) -> Spread:
    """Return P50, P95 and P99 of the values, by nearest rank."""
    in_order = sorted(values)
    return Spread(*(percentile(in_order, percent) for percent in (50, PERCENT, 99)))
