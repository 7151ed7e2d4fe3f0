"""Tests which candidates a spec has, and what a patch of it contains."""

import pytest

from conveyor_api.batching import Batching
from conveyor_insight.tuning.candidates import Candidate, make_plan


def test_without_given_limits_the_limits_around_the_current_one_are_tried() -> None:
    plan = make_plan(Batching(), "Generate", [], [], [])
    assert plan.current == Candidate(32)
    assert [str(axis) for axis in plan.axes] == ["maxBatchSize 16, 64, 128"]
    assert plan.most_candidates == 4


def test_a_mode_with_a_window_has_it_tried_and_a_patch_names_the_mode() -> None:
    plan = make_plan(Batching(), "Embed", [64], [], [])
    assert [str(axis) for axis in plan.axes] == ["maxBatchSize 64", "window 5ms, 20ms, 40ms"]
    assert plan.build_fields(Candidate(32, "20ms")) == {"window": "20ms", "mode": "Dynamic"}
    assert plan.build_fields(Candidate(64, "10ms")) == {"maxBatchSize": 64}
    named = make_plan(Batching(mode="Dynamic"), "Embed", [64], [], [])
    assert named.build_fields(Candidate(32, "20ms")) == {"window": "20ms"}


def test_step_budgets_are_tried_where_somebody_names_them_and_never_below_the_limit() -> None:
    given = Batching(max_batch_tokens=48)
    plan = make_plan(given, "Generate", [], [], [])
    assert [str(axis) for axis in plan.axes] == ["maxBatchSize 16, 64, 128", "maxBatchTokens 24, 96, 192"]
    assert plan.axes[0].vary(plan.current) == [Candidate(16, None, 48)]
    assert [candidate.max_batch_tokens for candidate in plan.axes[1].vary(plan.current)] == [96, 192]


def test_a_given_limit_that_could_not_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 512 needs as many tokens a step, and maxBatchTokens is 256"):
        make_plan(Batching(max_batch_tokens=256), "Generate", [8, 512], [], [])


def test_what_a_mode_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="one request at a time"):
        make_plan(Batching(mode="None"), "Generate", [], [], [])
    with pytest.raises(ValueError, match="mode Continuous has no window"):
        make_plan(Batching(), "Generate", [], ["5ms"], [])
    with pytest.raises(ValueError, match="101 settings are too many: at most 32"):
        make_plan(Batching(), "Generate", list(range(1, 101)), [], [])
