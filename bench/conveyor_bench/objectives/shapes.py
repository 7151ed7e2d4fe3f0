"""Five shapes of changing traffic: a rate over time, and the lengths of requests. Pure.

A load of 1 is `Scale.requests_per_second`: about what the engine can do within its objective.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from conveyor_engine.wire.request import EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of prompts and of answers; both are exponential, from a quarter of the mean to four times as much."""

    prompt: int
    output: int

    def draw(self, random: Random) -> tuple[int, int]:
        """Draw the lengths of a request."""
        return _draw(random, self.prompt), _draw(random, self.output)


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape. `load` gives the load at a time. Times are parts of the whole duration, from 0 to 1.

    `bursts` are (time, seconds): the requests that load 1 has in these seconds all arrive at this time. The seconds
    are limited to `_BURST_SHARE` of the whole duration.
    """

    load: Callable[[float], float]
    lengths: tuple[tuple[float, Lengths], ...]  # a share of the requests, and their lengths
    bursts: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of traffic and its duration."""

    requests_per_second: float
    seconds: float


_BURST_SHARE = 0.8
_CHAT = Lengths(prompt=120, output=60)
SHAPES = {
    "step": Shape(lambda t: 1.5 if 0.3 <= t < 0.7 else 0.4, ((1.0, _CHAT),)),
    "ramp": Shape(lambda t: 0.2 + 1.4 * t, ((1.0, _CHAT),)),
    "burst": Shape(lambda _: 0.6, ((1.0, _CHAT),), bursts=((0.2, 40.0), (0.5, 40.0), (0.8, 40.0))),
    "diurnal": Shape(lambda t: 0.8 - 0.7 * math.cos(4 * math.pi * t), ((1.0, _CHAT),)),
    "mix": Shape(lambda _: 1.2, ((0.85, _CHAT), (0.15, Lengths(prompt=600, output=150)))),
}


def draw_requests(shape: Shape, scale: Scale, seed: int, vocabulary: int) -> list[EngineRequest]:
    """Return requests with Poisson arrivals by the shape's load, in order."""
    random = Random(seed)
    arrivals = sorted(_arrivals(shape, scale, random))
    return [_request(number, at, shape, random, vocabulary) for number, at in enumerate(arrivals)]


def _arrivals(shape: Shape, scale: Scale, random: Random) -> Iterator[float]:
    """Yield Poisson arrivals, thinned from the highest rate, and then the bursts."""
    highest, at = 1.6, 0.0
    while (at := at + random.expovariate(highest * scale.requests_per_second)) < scale.seconds:
        if random.random() * highest < shape.load(at / scale.seconds):
            yield at
    for part, seconds in shape.bursts:
        come = min(seconds, _BURST_SHARE * scale.seconds)
        yield from [part * scale.seconds] * round(come * scale.requests_per_second)


def _request(number: int, at: float, shape: Shape, random: Random, vocabulary: int) -> EngineRequest:
    parts, lengths = zip(*shape.lengths, strict=True)
    prompt, output = random.choices(lengths, parts)[0].draw(random)
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=random.choices(range(vocabulary), k=prompt),
        params=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
        arrival_time=at,
    )


def _draw(random: Random, mean: int) -> int:
    return round(min(4 * mean, max(mean / 4, random.expovariate(1 / mean))))
