"""Repeats rounds in which each system does the same work, until the ratio of their figures settles.

This is for figures that only a whole run gives: a wait, a gap, requests of many lengths. As with slices, the order of
the systems alternates. A round during which the host took too much time does not count for ratios, and is reported as
dropped.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from conveyor_bench.comparing.limit import Limit
from conveyor_bench.comparing.slices import LIMIT, STOLEN_AT_MOST, Estimate, estimate
from conveyor_bench.comparing.systems import Conveyor
from conveyor_bench.comparing.turns import OURS, Beside, processor_ticks, stolen_share

Figures = Mapping[str, float]  # seconds, by name; the first name's ratio decides when to end


@dataclass(frozen=True, slots=True)
class Sample:
    """The round of one system."""

    figures: Figures
    stolen: float = 0.0  # share of all processors' time that the host gave to other machines


Round = Mapping[str, Sample]  # by system, OURS and LIMIT among them


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits at which to end even if the figures have not settled."""

    rounds: int
    budget_seconds: float


def measure_engines(
    engines: Mapping[str, Conveyor],
    run: Callable[[Conveyor, int], Figures],
    limits: Limits,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure whole runs of engines in turns, after one run of each to warm up. `run` gets the round's number."""
    runs = {name: partial(run, engine) for name, engine in engines.items()}
    for warm_up in runs.values():
        warm_up(-1)
    return measure_rounds(in_turns(runs, Limit(engines[OURS].runner).slice), limits, report)


def in_turns(systems: Mapping[str, Callable[[int], Figures]], limit: Beside) -> Callable[[int], Round]:
    """Return a function that runs one round: a whole run of each system, one right after the other.

    Each run gets the round's number. This engine's figures need `all`, the seconds of a whole run, because the limit's
    time is for all steps of the run.
    """

    def one_round(number: int) -> Round:
        samples: dict[str, Sample] = {}
        for name in list(systems)[:: -1 if number % 2 else 1]:
            samples[name] = _sample(systems[name], number)
            if name == OURS:
                least = limit(0)
                samples[LIMIT] = Sample({"all": least.seconds}, least.stolen)
        return samples

    return one_round


def _sample(run: Callable[[int], Figures], number: int) -> Sample:
    before = processor_ticks()
    figures = run(number)
    return Sample(figures, stolen_share(before, processor_ticks()))


def measure_rounds(one_round: Callable[[int], Round], limits: Limits, report: Callable[[str], None]) -> dict[str, Any]:
    """Return each system's median figures. For each peer, also returns its figures divided by ours, with the spread.

    A further round begins only if a round as long as the longest so far would end within the budget.
    """
    begun, longest, rounds = time.monotonic(), 0.0, list[Round]()
    while len(rounds) < limits.rounds and not _is_settled(rounds):
        started = time.monotonic()
        if rounds and started - begun + longest > limits.budget_seconds:
            report(f"event=budget_spent rounds={len(rounds)} of={limits.rounds}")
            break
        rounds.append(one_round(len(rounds)))
        longest = max(longest, time.monotonic() - started)
        report(f"event=measured round={len(rounds)} " + " ".join(_describe(*pair) for pair in rounds[-1].items()))
    return _summarise(rounds)


def _describe(name: str, sample: Sample) -> str:
    return " ".join(f"{name}_{key}={value:.3f}" for key, value in sample.figures.items())


def _summarise(rounds: Sequence[Round]) -> dict[str, Any]:
    (key,) = rounds[0][LIMIT].figures
    fraction = _ratio(rounds, LIMIT, key)
    peers = [name for name in rounds[0] if name not in (OURS, LIMIT)]
    return {
        "figures": _medians(rounds, OURS),
        "limit_fraction": round(fraction.value, 3) if fraction else None,
        "limit": {"figures": _medians(rounds, LIMIT), "spread": round(fraction.spread, 3) if fraction else None},
        "peers": {peer: {"figures": _medians(rounds, peer)} | _compare(rounds, peer) for peer in peers},
        "settled": _is_settled(rounds),
        "rounds": len(rounds),
        "dropped": len(rounds) - len(_counting(rounds)),
    }


def _medians(rounds: Sequence[Round], name: str) -> dict[str, float]:
    return {key: round(median(pair[name].figures[key] for pair in rounds), 4) for key in rounds[0][name].figures}


def _compare(rounds: Sequence[Round], peer: str) -> dict[str, dict[str, float | None]]:
    ratios = {key: _ratio(rounds, peer, key) for key in rounds[0][OURS].figures}
    return {
        "ratio": {key: round(found.value, 3) if found else None for key, found in ratios.items()},
        "spread": {key: round(found.spread, 3) if found else None for key, found in ratios.items()},
    }


def _is_settled(rounds: Sequence[Round]) -> bool:
    if not rounds:
        return False
    key = next(iter(rounds[0][OURS].figures))
    ratios = [_ratio(rounds, peer, key) for peer in rounds[0] if peer not in (OURS, LIMIT)]
    return all(found is not None and found.settled for found in ratios)


def _ratio(rounds: Sequence[Round], peer: str, key: str) -> Estimate | None:
    """Return the peer's figure divided by ours."""
    return estimate([pair[peer].figures[key] / pair[OURS].figures[key] for pair in _counting(rounds)])


def _counting(rounds: Sequence[Round]) -> list[Round]:
    return [pair for pair in rounds if all(sample.stolen <= STOLEN_AT_MOST for sample in pair.values())]
