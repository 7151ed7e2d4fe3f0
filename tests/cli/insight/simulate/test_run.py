"""Tests a simulated run: all requests leave it, the operator's own HPA decides, and the figures are right."""

from dataclasses import replace

import pytest

from conveyor_api.autoscaling import Autoscaling
from conveyor_api.spec import Queue
from conveyor_insight.simulate.report import build_table, summarise
from conveyor_insight.simulate.run import Case, Outcome, Run, Sample
from conveyor_insight.simulate.scenarios import PLAIN, build_scenarios
from conveyor_insight.simulate.traces import Arrival, Recorded, burst, diurnal, ramp, read_csv, steady, step


def make_case(trace: Recorded, batch_size: int = 1, **changes: object) -> Case:
    spec = PLAIN.model_copy(
        update={
            "batching": PLAIN.batching.model_copy(update={"max_batch_size": batch_size}),
            "autoscaling": Autoscaling(max_replicas=4),
        }
    )
    return replace(Case("a", spec, trace, gateways=1), **changes)


def at(*seconds: float, runs: float = 10) -> Recorded:
    """Return arrivals at these times, and one at 100 s, which ends the trace."""
    return Recorded((*(Arrival(each, runs) for each in seconds), Arrival(100, runs)))


def test_requests_wait_for_a_place_in_a_running_batch() -> None:
    """An engine that runs one request has two places: the second request waits in it, the third in the gateway."""
    outcome = Run(make_case(at(0, 1, 2)), 0).go()
    assert outcome.waits == [0, 9, 18, 0]
    assert outcome.failed == 0


def test_pods_come_when_they_are_ready() -> None:
    """With three requests in flight, the decision at 15 s asks for three replicas; a second pod takes the third at 35
    s."""
    outcome = Run(make_case(at(0, 1, 2, runs=50), start_seconds=20), 0).go()
    assert [(sample.replicas, sample.ready) for sample in outcome.samples[:4]] == [(3, 1), (3, 1), (3, 3), (3, 3)]
    assert outcome.waits[:2] == [0, 33]
    assert outcome.replica_seconds == sum(sample.replicas * 15 for sample in outcome.samples)


def test_what_waits_too_long_or_finds_the_queue_full_has_failed() -> None:
    case = make_case(at(0, 1, 2, 3, runs=70), start_seconds=1000)
    spec = case.spec.model_copy(update={"queue": Queue(max_requests=1)})
    outcome = Run(replace(case, spec=spec), 0).go()
    assert outcome.failed == 2
    assert sorted(outcome.waits) == [0, 60, 69]


def test_an_engine_runs_what_its_cache_carries() -> None:
    outcome = Run(make_case(at(0, 0, 0), batch_size=8, carries=2), 0).go()
    assert outcome.waits == [0, 0, 10, 0]
    assert outcome.samples[0].queue_depth == 0


def test_fewer_replicas_are_the_newest_ones_fewer() -> None:
    case = make_case(Recorded((*(Arrival(0, 16) for _ in range(4)), Arrival(900, 1))), start_seconds=1)
    outcome = Run(case, 0).go()
    assert [outcome.samples[0].replicas, outcome.samples[30].replicas, outcome.samples[30].ready] == [4, 1, 1]


def test_a_seed_is_one_course_of_events() -> None:
    case = next(build_scenarios())
    short = replace(case, trace=step(0.7, 3, at=100, seconds=400))
    one, same, other = (Run(short, seed).go() for seed in (1, 1, 2))
    assert one.samples == same.samples
    assert one.waits != other.waits


def test_a_request_takes_the_places_of_several_where_the_cache_is_the_limit() -> None:
    """Four in flight, of which two wait, in a batch of 8 of which two run: each request counts as four places."""
    outcome = Run(make_case(at(0, 0, 0, 0, runs=50), batch_size=8, carries=2), 0).go()
    assert (outcome.samples[0].in_flight, outcome.samples[0].queue_depth) == (16, 8)


def test_a_depth_of_what_is_old_leaves_out_what_is_new() -> None:
    old = Run(make_case(at(0, 1, 2), depth_age_seconds=20), 0).go()
    assert [Run(make_case(at(0, 1, 2)), 0).go().samples[0].queue_depth, old.samples[0].queue_depth] == [1, 0]


@pytest.mark.parametrize(
    ("shape", "loads"),
    [
        (steady(2, 60), [2, 2, 2]),
        (step(1, 3, 30, 60), [1, 3, 3]),
        (ramp(1, 3, 0, 60, 60), [1, 2, 3]),
        (burst(1, 3, 20, 20, 60), [1, 3, 1]),
        (diurnal(1, 3, 60, 60), [1, 3, 1]),
    ],
)
def test_the_shapes_of_load(shape: object, loads: list[float]) -> None:
    assert [pytest.approx(shape.load(now)) for now in (0, 30, 60)] == loads  # type: ignore[attr-defined]


def test_arrivals_are_drawn_as_often_as_the_load_says() -> None:
    from random import Random

    drawn = [arrival.at for arrival in step(1, 4, 500, 1000).draw(Random(0), 2.0)]
    assert sum(each < 500 for each in drawn) == pytest.approx(1000, rel=0.1)
    assert sum(each >= 500 for each in drawn) == pytest.approx(4000, rel=0.1)


def test_arrivals_of_a_file_are_seconds_since_the_first() -> None:
    trace = read_csv(["at,seconds", "125,2.5", "105,"])
    assert trace.arrivals == (Arrival(0, None), Arrival(20, 2.5))
    for lines in (
        ["time", "1"],
        ["at"],
        ["at", "soon"],
        ["at", "1", "inf"],
        ["at,seconds", "1,2", "20,-1"],
        ["at", "1"],
    ):
        with pytest.raises(ValueError):
            read_csv(lines)


def test_the_figures_are_the_worst_of_the_seeds() -> None:
    trace = step(1, 2, at=10, seconds=60)
    samples = [Sample(15.0 * look, number, 1, 0, 0) for look, number in enumerate([1, 6, 3, 2], 1)]
    outcomes = [
        Outcome(waits=[float(n) for n in range(100)], failed=1, samples=samples, replica_seconds=180),
        Outcome(waits=[0.0], failed=3, samples=samples[:1], replica_seconds=15),
    ]
    figures = summarise(Case("a", PLAIN, trace), outcomes)
    assert build_table([figures]).splitlines()[-1] == "| a | 6 | 3.0 | 180 | 50.0 | 95.0 | 3 | 20.0 |"
