"""Tests the order in which settings and rates are tried, and which setting is chosen."""

import pytest
from tests.cli.insight.tuning.service import Arithmetic

from conveyor_api.batching import Batching
from conveyor_insight.tuning.candidates import Candidate, Plan, make_plan
from conveyor_insight.tuning.sweep import MAX_TRIALS, Result, Sweep, choose
from conveyor_load.objectives import Objectives

LIMIT = Objectives(latency_seconds=1)


async def sweep(service: Arithmetic, plan: Plan, *rates: float) -> list[Result]:
    results: list[Result] = []
    await Sweep(LIMIT, service.measure, rates).go(service, plan, results)
    return results


def make(*sizes: int, **spec: object) -> Plan:
    return make_plan(Batching.model_validate({"maxBatchSize": 8, **spec}), "Generate", sizes, [], [])


async def test_the_highest_rate_within_the_objectives_is_found_within_a_fifth() -> None:
    for capacity in (0.3, 1.0, 7.0, 50.0):
        service = Arithmetic({Candidate(8): capacity})
        (result,) = await sweep(service, make(8))
        assert result.best is not None
        assert capacity / 1.2 < result.best.rate <= capacity
        assert len(result.trials) <= MAX_TRIALS


async def test_given_rates_are_tried_until_the_first_that_misses() -> None:
    service = Arithmetic({Candidate(8): 3})
    (result,) = await sweep(service, make(8), 4, 2, 8)
    assert service.measured == [(8, 2), (8, 4)]
    assert result.trials[1].misses == ("latency P95 5000 ms",)
    assert result.goodput == 2


async def test_the_current_setting_comes_first_and_the_next_begins_at_the_best_rate() -> None:
    service = Arithmetic({Candidate(8): 4, Candidate(16): 8, Candidate(4): 2})
    results = await sweep(service, make(4, 16))
    assert [each.max_batch_size for each in service.applied] == [8, 4, 16]
    firsts = {size: next(rate for other, rate in service.measured if other == size) for size in (8, 4, 16)}
    assert firsts == {8: 1, 4: 4, 16: 4}
    assert choose(results, Candidate(8)).candidate == Candidate(16)


async def test_the_next_field_is_tried_at_the_best_of_the_one_before() -> None:
    capacity = {Candidate(8, None, 64): 4.0, Candidate(16, None, 64): 8.0, Candidate(16, None, 128): 16.0}
    service = Arithmetic(capacity)
    plan = make_plan(Batching(max_batch_size=8, max_batch_tokens=64), "Generate", [16], [], [128])
    results = await sweep(service, plan)
    assert service.applied == list(capacity)
    assert choose(results, plan.current).candidate == Candidate(16, None, 128)


async def test_a_setting_that_does_not_run_is_reported_and_the_others_are_tried() -> None:
    service = Arithmetic({Candidate(8): 4, Candidate(16): 8})
    results = await sweep(service, make(1024, 16))
    assert [result.problem for result in results] == ["", "KVBudgetTooSmall: raise it", ""]
    assert choose(results, Candidate(8)).candidate == Candidate(16)


@pytest.mark.parametrize(
    ("capacity", "chosen"),
    [
        ({8: 10, 16: 10.4}, 8),  # the current one, within 5 % of the best
        ({8: 10, 16: 12}, 16),
        ({8: 1, 16: 10, 32: 10.2}, 16),  # the smaller of two similar ones
    ],
)
async def test_a_change_must_be_worth_it(capacity: dict[int, float], chosen: int) -> None:
    service = Arithmetic({Candidate(size): most for size, most in capacity.items()})
    results = await sweep(service, make(*capacity), *(number / 10 for number in range(8, 130, 2)))
    assert choose(results, Candidate(8)).candidate.max_batch_size == chosen
