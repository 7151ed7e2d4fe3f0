"""Tests objectives together with the autoscaler: each reacts to the other, and neither makes the other oscillate."""

import pytest

from conveyor_bench.objectives.fleet import count_turns, run_fleet

OBJECTIVE = 0.1


def test_a_turn_is_a_change_of_direction() -> None:
    assert count_turns([1, 1, 4, 4, 8]) == 0
    assert count_turns([1, 4, 4, 2, 2, 3]) == 2


@pytest.mark.nightly
def test_limits_that_move_add_no_turn_to_the_replicas() -> None:
    moved, fixed = (run_fleet("step", 400, limit) for limit in (OBJECTIVE, None))
    assert moved.turns <= fixed.turns
    assert moved.p95_between <= 1.1 * OBJECTIVE < fixed.p95_between
    assert any(min(look.rows) < 64 for look in moved.looks), "the limits did move"
    assert any(look.counted > 2 * look.in_flight > 0 for look in moved.looks), "and the metric told it"
