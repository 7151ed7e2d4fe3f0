"""Compares ways to choose an engine when engines cache prefixes, in virtual time.

The gateway's own classes choose the engines: `EnginePool` and `Waiting`. Engines are simulated: a step computes up to
2,048 prompt tokens and a token for each running request, and takes the time that a cost model of an 8B model on one GPU
gives. An engine's prefix cache keeps the latest 200,000 tokens. Users send a request, wait for the whole answer, pause
(5 s on average in conversations, otherwise 3 s), and go on.

- chat: conversations of six turns; all begin with the same 600 tokens;
- documents: prompts that begin with one of 100 documents of 4,000 tokens;
- single: prompts of 650 to 900 tokens that have nothing in common.

Prints for each traffic and each way: requests per second, the part of the prompt tokens that was cached, the time to
the first token, and the time between tokens. The last line is one JSON object.
"""

import argparse
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import median, quantiles
from typing import Any, Final

from conveyor_gateway.admission import engine_pool, waiting
from conveyor_gateway.admission.engine_pool import EnginePool
from conveyor_gateway.admission.ticket import Ticket
from conveyor_gateway.admission.waiting import Waiting

PLACES: Final = 36  # nine eighths of 32 rows
STEP_TOKENS: Final = 2048
CACHE_TOKENS: Final = 200_000
SYSTEM_TOKENS: Final = 600
DOCUMENT_TOKENS: Final = 4000
NUM_DOCUMENTS: Final = 100
NUM_TURNS: Final = 6
WARM_UP: Final = 0.3  # the part of the time that is not measured
NO_HOMES: Final = "load only"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to choose engines: without homes, or with homes of this highest load and this overtaking."""

    name: str
    max_load: float = 0.0
    overtaking_seconds: float = 0.0

    @property
    def has_homes(self) -> bool:
        return self.name != NO_HOMES


@dataclass(slots=True)
class Talk:
    """What one user says: a conversation, or a question."""

    key: int  # of what the cache keeps of it
    num_cached_at_most: int  # tokens that an engine may have of it
    turn: int = 0


@dataclass(slots=True)
class Asked:
    """A request. Times in seconds."""

    talk: Talk
    num_prompt: int
    num_output: int
    at: float
    ticket: Ticket
    num_cached: int = 0
    num_left: int = 0  # prompt tokens that are not computed yet
    num_made: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0


@dataclass(slots=True)
class Simulated:
    """An engine: the requests that wait for their prefill, those that decode, and the cached tokens by key."""

    prefills: list[Asked] = field(default_factory=list)
    decodes: list[Asked] = field(default_factory=list)
    cache: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)
    busy: bool = False

    def count_cached(self, *keys: tuple[Hashable, int]) -> int:
        found = 0
        for key, most in keys:
            if key in self.cache:
                self.cache.move_to_end(key)
                found = max(found, min(most, self.cache[key]))
        return found

    def keep(self, key: Hashable, num_tokens: int) -> None:
        self.cache[key] = max(num_tokens, self.cache.get(key, 0))
        self.cache.move_to_end(key)
        while sum(self.cache.values()) > CACHE_TOKENS:
            self.cache.popitem(last=False)

    def start_step(self) -> float:
        """Compute prompt tokens. Return the seconds that the step takes."""
        budget = STEP_TOKENS
        while self.prefills and budget:
            now = min(budget, self.prefills[0].num_left)
            self.prefills[0].num_left -= now
            budget -= now
            if not self.prefills[0].num_left:
                self.decodes.append(self.prefills.pop(0))
        return 0.0065 + 0.00004 * len(self.decodes) + 0.000024 * (STEP_TOKENS - budget)


class Simulation:
    """One kind of traffic, and one way to choose engines."""

    def __init__(self, kind: str, num_engines: int, seed: int, way: Way) -> None:
        self.kind, self.way, self.random = kind, way, Random(seed)
        self.pool, self.waiting = EnginePool(), Waiting()
        self.pool.place_limit = PLACES
        self.engines = {f"10.0.0.{number}:8000": Simulated() for number in range(num_engines)}
        self.pool.set_ready(self.engines)
        self.asked: dict[Ticket, Asked] = {}
        self.ended: list[Asked] = []
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def run(self, num_users: int, seconds: float) -> dict[str, float]:
        for _ in range(num_users):
            self._pause(self._draw_talk())
        while self._events and self.now < seconds:
            self.now, _, act = heapq.heappop(self._events)
            act()
        measured = [each for each in self.ended if each.at > seconds * WARM_UP]
        first = [each.first_at - each.at for each in measured]
        between = [(each.ended_at - each.first_at) / (each.num_output - 1) for each in measured]
        return {
            "requests_per_second": len(measured) / (seconds * (1 - WARM_UP)),
            "cached": sum(each.num_cached for each in measured) / sum(each.num_prompt for each in measured),
            "first_token_p50": median(first),
            "first_token_p95": quantiles(first, n=20)[-1],
            "between_tokens_p50": median(between),
        }

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), act))

    def _pause(self, talk: Talk) -> None:
        mean = 5.0 if self.kind == "chat" else 3.0
        self._at(self.now + self.random.expovariate(1 / mean), lambda: self._ask(talk))

    def _draw_talk(self) -> Talk:
        if self.kind == "documents":
            return Talk(self.random.randrange(NUM_DOCUMENTS), DOCUMENT_TOKENS)
        return Talk(self.random.getrandbits(60), SYSTEM_TOKENS if self.kind == "chat" else 0)

    def _ask(self, talk: Talk) -> None:
        base = {"chat": talk.num_cached_at_most, "documents": DOCUMENT_TOKENS, "single": SYSTEM_TOKENS}[self.kind]
        prefix = Random(talk.key).getrandbits(64) if self.way.has_homes else None
        ticket = Ticket(next(self._numbers), self.now, 1e9, prefix=prefix, home=self.pool.find_home(prefix))
        num_prompt, num_output = base + self.random.randint(50, 300), self.random.randint(50, 300)
        self.asked[ticket] = Asked(talk, num_prompt, num_output, self.now, ticket)
        self.waiting.add(ticket)
        self._match()

    def _match(self) -> None:
        while self.waiting and (places := self.pool.find_places(self.now)):
            ticket = self.waiting.first(places)
            assert ticket is not None
            self.waiting.remove(ticket)
            engine = self.pool.choose(self.now, 0, ticket.prefix)
            assert engine is not None
            ticket.engine = engine
            self._send(self.asked.pop(ticket), self.engines[engine.address])

    def _send(self, asked: Asked, engine: Simulated) -> None:
        talk = asked.talk
        asked.num_cached = engine.count_cached(("system", SYSTEM_TOKENS), (talk.key, talk.num_cached_at_most))
        if self.kind != "chat":
            asked.num_cached = engine.count_cached((talk.key, talk.num_cached_at_most))
        asked.num_left = asked.num_prompt - asked.num_cached
        engine.prefills.append(asked)
        if not engine.busy:
            self._step(engine)

    def _step(self, engine: Simulated) -> None:
        engine.busy = bool(engine.prefills or engine.decodes)
        if engine.busy:
            self._at(self.now + engine.start_step(), lambda: self._end_step(engine))

    def _end_step(self, engine: Simulated) -> None:
        for asked in list(engine.decodes):
            asked.first_at = asked.first_at or self.now
            asked.num_made += 1
            if asked.num_made == asked.num_output:
                engine.decodes.remove(asked)
                self._end(asked, engine)
        self._match()
        self._step(engine)

    def _end(self, asked: Asked, engine: Simulated) -> None:
        asked.ended_at, talk = self.now, asked.talk
        self.ended.append(asked)
        self.pool.release(asked.ticket.bound_engine)
        if self.kind == "chat":
            talk.turn, talk.num_cached_at_most = talk.turn + 1, asked.num_prompt + asked.num_output
            engine.keep("system", SYSTEM_TOKENS)
        engine.keep(talk.key, talk.num_cached_at_most or asked.num_prompt)
        self._pause(talk if self.kind == "chat" and talk.turn < NUM_TURNS else self._draw_talk())


def simulate(kind: str, num_engines: int, num_users: int, way: Way, seconds: float) -> dict[str, float]:
    kept = engine_pool.MAX_HOME_LOAD, waiting.HOME_SECONDS
    if way.has_homes:
        engine_pool.MAX_HOME_LOAD, waiting.HOME_SECONDS = way.max_load, way.overtaking_seconds  # type: ignore[misc]
    try:
        return Simulation(kind, num_engines, 0, way).run(num_users, seconds)
    finally:
        engine_pool.MAX_HOME_LOAD, waiting.HOME_SECONDS = kept  # type: ignore[misc]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench homes", description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="of virtual time (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=4, help="number of engines (default: %(default)s)")
    parser.add_argument(
        "--loads", type=float, nargs="*", default=[engine_pool.MAX_HOME_LOAD], help="highest loads of homes"
    )
    parser.add_argument("--overtaking", type=float, nargs="*", default=[waiting.HOME_SECONDS], help="seconds")
    options = parser.parse_args(arguments)
    ways = [Way(NO_HOMES)] + [
        Way(f"{load:g} x load, {seconds:g} s", load, seconds)
        for load in options.loads
        for seconds in options.overtaking
    ]
    result: dict[str, Any] = {}
    print(
        f"{'':10} {'users':>6} {'way':>20} {'requests/s':>11} {'cached':>7} {'first token p50, p95':>22} {'between':>8}"
    )
    for kind, users in (("chat", (60, 100, 175)), ("documents", (50, 125)), ("single", (40, 100))):
        for per_engine in users:
            for way in ways:
                num_users = per_engine * options.engines
                got = result[f"{kind}, {num_users} users, {way.name}"] = simulate(
                    kind, options.engines, num_users, way, options.seconds
                )
                first = f"{got['first_token_p50'] * 1000:,.0f}, {got['first_token_p95'] * 1000:,.0f} ms"
                print(
                    f"{kind:10} {num_users:6} {way.name:>20} {got['requests_per_second']:11.1f} {got['cached']:7.2f} "
                    f"{first:>22} {got['between_tokens_p50'] * 1000:5.1f} ms",
                    flush=True,
                )
    print(json.dumps({"benchmark": "homes", "engines": options.engines, "results": result}), file=sys.stdout)
    return 0
