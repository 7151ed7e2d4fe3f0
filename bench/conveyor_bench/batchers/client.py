"""Sends texts to a server, at a rate or from a number of clients, and summarises the answers. Used by `command`."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Final

import aiohttp

from conveyor_bench.batchers.systems import System, body
from conveyor_load.figures import spread

TOKENS: Final = (8, 512)
REQUEST_SECONDS: Final = 120.0
_SPECIAL_TOKENS: Final = 2
_WORDS: Final = range(3, 30_522)  # words of `workloads.encoder`'s tokenizer; each is one token


@dataclass(slots=True)
class Answer:
    """When a request was due and when its answer ended, in seconds. The end is NaN without a complete answer."""

    due: float
    end: float = float("nan")


def draw_text(random: Random, tokens: int | None = None) -> str:
    """Return a random text of `tokens` tokens, including BERT's two special tokens; None: a random number of tokens."""
    count = random.randint(*TOKENS) if tokens is None else tokens
    return " ".join(f"w{word}" for word in random.choices(_WORDS, k=count - _SPECIAL_TOKENS))


class Client:
    """Sends requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, system: System) -> None:
        self._session, self._url, self._system = session, url, system

    async def embed(self, text: str) -> list[float]:
        """Return the text's vector. Raises aiohttp.ClientError, TimeoutError, or ValueError if there is no vector."""
        path, data = body(self._system, text)
        headers = {"Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with self._session.post(self._url + path, data=data, headers=headers, timeout=limit) as answer:
            answer.raise_for_status()
            try:
                return self._system.read(await answer.json(content_type=None))
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"no vector in the answer: {error!r}") from error

    async def time_lone(self, count: int = 5) -> float:
        """Return the median seconds for one text with the most tokens. The texts are sent one at a time."""
        random, times = Random(0), []
        for _ in range(count):
            begin = time.monotonic()
            await self.embed(draw_text(random, TOKENS[1]))
            times.append(time.monotonic() - begin)
        return sorted(times)[count // 2]

    async def send_at(self, rate: float, seconds: float, seed: int) -> list[Answer]:
        """Send texts with Poisson arrivals. Returns after the last answer."""
        random, begin, answers = Random(seed), time.monotonic(), list[Answer]()
        async with asyncio.TaskGroup() as group:
            at = random.expovariate(rate)
            while at < seconds:
                await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
                answers.append(answer := Answer(begin + at))
                group.create_task(self._time(answer, draw_text(random)))
                at += random.expovariate(rate)
        return answers

    async def saturate(self, clients: int, seconds: float, seed: int) -> list[Answer]:
        """Send texts until `seconds` have passed. Each client sends its next text after its previous answer."""
        random, end, answers = Random(seed), time.monotonic() + seconds, list[Answer]()

        async def be_a_client() -> None:
            while (now := time.monotonic()) < end:
                answers.append(answer := Answer(now))
                await self._time(answer, draw_text(random))

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(be_a_client())
        return answers

    async def _time(self, answer: Answer, text: str) -> None:
        with suppress(aiohttp.ClientError, TimeoutError, ValueError):
            await self.embed(text)
            answer.end = time.monotonic()


def summarise(answers: Sequence[Answer], objective_seconds: float) -> dict[str, float]:
    """Return the answers per second, the share of requests within the objective, and percentiles in milliseconds.

    The rate covers the time from the first request to the last answer. A request without an answer is not within the
    objective, and is not counted in the percentiles.
    """
    times = [answer.end - answer.due for answer in answers if answer.end == answer.end]
    if not times:
        return {"requests_per_second": 0.0, "within_objective": 0.0, "answered": 0.0}
    spent = max(answer.end for answer in answers if answer.end == answer.end) - answers[0].due
    p50, p95, p99 = spread(times)
    return {
        "requests_per_second": len(times) / spent,
        "within_objective": sum(seconds <= objective_seconds for seconds in times) / len(answers),
        "answered": len(times) / len(answers),
        "p50": 1000 * p50,
        "p95": 1000 * p95,
        "p99": 1000 * p99,
    }
