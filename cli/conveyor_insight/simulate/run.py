"""Simulates one service under one load, from the first request to the last. Pure.

Used by `conveyor_kubectl.simulating`.

Four kinds of events happen in order of time: a request arrives, a request ends, a pod becomes ready, and the
HorizontalPodAutoscaler evaluates. All pods take the same time to become ready, and none fails. The durations of
requests are recorded, or drawn from an exponential distribution. They do not depend on how full the batch is.
With `minReplicas: 0` a run begins at zero, and the first request at zero starts an engine.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median

from conveyor_api import names
from conveyor_api.spec import InferenceServiceSpec
from conveyor_insight.hpa import Controller, Hpa
from conveyor_insight.simulate.serving import Engine, Request, Serving
from conveyor_insight.simulate.traces import Arrival, Trace
from conveyor_metrics.starting import Engines, count_in_flight, count_queue_depth
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler
from conveyor_operator.inferenceservice.replicas import may_sleep
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.loop.owner import Object


@dataclass(frozen=True, slots=True)
class Case:
    """One case to simulate. `carries`: requests that an engine's KV cache holds at once; None for the whole batch.

    depth_age_seconds: only requests that have waited this long count in the queue depth. In Conveyor this time is the
    batching window. A longer time is for experiments, and a shorter one has no effect.
    """

    name: str
    spec: InferenceServiceSpec
    trace: Trace
    start_seconds: float = 120
    request_seconds: float = 20
    carries: int | None = None
    gateways: int = 2
    depth_age_seconds: float = 0

    @property
    def carried(self) -> int:
        """Requests that run at once on one engine."""
        batch_size = self.spec.batching.effective_batch_size
        return batch_size if self.carries is None else min(self.carries, batch_size)


@dataclass(frozen=True, slots=True)
class Sample:
    """The state after one evaluation of the HPA. `at`: in seconds."""

    at: float
    replicas: int
    ready: int
    in_flight: int
    queue_depth: int


@dataclass(slots=True)
class Outcome:
    """The results of a run. `waits`: seconds until each request ran or timed out.

    `failed`: the number of requests that timed out or were rejected. Rejected ones are not in `waits`.
    """

    waits: list[float] = field(default_factory=list)
    failed: int = 0
    samples: list[Sample] = field(default_factory=list)
    replica_seconds: float = 0.0

    @property
    def peak(self) -> int:
        return max(sample.replicas for sample in self.samples)

    def wait(self, share: float) -> float:
        """Return the wait, in seconds, that this share of all queued requests did not exceed; 0 without requests."""
        waits = sorted(self.waits)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

    def settled_seconds(self, changed_at: float | None) -> float | None:
        """Return the seconds from the load's last change until the replicas have settled; None without a change.

        From then on, the replicas differ by at most 1 from their median in the last quarter of the run.
        """
        if changed_at is None:
            return None
        last = median(sample.replicas for sample in self.samples[-len(self.samples) // 4 :])
        away = [sample.at for sample in self.samples if sample.at > changed_at and abs(sample.replicas - last) > 1]
        return away[-1] - changed_at if away else 0.0


class Run:
    """One simulation; `go` runs it."""

    def __init__(self, case: Case, seed: int, controller: Controller = Controller()) -> None:  # noqa: B008  frozen
        self._case = case
        self._pod_starts = PodStarts()
        self._hpa = Hpa(self._build_hpa(), controller)
        self._sync_seconds = controller.sync_period_seconds
        self._random = Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._now = 0.0
        self._starting: list[Engine] = []
        self._serving = Serving(case.spec, case.gateways, self._on_begin, self._on_expire)
        self.replicas = 0 if may_sleep(case.spec) else case.spec.first_replicas
        self._idle_since: float | None = None
        self.outcome = Outcome()

    def go(self) -> Outcome:
        """Run until the trace ends. Requests that still wait then are not counted."""
        case = self._case
        for _ in range(self.replicas):
            self._start(Engine(case.carried))
        self._at(self._sync_seconds, self._look)
        self._expect(case.trace.draw(self._random, case.carried / case.request_seconds))
        while self._events and self._events[0][0] <= case.trace.seconds:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return self.outcome

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._count), happen))

    def _expect(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self._at(arrival.at, lambda: self._on_arrival(arrival, arrivals))

    def _on_arrival(self, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        self._expect(arrivals)
        seconds = arrival.seconds
        if seconds is None:
            seconds = self._random.expovariate(1 / self._case.request_seconds)
        request = Request(self._now, self._random.choice(self._serving.gateways), seconds)
        if not self._serving.admit(self._now, request):
            self.outcome.failed += 1
        elif self.replicas == 0:
            self._scale(self._case.spec.first_replicas)

    def _on_begin(self, request: Request) -> None:
        self.outcome.waits.append(self._now - request.arrived_at)
        self._at(self._now + request.seconds, lambda: self._serving.end(self._now, request))

    def _on_expire(self, request: Request) -> None:
        self.outcome.failed += 1
        self.outcome.waits.append(self._case.spec.queue.timeout_seconds)

    def _look(self) -> None:
        self._serving.expire(self._now)
        if self._is_idle():
            self._scale(0)
        values = self._read()
        desired = self._hpa.look(self._now, self.replicas, values) if self.replicas else 0
        self._scale(desired)
        self.outcome.replica_seconds += desired * self._sync_seconds
        counts = (values[names.IN_FLIGHT_METRIC], values[names.QUEUE_DEPTH_METRIC])
        self.outcome.samples.append(Sample(self._now, desired, len(self._serving.engines), *counts))
        self._at(self._now + self._sync_seconds, self._look)

    def _read(self) -> dict[str, int]:
        """Return the values that the metrics server would return."""
        spec = self._case.spec
        beyond_seconds = max(spec.batching.window_seconds, self._case.depth_age_seconds)
        requests, waiting = self._serving.count_in_flight(), self._serving.count_waiting(self._now, beyond_seconds)
        engines = Engines(
            spec.batching.effective_batch_size,
            len(self._serving.engines),
            len(self._starting),
            self.replicas,
            spec.in_flight_target,
            spec.queue_depth_target,
        )
        return {
            names.IN_FLIGHT_METRIC: count_in_flight(requests, waiting, engines, self._serving.count_from_start()),
            names.QUEUE_DEPTH_METRIC: count_queue_depth(waiting, engines),
        }

    def _is_idle(self) -> bool:
        """Return whether the operator scales to zero: no request for the idle timeout, and no engine starts."""
        timeout_seconds = self._case.spec.autoscaling.idle_timeout_seconds if self._case.spec.autoscaling else None
        if timeout_seconds is None or self._serving.in_flight or self._starting:
            self._idle_since = None
            return False
        self._idle_since = self._now if self._idle_since is None else self._idle_since
        return self._now - self._idle_since >= timeout_seconds

    def _scale(self, desired: int) -> None:
        """Scale as a ReplicaSet does: remove pods that are not ready first, then the newest."""
        for _ in range(desired - self.replicas):
            engine = Engine(self._case.carried)
            self._starting.append(engine)
            self._at(self._now + self._case.start_seconds, partial(self._on_ready, engine))
        for _ in range(self.replicas - desired):
            if self._starting:
                self._starting.pop()
            else:
                self._serving.remove_engine()
        self.replicas = desired

    def _on_ready(self, engine: Engine) -> None:
        if engine in self._starting:
            self._starting.remove(engine)
            self._start(engine)

    def _start(self, engine: Engine) -> None:
        """Start an engine. As the operator does, record how long this took, and update the HPA's scale-up period."""
        self._serving.add_engine(self._now, engine)
        self._pod_starts.add(round(self._case.start_seconds))
        self._hpa.apply(self._build_hpa())

    def _build_hpa(self) -> Object:
        period_seconds = self._pod_starts.choose_period(self._case.spec.queue.timeout_seconds)
        body = build_autoscaler(build_owner("default", "simulated", ""), self._case.spec, period_seconds)
        assert body is not None, "the service is autoscaled"
        return body
