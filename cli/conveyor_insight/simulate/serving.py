"""Simulates a service's requests in gateways' queues and in engines. Pure; used by `run`, which has the clock.

The queues work as in gateway/conveyor_gateway/admission, and tests/contract compares the two. Each gateway has a
bounded queue. The first request in a queue goes to the engine that has the fewest requests from this gateway, if the
gateway has a place on that engine. While its batch is not full, an engine accepts every request. Beyond the batch, it
grants places to gateways that ask (the engine's `serving.places`). An engine runs its requests in order, as many at
once as its KV cache holds. If the KV cache holds fewer requests than the batch, the engine reports how many it holds.
Metrics are counted as in metrics/conveyor_metrics.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from conveyor_api.spec import InferenceServiceSpec


@dataclass(slots=True, eq=False)
class Request:
    """One request: its arrival time, its gateway, and how long it will run."""

    arrived_at: float
    gateway: "Gateway"
    seconds: float
    engine: "Engine | None" = None
    is_from_start: bool = False
    """Whether it is at an engine and arrived while no engine was ready."""


@dataclass(slots=True, eq=False)
class Engine:
    """An engine that runs at most `carries` requests at once.

    `was_short`: requests have waited although the batch had room, because the KV cache was full.
    """

    carries: int
    running: int = 0
    was_short: bool = False
    waiting: deque[Request] = field(default_factory=deque)
    line: deque["Gateway"] = field(default_factory=deque)  # gateways that ask for a place

    @property
    def load(self) -> int:
        """The number of requests from all gateways."""
        return self.running + len(self.waiting)


@dataclass(slots=True)
class _Place:
    load: int = 0
    last_chosen: int = 0


class Gateway:
    """One gateway's queue, and its places on the engines that are ready."""

    def __init__(self, place_limit: int) -> None:
        self.queue: deque[Request] = deque()
        self._place_limit = place_limit
        self._places: dict[Engine, _Place] = {}
        self._choices = 0

    def add(self, engine: Engine) -> None:
        self._places[engine] = _Place()

    def remove(self, engine: Engine) -> None:
        """Remove the engine. The engine gets no new requests, and finishes the requests that it has."""
        del self._places[engine]

    def choose(self) -> Engine | None:
        """Take a place on the least loaded engine and return the engine; None if there is no place.

        Among equally loaded engines, the one chosen longest ago wins.
        """
        free = [
            (place, engine)
            for engine, place in self._places.items()
            if place.load < self._place_limit and self not in engine.line
        ]
        if not free:
            return None
        _, engine = min(free, key=lambda pair: (pair[0].load, pair[0].last_chosen))
        self.take(engine)
        return engine

    def take(self, engine: Engine) -> None:
        """Take one place on the engine."""
        self._choices += 1
        self._places[engine].load += 1
        self._places[engine].last_chosen = self._choices

    def release(self, engine: Engine) -> None:
        """Release one place on the engine."""
        if engine in self._places:
            self._places[engine].load -= 1


