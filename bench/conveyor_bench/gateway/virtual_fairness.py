"""Runs the gateway's queue in virtual time, with an engine that a cost for each step and token describes.

Used by `fairness`. One client floods the service with long requests, and others chat. The results are the same on every
machine.
"""

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from conveyor_gateway.admission.limits import QueueLimits
from conveyor_gateway.admission.place_queries import PlaceQueries
from conveyor_gateway.admission.queues import KEPT_PART
from conveyor_gateway.admission.served_tokens import weigh
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket, TicketState, Work
from conveyor_load.percentiles import percentile

# Of a model with 8 billion weights on a GPU with 3.35 TB/s, about: the weights are read in each step.
STEP_SECONDS: Final = 0.008
TOKEN_SECONDS: Final = 0.00003
STEP_TOKENS: Final = 2048
FLOOD: Final = "flood"
_FAR: Final = 1e12


@dataclass(frozen=True, slots=True)
class Traffic:
    """The clients. A chat client sends its next request a while after each answer; the flood sends it at once."""

    batch_size: int = 64
    chats: int = 9
    chat_prompt: int = 1500
    chat_answer: int = 100
    think_seconds: float = 3.0
    flood_requests: int = 300  # that wait or run at any time
    flood_prompt: int = 500
    flood_answer: int = 1024
    seconds: float = 300.0
    skipped_seconds: float = 60.0  # at the beginning


@dataclass(slots=True)
class Outcome:
    """What was measured, in seconds of virtual time."""

    first_token_seconds: list[float] = field(default_factory=list)  # of chats
    served: float = 0.0  # tokens of all clients, weighed as the counters do
    seconds: float = 0.0

    @property
    def p95(self) -> float:
        return percentile(self.first_token_seconds, 95)


@dataclass(slots=True, eq=False)
class _Request:
    client: str
    ticket: Ticket
    sent_at: float
    prompt_left: int
    answer: int
    num_answered: int = 0


class Run:
    """One run. Without `by_client`, all requests are of one client, so they go in order of arrival."""

    def __init__(self, traffic: Traffic, *, has_flood: bool, by_client: bool) -> None:
        self._traffic = traffic
        self._has_flood = has_flood
        self._by_client = by_client
        self._random = random.Random(1)
        self._now = 0.0
        self._loop = asyncio.new_event_loop()
        self._loop.time = lambda: self._now  # type: ignore[method-assign]
        size = traffic.batch_size
        beyond = max(1, size // 8)
        limits = QueueLimits(100_000, _FAR, size + beyond, num_beyond=beyond, most_kept=max(1, size // KEPT_PART))
        self._queue = ServiceQueue(limits, self._loop, _NoQueries())
        self._queue.set_engines(["engine:1"])
        self._at_engine: deque[_Request] = deque()  # those that run, and then those beyond the batch
        self._thinking = [(self._think(), f"chat-{number}") for number in range(traffic.chats)]

    def run(self) -> Outcome:
        outcome = Outcome()
        try:
            for _ in range(self._traffic.flood_requests * self._has_flood):
                self._send_flood()
            while self._now < self._traffic.seconds:
                self._arrive()
                self._step(outcome)
        finally:
            self._loop.close()
        return outcome

    def _think(self) -> float:
        return self._now + self._random.expovariate(1 / self._traffic.think_seconds)

    def _arrive(self) -> None:
        """Send the chats that are due, in their order, and take what has got a place."""
        traffic = self._traffic
        if not self._at_engine:
            self._now = max(self._now, min(self._thinking)[0])
        due = sorted(each for each in self._thinking if each[0] <= self._now)
        self._thinking = [each for each in self._thinking if each[0] > self._now]
        step_end = self._now
        for at, client in due:
            self._now = at
            self._send(client, traffic.chat_prompt, self._random.randint(1, 2 * traffic.chat_answer))
        self._now = step_end
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()  # one turn

    def _send_flood(self) -> None:
        answer = self._traffic.flood_answer
        self._send(FLOOD, self._traffic.flood_prompt, self._random.randint(answer // 2, answer * 3 // 2))

    def _send(self, client: str, prompt: int, answer: int) -> None:
        work = Work(prompt, 4096)
        ticket = self._queue.admit(_FAR, client=client if self._by_client else "", work=work)
        request = _Request(client, ticket, self._now, prompt, answer)
        if ticket.state is TicketState.DISPATCHED:
            self._at_engine.append(request)
        else:
            ticket.turn = self._loop.create_future()
            ticket.turn.add_done_callback(lambda turn: self._at_engine.append(request))

    def _step(self, outcome: Outcome) -> None:
        """Compute a token of each row, and chunks of prompts in what is left of a step's tokens."""
        rows = [each for each, _ in zip(self._at_engine, range(self._traffic.batch_size), strict=False)]
        budget = left = STEP_TOKENS - sum(not each.prompt_left for each in rows)
        tokens, decoding = STEP_TOKENS - left, list[_Request]()
        for each in rows:
            chunk = min(each.prompt_left, left)
            each.prompt_left, left, tokens = each.prompt_left - chunk, left - chunk, tokens + chunk
            if not each.prompt_left:
                decoding.append(each)
        began = self._now
        self._now += STEP_SECONDS + TOKEN_SECONDS * tokens
        counts = began >= self._traffic.skipped_seconds
        outcome.seconds += (self._now - began) * counts
        outcome.served += (tokens - (STEP_TOKENS - budget)) * counts
        for each in decoding:
            self._decode(each, outcome, counts)

    def _decode(self, request: _Request, outcome: Outcome, counts: bool) -> None:
        is_chat = request.client != FLOOD
        if counts:
            outcome.served += weigh(0, 1)
            if is_chat and not request.num_answered:
                outcome.first_token_seconds.append(self._now - request.sent_at)
        request.num_answered += 1
        if request.num_answered < request.answer:
            return
        self._at_engine.remove(request)
        self._queue.finish(request.ticket, Work(request.ticket.work.prompt_tokens, request.answer))
        if is_chat:
            self._thinking.append((self._think(), request.client))
        else:
            self._send_flood()


class _NoQueries(PlaceQueries):
    """The engine has a place for each request that the gateway sends, so it is never queried."""

    def __init__(self) -> None:
        pass


def compare(traffic: Traffic) -> dict[str, float]:
    """Return the chats' P95 of the time to the first token, and the throughput, in ratios."""
    alone = Run(traffic, has_flood=False, by_client=True).run()
    fair = Run(traffic, has_flood=True, by_client=True).run()
    unfair = Run(traffic, has_flood=True, by_client=False).run()
    return {
        "alone_p95_seconds": alone.p95,
        "fair_p95_seconds": fair.p95,
        "unfair_p95_seconds": unfair.p95,
        "p95_ratio": fair.p95 / alone.p95,
        "throughput_ratio": (fair.served / fair.seconds) / (unfair.served / unfair.seconds),
    }
