"""Tests which requests ask for more replicas while engines start, over random queues, batches, limits and modes."""

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.operator.builders import make_resource

from conveyor_api import names
from conveyor_insight.hpa import Hpa
from conveyor_metrics.starting import Engines, count_in_flight, count_queue_depth
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler

SYNC_SECONDS = 15
TOLERANCE = 1.1

batchings = st.one_of(
    st.just({"mode": "None"}),
    st.builds(
        lambda mode, size: {"mode": mode, "maxBatchSize": size},
        st.sampled_from(["Static", "Dynamic", "Continuous"]),
        st.integers(1, 256),
    ),
)
requests = st.integers(0, 3000)


class Service:
    """A service and its HPA. `decide` evaluates the HPA once, in a moment with these requests and engines."""

    def __init__(self, batching: dict[str, object], percent: int, most: int) -> None:
        autoscaling = {"maxReplicas": most, "targetUtilizationPercent": percent}
        self.spec = make_resource(batching=batching, autoscaling=autoscaling).settled_spec
        self.batch_size = self.spec.batching.effective_batch_size
        body = build_autoscaler(build_owner("default", "qwen", ""), self.spec, 300)
        assert body is not None
        self._hpa = Hpa(body)
        self._now = 0.0

    def engines(self, ready: int, starting: int, desired: int) -> Engines:
        targets = self.spec.in_flight_target, self.spec.queue_depth_target
        return Engines(self.batch_size, ready, starting, desired, *targets)

    def decide(self, in_flight: int, waiting: int, engines: Engines) -> int:
        self._now += SYNC_SECONDS
        values = {
            names.IN_FLIGHT_METRIC: count_in_flight(in_flight, waiting, engines),
            names.QUEUE_DEPTH_METRIC: count_queue_depth(waiting, engines),
        }
        return self._hpa.look(self._now, engines.desired, values)


services = st.builds(Service, batchings, st.integers(1, 100), st.integers(1, 1000))


@settings(max_examples=40)
@given(services, requests, st.floats(0, 1))
@example(Service({"mode": "Static", "maxBatchSize": 44}, 93, 2), 45, 0.0)  # 45 are within 10 % of the target of 41
def test_from_zero_requests_get_the_engines_whose_batches_hold_them(
    service: Service, queued: int, share: float
) -> None:
    """No engine becomes ready. `share` of the requests has waited longer than the batching window."""
    replicas, needed = 1, min(math.ceil(queued / service.batch_size), service.spec.most_replicas)
    for _ in range(130):
        replicas = service.decide(queued, int(share * queued), service.engines(0, replicas, replicas))
        assert replicas <= max(1, needed)
    assert replicas == needed or queued <= replicas * service.batch_size * TOLERANCE


@given(services, requests, st.floats(0, 1))
def test_pods_that_cannot_start_get_no_others(service: Service, queued: int, share: float) -> None:
    replicas = 1
    for _ in range(10):
        replicas = service.decide(queued, int(share * queued), service.engines(0, 0, replicas))
    assert replicas == 1


@given(services, requests, st.floats(0, 1), st.integers(0, 50), st.integers(0, 50))
def test_starting_engines_never_raise_a_metric(
    service: Service, in_flight: int, share: float, ready: int, starting: int
) -> None:
    waiting, engines = int(share * in_flight), service.engines(ready, starting, ready + starting)
    assert 0 <= count_in_flight(in_flight, waiting, engines) <= in_flight
    assert 0 <= count_queue_depth(waiting, engines) <= waiting


@given(services, requests, st.floats(0, 1), st.integers(1, 50), st.integers(0, 5))
def test_requests_of_ready_engines_count_as_they_are(
    service: Service, in_flight: int, share: float, ready: int, failing: int
) -> None:
    """Pods that fail to start are in `desired` and not in `starting`: a burst on the others is not held back."""
    waiting, engines = int(share * in_flight), service.engines(ready, 0, ready + failing)
    assert (count_in_flight(in_flight, waiting, engines), count_queue_depth(waiting, engines)) == (in_flight, waiting)


@given(services, st.integers(1, 20), st.integers(1, 20), st.integers(0, 1000))
def test_requests_beyond_all_places_scale_as_without_starting_engines(
    service: Service, ready: int, starting: int, beyond: int
) -> None:
    engines = service.engines(ready, starting, ready + starting)
    waiting = engines.starting_places + beyond
    assert count_queue_depth(waiting, engines) == beyond


def test_four_requests_at_zero_are_one_engine_and_nine_are_three() -> None:
    service = Service({"maxBatchSize": 4}, 75, 4)
    for queued, counted, replicas in ((4, (3, 0), 1), (5, (5, 1), 2), (9, (9, 3), 3)):
        engines = service.engines(0, 1, 1)
        assert (count_in_flight(queued, queued, engines), count_queue_depth(queued, engines)) == counted
        assert service.decide(queued, queued, engines) == replicas


def test_an_autoscaler_that_is_not_conveyor_s_gets_what_waits_beyond_the_places() -> None:
    engines = Engines(batch_size=4, ready=0, starting=1, desired=1)
    assert (count_in_flight(9, 9, engines), count_queue_depth(9, engines)) == (9, 5)