class Serving:
    """The gateways and engines of one service.

    on_begin: called for each request that begins to run. on_expire: called for each request that waited too long in a
    gateway.
    """

    def __init__(
        self,
        spec: InferenceServiceSpec,
        num_gateways: int,
        on_begin: Callable[[Request], None],
        on_expire: Callable[[Request], None],
    ) -> None:
        self._batch_size = spec.batching.effective_batch_size
        self._place_limit = spec.batching.engine_place_limit
        self._grants = spec.runtime != "VLLM"
        self._max_queued = max(1, spec.queue.max_requests // num_gateways)
        self._timeout_seconds = spec.queue.timeout_seconds
        self._on_begin, self._on_expire = on_begin, on_expire
        self.gateways = [Gateway(self._place_limit) for _ in range(num_gateways)]
        self.engines: list[Engine] = []
        self._draining: list[Engine] = []
        self.in_flight = 0
        self._from_start = 0
        self._started_at = 0.0

    def add_engine(self, now: float, engine: Engine) -> None:
        if not self.engines:
            self._started_at = now
        self.engines.append(engine)
        for gateway in self.gateways:
            gateway.add(engine)
        self._match(now, *self.gateways)

    def remove_engine(self) -> None:
        """Remove the newest engine, as a ReplicaSet does among ready pods. The engine finishes its requests."""
        engine = self.engines.pop()
        self._draining.append(engine)
        engine.line.clear()
        for gateway in self.gateways:
            gateway.remove(engine)

    def admit(self, now: float, request: Request) -> bool:
        """Queue the request. Return whether the queue had room."""
        queue = request.gateway.queue
        queue.append(request)
        self.in_flight += 1
        self._match(now, request.gateway)
        if request.engine is not None or len(queue) <= self._max_queued:
            return True
        queue.pop()
        self.in_flight -= 1
        return False

    def end(self, now: float, request: Request) -> None:
        """Remove a running request that has ended."""
        assert request.engine is not None, "only a running request ends"
        self.in_flight -= 1
        self._from_start -= request.is_from_start
        request.engine.running -= 1
        request.gateway.release(request.engine)
        self._begin(request.engine)
        self._grant(now, request.engine)
        self._match(now, request.gateway)

    def expire(self, now: float) -> None:
        """Fail the requests that have waited too long in any gateway."""
        for gateway in self.gateways:
            self._expire(now, gateway)

    def count_in_flight(self) -> int:
        """Return the requests in flight, scaled by `_count_places`."""
        return self._count_places(self.in_flight)

    def count_from_start(self) -> int:
        """Return the requests at engines that arrived while no engine was ready, scaled by `_count_places`."""
        return self._count_places(self._from_start)

    def count_waiting(self, now: float, beyond_seconds: float) -> int:
        """Return the requests that have waited `beyond_seconds` in a gateway or engine, scaled by `_count_places`."""
        return self._count_places(sum(now - request.arrived_at >= beyond_seconds for request in self._waiting()))

    def _count_places(self, requests: int) -> int:
        """Return requests x batch size / the mean `carries` of engines whose KV cache is the limit, rounded up.

        If there are no such engines, return `requests`.
        """
        engines = (*self.engines, *self._draining)
        carried = [engine.carries for engine in engines if engine.was_short and engine.running]
        return -(-requests * self._batch_size * len(carried) // sum(carried)) if carried else requests

    def _waiting(self) -> Iterator[Request]:
        for holder in (*self.engines, *self._draining):
            yield from holder.waiting
        for gateway in self.gateways:
            yield from gateway.queue

    def _match(self, now: float, *gateways: Gateway) -> None:
        """Send requests that find a place in a batch, then those for which an engine grants an additional place."""
        taken = [engine for gateway in gateways for engine in self._match_batches(now, gateway)]
        for engine in taken:
            self._grant(now, engine)

    def _match_batches(self, now: float, gateway: Gateway) -> list[Engine]:
        """Send the gateway's requests to free places in batches. Return the engines whose `line` the gateway joins."""
        self._expire(now, gateway)
        taken = []
        while gateway.queue and (engine := gateway.choose()) is not None:
            if self._grants and engine.load >= self._batch_size:
                gateway.release(engine)
                engine.line.append(gateway)
                taken.append(engine)
            else:
                self._send(gateway, engine)
        return taken

    def _send(self, gateway: Gateway, engine: Engine) -> None:
        request = gateway.queue.popleft()
        request.engine = engine
        request.is_from_start = request.arrived_at < self._started_at
        self._from_start += request.is_from_start
        engine.waiting.append(request)
        self._begin(engine)

    def _grant(self, now: float, engine: Engine) -> None:
        """Grant the free places to the gateways in `line`. A gateway that has more requests joins `line` again."""
        while engine.line and engine.load < self._place_limit:
            gateway = engine.line.popleft()
            self._expire(now, gateway)
            if gateway.queue:
                gateway.take(engine)
                self._send(gateway, engine)
                if gateway.queue:
                    engine.line.append(gateway)

    def _begin(self, engine: Engine) -> None:
        while engine.waiting and engine.running < engine.carries:
            engine.running += 1
            self._on_begin(engine.waiting.popleft())
        engine.was_short |= bool(engine.waiting) and engine.carries < self._batch_size

    def _expire(self, now: float, gateway: Gateway) -> None:
        while gateway.queue and now - gateway.queue[0].arrived_at >= self._timeout_seconds:
            self.in_flight -= 1
            self._on_expire(gateway.queue.popleft())
