"""Every condition and reason is explained, and what the engine may say has a condition to falsify."""

from conveyor_api.conditions import (
    CONDITION_MEANINGS,
    ENGINE_FAILURES,
    MODEL_FAILURES,
    REASON_MEANINGS,
    REASONS_BY_CONDITION,
    ConditionType,
    Reason,
)


def test_every_condition_and_reason_has_a_meaning() -> None:
    assert set(CONDITION_MEANINGS) == set(REASONS_BY_CONDITION) == set(ConditionType)
    assert set(REASON_MEANINGS) == set(Reason)


def test_every_reason_belongs_to_a_condition() -> None:
    assert set().union(*REASONS_BY_CONDITION.values()) == set(Reason)


def test_reasons_are_words_that_kubernetes_accepts() -> None:
    assert all(reason.isalnum() and reason[0].isupper() for reason in Reason)


def test_what_the_engine_says_falsifies_one_condition() -> None:
    assert not MODEL_FAILURES & ENGINE_FAILURES
    assert set(REASONS_BY_CONDITION[ConditionType.MODEL_AVAILABLE]) >= MODEL_FAILURES
    assert set(REASONS_BY_CONDITION[ConditionType.WORKLOAD_READY]) >= ENGINE_FAILURES
