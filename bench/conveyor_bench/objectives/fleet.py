"""Runs objectives and the HorizontalPodAutoscaler together, in virtual time. Used by `command` and tests.

Each engine is the product's core with its own steering. The HPA has the manifest that the operator writes, and is
evaluated as Kubernetes does (`conveyor_insight.hpa`). Engines and HPA are linked only by the metric, which
`conveyor_metrics` sums from what the engines report. One gateway sends each request, in order of arrival, to the engine
with the fewest requests. An engine gets at most as many requests as its limit of rows.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_bench.modes.figures import percentile
from conveyor_bench.modes.running import VirtualClock, VirtualExecutor
from conveyor_bench.objectives.compared import Felt
from conveyor_bench.objectives.shapes import SHAPES, Scale, draw_requests
from conveyor_bench.objectives.virtual import (
    DECLARED,
    REQUESTS_PER_SECOND,
    VOCABULARY,
    System,
    build_config,
    build_facts,
)
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import EngineRequest
from conveyor_insight.hpa import Hpa
from conveyor_metrics.demand import sum_demand
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_protocol.pages import Demand, EngineDemand, ServiceDemand

TICK_SECONDS: Final = 0.05
LOOK_SECONDS: Final = 15.0  # between two evaluations of the HPA
START_SECONDS: Final = 60.0  # until a new pod is ready
_SERVICE: Final = "default/simulated"


@dataclass(frozen=True, slots=True)
class Look:
    """The state after an evaluation of the HPA. rows: the limit of each engine."""

    at: float
    replicas: int
    rows: list[int]
    in_flight: int
    counted: int  # the value of the metric: `in_flight`, converted to places in full batches


class _Node:
    """An engine with its own clock."""

    def __init__(self, system: System, ready_at: float, num_requests: int) -> None:
        self.ready_at, self._clock, self.felt = ready_at, VirtualClock(), Felt()
        self._clock.wait_until(ready_at)
        executor = VirtualExecutor(build_facts(system), system.cost, self._clock)
        config = build_config(system, num_requests)
        self.core = EngineCore(config, executor, self.felt.lines.append, clock=self._clock.now)
        self._arrivals: dict[str, float] = {}

    @property
    def rows(self) -> int:
        return self.core.stats().capacity or DECLARED[0]

    @property
    def load(self) -> int:
        return len(self._arrivals)

    def add(self, request: EngineRequest, now: float) -> None:
        self._clock.wait_until(now)
        self._arrivals[request.request_id] = now
        self.core.add_request(request)

    def run_until(self, then: float) -> None:
        while self._clock.now() < then and self.core.has_unfinished():
            outputs = self.core.step(self._clock.now())
            self.felt.add(outputs, self._arrivals, self._clock.now())
            for output in outputs:
                if output.finish_reason is not None:
                    del self._arrivals[output.request_id]


class Fleet:
    """A service with several engines and an HPA. `go` runs the simulation."""

    def __init__(self, objective: float | None, max_replicas: int) -> None:
        """`objective`: seconds between two tokens; None: the limits are fixed."""
        self._system = System(inter_token_latency=objective)
        batching: dict[str, object] = {"mode": "Continuous", "maxBatchSize": DECLARED[0]}
        if objective is not None:
            batching["objectives"] = {"interTokenLatency": f"{round(objective * 1000)}ms"}
        spec = {"model": {"uri": "hf://Qwen/Qwen3-0.6B"}, "batching": batching}
        spec["autoscaling"] = {"maxReplicas": max_replicas}
        service = InferenceService.parse({"metadata": {"namespace": "default", "name": "simulated"}, "spec": spec})
        starts = PodStarts()
        starts.add(round(START_SECONDS))
        period_seconds = starts.choose_period(service.spec.queue.timeout_seconds)
        body = build_autoscaler(build_owner("default", "simulated", ""), service.spec, period_seconds)
        assert body is not None, "the service is autoscaled"
        self._hpa = Hpa(body)
        self._nodes: list[_Node] = []
        self._draining: list[_Node] = []
        self._queue = deque[EngineRequest]()

    def go(self, requests: Sequence[EngineRequest]) -> Iterator[Look]:
        """Run until the last request arrives, and evaluate the HPA periodically. Requests are in order of arrival."""
        self._num_requests = len(requests)
        self._scale(1, -START_SECONDS)
        pending = deque(requests)
        now, next_look = 0.0, LOOK_SECONDS
        while pending:
            now += TICK_SECONDS
            while pending and pending[0].arrival_time <= now:
                self._queue.append(pending.popleft())
            self._match(now)
            for node in (*self._nodes, *self._draining):
                node.run_until(now)
            if now >= next_look:
                next_look += LOOK_SECONDS
                yield self._look(now)

    @property
    def felt(self) -> Iterator[Felt]:
        """Return the latencies of each engine, including removed engines."""
        return (node.felt for node in (*self._nodes, *self._draining))

    def _match(self, now: float) -> None:
        ready = [node for node in self._nodes if node.ready_at <= now]
        while self._queue:
            free = [node for node in ready if node.load < node.rows]
            if not free:
                return
            min(free, key=lambda node: node.load).add(self._queue.popleft(), now)

    def _look(self, now: float) -> Look:
        in_flight = len(self._queue) + sum(node.load for node in (*self._nodes, *self._draining))
        total = sum_demand(_SERVICE, [Demand({_SERVICE: self._demand(in_flight)})])
        values = {names.IN_FLIGHT_METRIC: total.in_flight, names.QUEUE_DEPTH_METRIC: total.queue_depth}
        self._scale(self._hpa.look(now, len(self._nodes), values), now)
        return Look(now, len(self._nodes), [node.rows for node in self._nodes], in_flight, total.in_flight)

    def _demand(self, in_flight: int) -> ServiceDemand:
        engines = {
            str(number): EngineDemand(node.load, 0, node.core.stats().capacity)
            for number, node in enumerate((*self._nodes, *self._draining))
            if node.load
        }
        return ServiceDemand(in_flight, len(self._queue), batch_size=DECLARED[0], engines=engines)

    def _scale(self, desired: int, now: float) -> None:
        """Set the number of engines. If there are too many, the newest ones are removed."""
        for _ in range(desired - len(self._nodes)):
            self._nodes.append(_Node(self._system, now + START_SECONDS, self._num_requests))
        for _ in range(len(self._nodes) - desired):
            self._draining.append(self._nodes.pop())


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A run of a fleet; `objective` None: fixed limits."""

    name: str
    objective: float | None
    looks: list[Look]
    p95_between: float  # seconds

    @property
    def turns(self) -> int:
        return count_turns([look.replicas for look in self.looks])

    def describe(self) -> str:
        """Return a line of figures."""
        limits = "fixed" if self.objective is None else "objective"
        replicas = [look.replicas for look in self.looks]
        return (
            f"shape={self.name} limits={limits} turns={self.turns} most_replicas={max(replicas)} "
            f"replica_minutes={sum(replicas) * LOOK_SECONDS / 60:.0f} p95_ms={self.p95_between * 1000:.0f} "
            f"most_in_flight={max(look.in_flight for look in self.looks)}"
        )


def run_fleet(name: str, seconds: float, objective: float | None) -> FleetRun:
    """Run one of `SHAPES` with three times the traffic of one engine."""
    scale = Scale(3 * REQUESTS_PER_SECOND, seconds)
    fleet = Fleet(objective, max_replicas=16)
    looks = list(fleet.go(draw_requests(SHAPES[name], scale, 1, VOCABULARY)))
    between = [each for felt in fleet.felt for each in felt.between]
    return FleetRun(name, objective, looks, percentile(between, 95))


def count_turns(replicas: Sequence[int]) -> int:
    """Return how often the replicas went from growing to shrinking, or the reverse."""
    changes = [after - before for before, after in pairwise(replicas) if after != before]
    return sum((one > 0) != (other > 0) for one, other in pairwise(changes))
