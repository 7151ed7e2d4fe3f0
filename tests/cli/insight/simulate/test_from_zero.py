"""Tests simulated starts: from zero, and from running engines, compared with metrics that count every request."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor_api import names
from conveyor_api.autoscaling import Autoscaling
from conveyor_insight.simulate.run import Case, Outcome, Run
from conveyor_insight.simulate.scenarios import PLAIN, build_scenarios
from conveyor_insight.simulate.traces import Arrival, Recorded

LATE = 1800.0


class CountsAll(Run):
    """A run whose metrics count every request, although engines start."""

    def _read(self) -> dict[str, int]:
        waiting = self._serving.count_waiting(self._now, 0)
        return {names.IN_FLIGHT_METRIC: self._serving.count_in_flight(), names.QUEUE_DEPTH_METRIC: waiting}


def make_case(requests: int, batch_size: int, fewest: int, most: int, start_seconds: float, runs: float) -> Case:
    spec = PLAIN.model_copy(
        update={
            "batching": PLAIN.batching.model_copy(update={"max_batch_size": batch_size}),
            "queue": PLAIN.queue.model_copy(update={"timeout": "1h", "max_requests": 100_000}),
            "autoscaling": Autoscaling(min_replicas=fewest, max_replicas=most),
        }
    )
    trace = Recorded((*(Arrival(20, runs) for _ in range(requests)), Arrival(LATE, 1)))
    return Case("burst", spec, trace, start_seconds=start_seconds)


def peak_while(outcome: Outcome, ready: int) -> int:
    """Return the most replicas in the samples with at most `ready` ready engines."""
    return max(sample.replicas for sample in outcome.samples if sample.ready <= ready and sample.at < LATE)


@settings(max_examples=20)
@given(
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(1, 60),
    st.sampled_from([40, 120]),
    st.sampled_from([5, 100, 900]),
)
def test_from_zero_a_queue_gets_the_engines_whose_batches_hold_it(
    requests: int, batch_size: int, most: int, start_seconds: float, runs: float
) -> None:
    """Also while the requests run. They fill the batches, of which the target would leave a part free."""
    case = make_case(requests, batch_size, 0, most, start_seconds, runs)
    outcome, needed = Run(case, 0).go(), min(-(-requests // batch_size), most)
    assert peak_while(outcome, ready=0) <= needed
    if peak_while(outcome, ready=0) == needed:  # the policies may allow fewer in one period
        assert outcome.peak == needed
    assert outcome.failed == 0


@settings(max_examples=20)
@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 8), st.integers(8, 60))
def test_a_burst_on_running_engines_is_decided_as_if_none_would_start(
    requests: int, batch_size: int, fewest: int, most: int
) -> None:
    case = make_case(requests, batch_size, fewest, most, start_seconds=120, runs=400)
    now, before = Run(case, 0).go(), CountsAll(case, 0).go()
    assert now.samples[:2] == before.samples[:2], "the decision after the burst"
    assert now.peak <= before.peak


def test_a_half_batch_at_zero_starts_one_engine() -> None:
    case = next(case for case in build_scenarios() if case.name == "from-zero")
    now, before = Run(case, 0).go(), CountsAll(case, 0).go()
    assert (now.peak, before.peak) == (1, 4)
    assert now.waits[:16] == [40.0] * 16
    assert now.samples[-2].replicas == 0, "idle again"


def test_a_service_with_a_minimum_begins_with_it() -> None:
    case = make_case(1, 4, 2, 4, start_seconds=40, runs=5)
    assert Run(replace(case, name="two"), 0).go().samples[0].ready == 2
