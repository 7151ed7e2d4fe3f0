"""Events tell transitions, once."""

from datetime import UTC, datetime
from typing import Any

from conveyor_operator.events import Transition, build_event, find_transitions


def status(**conditions: tuple[str, str]) -> dict[str, Any]:
    return {
        "conditions": [
            {"type": type, "status": status, "reason": reason, "message": f"about {reason}"}
            for type, (status, reason) in conditions.items()
        ]
    }


def test_a_condition_that_stays_is_no_news() -> None:
    same = status(Ready=("False", "OOMKilled"), Progressing=("True", "RollingOut"))
    assert find_transitions(same, same) == []


def test_a_condition_that_turns_is_news() -> None:
    found = find_transitions(status(Ready=("False", "ModelLoading")), status(Ready=("True", "Ready")))
    assert found == [Transition("Ready", False, "Ready", "about Ready")]


def test_another_reason_is_news_and_a_failure_is_a_warning() -> None:
    found = find_transitions(status(Ready=("False", "ModelLoading")), status(Ready=("False", "OOMKilled")))
    assert found == [Transition("Ready", True, "OOMKilled", "about OOMKilled")]


def test_being_on_the_way_is_no_warning() -> None:
    (found,) = find_transitions(status(Ready=("True", "Ready")), status(Ready=("False", "RollingOut")))
    assert not found.warning


def test_the_first_status_of_a_new_service_is_silent_about_what_is_still_to_come() -> None:
    first = status(Ready=("False", "PodsStarting"), ModelAvailable=("Unknown", "ModelDownloading"))
    assert find_transitions({}, first) == []


def test_the_first_status_speaks_of_what_somebody_must_do() -> None:
    assert find_transitions({}, status(Ready=("False", "ChildRefused")))[0].warning


def test_an_event_speaks_of_the_resource_and_fits_the_api() -> None:
    body = {"metadata": {"name": "qwen", "namespace": "default", "uid": "uid-1"}}
    now = datetime(2026, 11, 21, 8, 0, 0, 123456, tzinfo=UTC)
    event = build_event(body, Transition("Ready", True, "OOMKilled", "x" * 5000), now)
    assert event["regarding"]["uid"] == "uid-1"
    assert event["eventTime"] == "2026-11-21T08:00:00.123456Z"
    assert (event["type"], event["reason"], event["metadata"]["namespace"]) == ("Warning", "OOMKilled", "default")
    assert len(event["note"]) == 1024
    assert event["note"].startswith("Ready: ")
