"""Tests the budget for retries: what fills it, what empties it, and when a retry is possible again."""

from conveyor_gateway.admission.retries import (
    MAX_RETRIES_AT_ONCE,
    RETRIES_FOR_AN_ANSWER,
    RETRIES_PER_SECOND,
    RetryBudget,
)


def spend_all(budget: RetryBudget, now: float) -> int:
    spent = 0
    while budget.has_one(now):
        budget.spend(now)
        spent += 1
    return spent


def test_a_new_budget_is_full_and_time_fills_an_empty_one_no_further_than_that() -> None:
    budget = RetryBudget(100.0)
    assert spend_all(budget, 100.0) == MAX_RETRIES_AT_ONCE
    assert budget.next_at(100.0) == 100.0 + 1 / RETRIES_PER_SECOND
    assert spend_all(budget, 101.0) == RETRIES_PER_SECOND
    assert spend_all(budget, 1e6) == MAX_RETRIES_AT_ONCE


def test_each_answer_of_an_engine_allows_some_more() -> None:
    budget = RetryBudget(0.0)
    spend_all(budget, 0.0)
    for _ in range(10):
        budget.add_answer()
    assert spend_all(budget, 0.0) == 10 * RETRIES_FOR_AN_ANSWER
