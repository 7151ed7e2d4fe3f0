"""Tests the model of steps' costs, which is fitted to observed steps."""

from random import Random

import pytest

from conveyor_engine.scheduling.step_cost import NUM_STEPS_FRESH, Coefficients, StepCost

TRUE = Coefficients(0.02, 0.001, 0.0001)


def observe(cost: StepCost, number: int, true: Coefficients = TRUE, noise: float = 0.05) -> None:
    random = Random(number)
    for _ in range(number):
        rows, tokens = random.randint(1, 64), random.choice([0, 0, random.randint(1, 512)])
        cost.observe(rows, tokens, true.seconds(rows, tokens) * random.uniform(1 - noise, 1 + noise))


def test_the_terms_are_found_within_a_tenth() -> None:
    cost = StepCost()
    observe(cost, 500)
    cost.fit()
    assert cost.coefficients == pytest.approx(TRUE, rel=0.1)


def test_a_single_slow_step_and_a_frequent_shape_decide_nothing() -> None:
    cost = StepCost()
    observe(cost, 500)
    for _ in range(5000):
        cost.observe(3, 0, TRUE.seconds(3, 0))
    cost.observe(40, 300, 60.0)
    observe(cost, 100)
    cost.fit()
    assert cost.coefficients == pytest.approx(TRUE, rel=0.15)


def test_a_term_that_would_be_negative_is_left_out() -> None:
    """A step with more rows was cheaper, so the cost of a row is 0."""
    cost = StepCost()
    for rows, seconds in ((1, 0.03), (2, 0.029), (64, 0.02)):
        cost.observe(rows, 0, seconds)
    cost.fit()
    assert cost.coefficients is not None
    assert cost.coefficients.per_row == 0
    assert min(cost.coefficients) >= 0


def test_nothing_is_known_before_a_step() -> None:
    cost = StepCost()
    cost.fit()
    assert cost.coefficients is None


def test_what_steps_cost_may_change() -> None:
    """Shapes that no longer occur are forgotten, and each fit moves the model by an eighth of the difference."""
    cost, slower = StepCost(), Coefficients(0.04, 0.002, 0.0002)
    observe(cost, 500)
    cost.fit()
    observe(cost, NUM_STEPS_FRESH + 1, slower)
    cost.fit()
    assert cost.coefficients is not None
    assert TRUE.base < cost.coefficients.base < 1.25 * TRUE.base
    for _ in range(40):
        cost.fit()
    assert cost.coefficients == pytest.approx(slower, rel=0.15)
