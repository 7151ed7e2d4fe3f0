"""Arrivals of requests: drawn at random for a shape of load over time, or recorded. Used by `run`.

The unit of load is a busy replica: a load of 1 keeps the running batch of one engine full.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class Arrival(NamedTuple):
    """A request: its arrival and its duration in seconds. If the duration is None, it is drawn at random."""

    at: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """A load over time. `load`: the load at a time, at most `most`. `changed_at`: the time of the last change."""

    load: Callable[[float], float]
    most: float
    seconds: float
    changed_at: float | None = None

    def draw(self, random: Random, requests_per_second: float) -> Iterator[Arrival]:
        """Draw a Poisson process, thinned to the load. `requests_per_second`: the rate of a load of 1."""
        at = 0.0
        while (at := at + random.expovariate(self.most * requests_per_second)) < self.seconds:
            if random.random() * self.most < self.load(at):
                yield Arrival(at)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded arrivals in order of time."""

    arrivals: tuple[Arrival, ...]
    changed_at: None = None

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at

    def draw(self, random: Random, requests_per_second: float) -> Iterator[Arrival]:
        """Return the recorded arrivals, which are the same for every seed."""
        return iter(self.arrivals)


Trace = TrafficShape | Recorded


def steady(load: float, seconds: float) -> TrafficShape:
    return TrafficShape(lambda _: load, load, seconds)


def step(low: float, high: float, at: float, seconds: float) -> TrafficShape:
    """Return a load that is `low` before `at` and `high` from then on."""
    return TrafficShape(lambda now: low if now < at else high, max(low, high), seconds, at)


def ramp(low: float, high: float, at: float, length: float, seconds: float) -> TrafficShape:
    """Return a linear ramp from `low` to `high` that starts at `at` and lasts `length` seconds."""
    return TrafficShape(
        lambda now: low + (high - low) * min(max((now - at) / length, 0), 1), max(low, high), seconds, at + length
    )


def burst(low: float, high: float, at: float, length: float, seconds: float) -> TrafficShape:
    """Return a load that is `high` for `length` seconds from `at`, and otherwise `low`."""
    return TrafficShape(lambda now: high if at <= now < at + length else low, max(low, high), seconds, at + length)


def diurnal(low: float, high: float, length: float, seconds: float) -> TrafficShape:
    """Return a sine between `low` and `high` that starts at `low` and has a period of `length` seconds."""
    middle, swing = (low + high) / 2, (high - low) / 2
    return TrafficShape(lambda now: middle - swing * math.cos(2 * math.pi * now / length), max(low, high), seconds)


def read_csv(lines: Iterable[str]) -> Recorded:
    """Read recorded arrivals. Column `at`: seconds since any moment. Optional column `seconds`: the request's duration.

    Raises ValueError for invalid rows.
    """
    reader = csv.DictReader(lines)
    if "at" not in (reader.fieldnames or ()):
        raise ValueError("the first line must be the header: at, or at,seconds")
    rows = sorted((float(row["at"]), float(row.get("seconds") or "nan")) for row in reader)
    if not rows:
        raise ValueError("the file has no arrivals")
    if not all(math.isfinite(at) and (math.isnan(seconds) or 0 <= seconds < math.inf) for at, seconds in rows):
        raise ValueError("each arrival must be a finite number, and each duration at least 0 s")
    first = rows[0][0]
    if rows[-1][0] - first < 15:
        raise ValueError("the arrivals end before the autoscaler first reads its metrics, after 15 s")
    return Recorded(tuple(Arrival(at - first, None if math.isnan(seconds) else seconds) for at, seconds in rows))
