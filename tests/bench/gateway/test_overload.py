"""Runs docs/measuring.md's command for overload."""

import json

import pytest
from tests.bench.commands import run

from conveyor_bench.gateway.overload import judge

GOOD = {
    "goodput_at_capacity": 20.0,
    "goodput_at_ten_times": 19.0,
    "statuses": {200: 10, 429: 90},
    "best_statuses": {200: 3},
    "answer_seconds": 0.4,
    "best_first_token_p99_seconds": 0.5,
    "token_milliseconds_of_its_own": 2.0,
    "token_milliseconds_in_overload": 2.1,
}


@pytest.mark.parametrize(
    "missed",
    [
        {"goodput_at_ten_times": 17.0},
        {"statuses": {200: 10, 503: 1}},
        {"best_statuses": {200: 3, 429: 1}},
        {"best_first_token_p99_seconds": 0.9},
        {"token_milliseconds_in_overload": 2.5},
    ],
    ids=lambda missed: next(iter(missed)),
)
def test_each_bar_may_be_missed(missed: dict[str, object]) -> None:
    assert all(judge(GOOD).values())
    assert list(judge(GOOD | missed).values()).count(False) == 1


@pytest.mark.nightly
def test_ten_times_the_load_is_answered_or_refused() -> None:
    result = json.loads(run("overload", "--seconds 2 --tokens 50").splitlines()[-1])
    assert set(result["statuses"]) <= {"200", "429"}
    assert result["statuses"]["429"] > result["statuses"]["200"] > 0
