"""Tests figures of answers written by hand, and whether they meet objectives."""

from array import array

import pytest

from conveyor_load.figures import spread, summarise
from conveyor_load.objectives import Objectives
from conveyor_load.sending import Answer


def make(due: float, ttft: float, gap: float, tokens: int = 11, problem: str = "") -> Answer:
    last = due + ttft + gap * (tokens - 1)
    return Answer(due, due, due + ttft, last, 20, tokens, array("f", [gap] * (tokens - 1)), problem)


def test_figures_are_those_of_the_answers() -> None:
    answers = [make(number / 2, 0.1 if number < 19 else 0.9, 0.02) for number in range(20)]
    figures = summarise(answers, 10, Objectives(0.5, 0.04))
    assert figures.offered == pytest.approx(2)
    assert figures.goodput == pytest.approx(2 * 19 / 20)
    assert (figures.ttft.p50, figures.ttft.p95, figures.ttft.p99) == pytest.approx((0.1, 0.1, 0.9))
    assert figures.itl.p95 == pytest.approx(0.02)
    assert figures.latency.p50 == pytest.approx(0.3)
    assert figures.output_tokens == pytest.approx(20 * 11 / (9.5 + 0.9 + 0.2))
    assert not figures.misses(Objectives(0.5, 0.04))
    assert figures.misses(Objectives(0.05, 0.04)) == ["timeToFirstToken P95 100 ms"]
    assert figures.misses(Objectives(latency_seconds=0.2)) == ["latency P95 300 ms"]


def test_failed_requests_miss_every_objective_and_are_reported_by_kind() -> None:
    answers = [make(number, 0.1, 0.01, problem="HTTP 429" if number % 2 else "") for number in range(10)]
    figures = summarise(answers, 10, Objectives(0.5))
    assert figures.problems == (("HTTP 429", 5),)
    assert figures.goodput == pytest.approx(0.5)
    assert figures.misses(Objectives(0.5)) == ["5 of 10 requests failed: HTTP 429 (5)"]
    nothing = summarise([make(0, 1, 1, problem="x"), make(1, 1, 1, problem="x")], 2, Objectives(0.5))
    assert nothing.misses(Objectives(0.5)) == ["2 of 2 requests failed: x (2)"]


def test_an_objective_of_tokens_alone_does_not_hide_a_growing_queue() -> None:
    answers = [make(float(number), 0.1 + number, 0.01) for number in range(10)]
    itl, both = Objectives(itl_seconds=0.04), Objectives(20, 0.04)
    assert summarise(answers, 10, itl).misses(itl) == ["only 50% began before the last request came: the queue grows"]
    assert not summarise(answers, 10, both).misses(both)


def test_percentiles_are_nearest_ranks() -> None:
    assert spread(float(number) for number in range(100, 0, -1)) == (50, 95, 99)
    assert spread([]) == (0, 0, 0)
