"""When requests come: shapes of load over time, drawn at random, or arrivals that somebody recorded. Used by `run`.

A load is counted in busy replicas: 1 is what keeps one engine's running batch full.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class Arrival(NamedTuple):
    """A request: when it comes, and how long it runs; None is drawn."""

    at: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """`load` of a moment, never above `most`, for so many seconds; `changed_at`: when it changed for the last time."""

    load: Callable[[float], float]
    most: float
    seconds: float
    changed_at: float | None = None

    def draw(self, random: Random, requests_per_second: float) -> Iterator[Arrival]:
        """A Poisson process, thinned to the load; `requests_per_second` are those of a load of 1."""
        at = 0.0
        while (at := at + random.expovariate(self.most * requests_per_second)) < self.seconds:
            if random.random() * self.most < self.load(at):
                yield Arrival(at)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Arrivals as they were, in order of time."""

    arrivals: tuple[Arrival, ...]
    changed_at: None = None

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at

    def draw(self, random: Random, requests_per_second: float) -> Iterator[Arrival]:
        """The same each time."""
        return iter(self.arrivals)


Trace = Shape | Recorded


def steady(load: float, seconds: float) -> Shape:
    return Shape(lambda _: load, load, seconds)


def step(low: float, high: float, at: float, seconds: float) -> Shape:
    """`low`, from `at` on `high`."""
    return Shape(lambda now: low if now < at else high, max(low, high), seconds, at)


def ramp(low: float, high: float, at: float, length: float, seconds: float) -> Shape:
    """Return a linear ramp from `low` to `high` that starts at `at` and lasts `length` seconds."""
    return Shape(
        lambda now: low + (high - low) * min(max((now - at) / length, 0), 1), max(low, high), seconds, at + length
    )


def burst(low: float, high: float, at: float, length: float, seconds: float) -> Shape:
    """`high` for `length` seconds, else `low`."""
    return Shape(lambda now: high if at <= now < at + length else low, max(low, high), seconds, at + length)


def diurnal(low: float, high: float, length: float, seconds: float) -> Shape:
    """A sine between `low` and `high`, from `low`, with a period of `length` seconds."""
    middle, swing = (low + high) / 2, (high - low) / 2
    return Shape(lambda now: middle - swing * math.cos(2 * math.pi * now / length), max(low, high), seconds)


def read_csv(lines: Iterable[str]) -> Recorded:
    """Column `at`: seconds since any moment; column `seconds`, which may be left out: how long the request ran.

    Raises ValueError with what is wrong.
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
