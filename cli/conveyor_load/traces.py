"""Traces: the arrivals and lengths of requests, which are recorded or drawn from percentiles.

A file has a JSON object on each line, like Mooncake's published traces: `timestamp` in milliseconds, `input_length` and
`output_length` in tokens. Other fields are ignored.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Final, NamedTuple

MAX_REQUESTS: Final = 200_000
MAX_TOKENS: Final = 1_048_576
_MAX_LINE: Final = 1 << 16
_P95: Final = 1.6449  # the P95 of a normal distribution, in standard deviations above its mean


class Arrival(NamedTuple):
    """A request: its time in seconds after the first request, and its tokens. One-step tasks have no output tokens."""

    at: float
    input_tokens: int
    output_tokens: int


class Lengths(NamedTuple):
    """Median and 95th percentile, in tokens."""

    p50: int
    p95: int

    def draw(self, random: Random) -> int:
        """Draw a length from the lognormal distribution with these percentiles."""
        sigma = math.log(self.p95 / self.p50) / _P95
        return max(1, min(MAX_TOKENS, round(random.lognormvariate(math.log(self.p50), sigma))))


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrivals."""

    arrivals: tuple[Arrival, ...]

    @property
    def rate(self) -> float:
        """Mean requests per second; 0 if all arrive at once."""
        seconds = self.arrivals[-1].at
        return (len(self.arrivals) - 1) / seconds if seconds else 0.0

    def at_rate(self, requests_per_second: float, seconds: float) -> "Trace":
        """Return the requests of the first `seconds` at another rate. If the trace is too short, it is repeated."""
        factor = self.rate / requests_per_second
        round_seconds = len(self.arrivals) / requests_per_second
        scaled: list[Arrival] = []
        for number in range(math.ceil(seconds / round_seconds)):
            for arrival in self.arrivals:
                if (at := arrival.at * factor + number * round_seconds) >= seconds:
                    return Trace(tuple(scaled))
                scaled.append(arrival._replace(at=at))
        return Trace(tuple(scaled))

    def fit(self, context_tokens: int | None) -> "Trace":
        """Return the trace with requests cut to a model's context."""
        if context_tokens is None:
            return self
        return replace(self, arrivals=tuple(_fit(arrival, context_tokens) for arrival in self.arrivals))


def _fit(arrival: Arrival, context_tokens: int) -> Arrival:
    prompt = min(arrival.input_tokens, max(1, context_tokens - 1))
    return arrival._replace(input_tokens=prompt, output_tokens=min(arrival.output_tokens, context_tokens - prompt))


def draw_trace(inputs: Lengths, outputs: Lengths | None, number: int, seed: int = 0) -> Trace:
    """Draw a trace with Poisson arrivals, on average one request a second. `outputs`: None for one-step tasks."""
    random = Random(seed)
    at, arrivals = 0.0, []
    for _ in range(number):
        arrivals.append(Arrival(at, inputs.draw(random), 0 if outputs is None else outputs.draw(random)))
        at += random.expovariate(1)
    return Trace(tuple(arrivals))


def read_trace(lines: Iterable[str]) -> Trace:
    """Read a trace from lines of JSON. Raises ValueError with the number of an invalid line."""
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(arrivals) == MAX_REQUESTS:
            raise ValueError(f"line {number}: a trace has at most {MAX_REQUESTS} requests")
        try:
            arrivals.append(_read_line(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"line {number}: {text}") from None
    if len(arrivals) < 2:
        raise ValueError("a trace has at least two requests")
    arrivals.sort()
    first = arrivals[0].at
    if arrivals[-1].at == first:
        raise ValueError("all requests have one timestamp: there is no rate")
    return Trace(tuple(arrival._replace(at=arrival.at - first) for arrival in arrivals))


def _read_line(line: str) -> Arrival:
    if len(line) > _MAX_LINE:
        raise ValueError(f"a line has at most {_MAX_LINE} characters")
    item = json.loads(line)
    if not isinstance(item, dict):
        raise ValueError("it must be a JSON object")
    milliseconds = item["timestamp"]
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float) or not 0 <= milliseconds < 1e15:
        raise ValueError(f"timestamp must be milliseconds, 0 or more, not {milliseconds!r}"[:200])
    return Arrival(milliseconds / 1000, _read_tokens(item, "input_length", 1), _read_tokens(item, "output_length", 0))


def _read_tokens(item: dict[str, object], name: str, least: int) -> int:
    value = item[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKENS:
        raise ValueError(f"{name} must be a whole number from {least} to {MAX_TOKENS}, not {value!r}"[:200])
    return value


def parse_lengths(text: str) -> Lengths:
    """Parse P50 and P95 such as `256,1024`. A single number is used for both. Raises ValueError."""
    numbers = text.split(",")
    if len(numbers) in (1, 2) and all(number.isascii() and number.isdigit() and len(number) < 8 for number in numbers):
        lengths = Lengths(int(numbers[0]), int(numbers[-1]))
        if 1 <= lengths.p50 <= lengths.p95 <= MAX_TOKENS:
            return lengths
    raise ValueError(f"must be tokens at P50 and P95, such as 256,1024, not {text!r}")
