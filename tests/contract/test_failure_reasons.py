"""Tests that the operator knows each reason with which an engine ends, and puts it into the conditions."""

import json
from pathlib import Path

import pytest
from tests.operator.builders import ended, make_pod

from conveyor_api.conditions import ENGINE_FAILURES, MODEL_FAILURES
from conveyor_engine.termination import write_termination_message
from conveyor_operator.inferenceservice.failures import find_failure
from conveyor_protocol.failure_reasons import FailureReason


@pytest.mark.parametrize("reason", FailureReason)
def test_a_reason_that_the_engine_writes_is_one_that_the_user_reads(
    reason: FailureReason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINATION_LOG", str(tmp_path / "log"))
    write_termination_message(reason, "why")
    failure = find_failure(make_pod("pod", ended((tmp_path / "log").read_text())))
    assert failure is not None
    assert (failure.reason, failure.message) == (reason, "why")


def test_a_reason_of_an_engine_of_another_version_is_reported_in_words() -> None:
    failure = find_failure(make_pod("pod", ended(json.dumps({"reason": "Tired", "message": "why"}))))
    assert failure is not None
    assert (failure.reason, failure.message) == (FailureReason.ENGINE_ERROR, "Tired: why")


def test_each_reason_makes_one_condition_false() -> None:
    assert set(FailureReason) == MODEL_FAILURES | ENGINE_FAILURES
    assert not MODEL_FAILURES & ENGINE_FAILURES
