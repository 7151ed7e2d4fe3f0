"""Tests that Events report what happened, once."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conveyor_operator.inferenceservice.events import find_events, restored
from conveyor_operator.loop.events import Event


def status(desired: int | None = None, **conditions: tuple[str, str]) -> dict[str, Any]:
    decision = {"desiredReplicas": desired, "message": f"scaled to {desired}"}
    return ({} if desired is None else {"autoscaling": decision}) | {
        "conditions": [
            {"type": type, "status": status, "reason": reason, "message": f"about {reason}"}
            for type, (status, reason) in conditions.items()
        ]
    }


def events_between(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [event.reason for event in find_events(before, after)]


def test_a_condition_that_stays_is_no_news() -> None:
    same = status(Ready=("False", "OOMKilled"), Progressing=("True", "RollingOut"))
    assert find_events(same, same) == []


def test_a_condition_that_turns_is_news() -> None:
    found = find_events(status(Ready=("False", "ModelLoading")), status(Ready=("True", "Ready")))
    assert found == [Event("Ready", "about Ready")]


def test_another_reason_is_news_and_a_failure_is_a_warning() -> None:
    found = find_events(status(Ready=("False", "ModelLoading")), status(Ready=("False", "OOMKilled")))
    assert found == [Event("OOMKilled", "about OOMKilled", warning=True)]


def test_one_cause_is_reported_once_though_all_conditions_turn_for_it() -> None:
    types = ("Ready", "Progressing", "ModelAvailable", "WorkloadReady", "EndpointReady")
    before = status(**dict.fromkeys(types, ("False", "PodsStarting")))
    assert events_between(before, status(**dict.fromkeys(types, ("False", "OOMKilled")))) == ["OOMKilled"]


def test_one_cause_is_reported_once_though_another_condition_turns_for_it_later() -> None:
    before = status(Ready=("False", "ChildRefused"), Progressing=("True", "ChildRefused"))
    assert events_between(before, status(Ready=("False", "ChildRefused"), Progressing=("False", "ChildRefused"))) == []


def test_a_part_that_fails_is_a_warning_and_so_is_the_rest_that_fails_later() -> None:
    partly, wholly = status(Ready=("True", "OOMKilled")), status(Ready=("False", "OOMKilled"))
    assert find_events(status(Ready=("True", "Ready")), partly) == [Event("OOMKilled", "about OOMKilled", warning=True)]
    assert events_between(partly, wholly) == ["OOMKilled"]
    assert events_between(wholly, status(Ready=("True", "Ready"))) == ["Ready"]


def test_an_incident_is_over_when_all_engines_are_back() -> None:
    failing, partly = status(Ready=("False", "OOMKilled")), status(Ready=("True", "PodsStarting"))
    assert events_between(failing, partly) == []
    assert events_between(status(Ready=("True", "OOMKilled")), partly) == []
    assert events_between(partly, status(Ready=("True", "Ready"))) == ["Ready"]


def test_being_on_the_way_is_no_warning() -> None:
    (found,) = find_events(status(Ready=("True", "Ready")), status(Ready=("False", "RollingOut")))
    assert not found.warning


def test_a_rollout_is_reported_at_its_beginning_and_at_its_end() -> None:
    quiet, rolling = status(Progressing=("False", "UpToDate")), status(Progressing=("True", "RollingOut"))
    assert events_between(quiet, rolling) == ["RollingOut"]
    assert events_between(rolling, quiet) == ["UpToDate"]


def test_the_first_pods_are_reported_by_the_event_ready_alone() -> None:
    before = status(Ready=("False", "PodsStarting"), Progressing=("True", "PodsStarting"))
    assert events_between(before, status(Ready=("True", "Ready"), Progressing=("False", "UpToDate"))) == ["Ready"]


def test_the_first_status_of_a_new_service_is_silent_about_what_is_still_to_come() -> None:
    first = status(
        Ready=("False", "PodsStarting"), ModelAvailable=("Unknown", "ModelDownloading"), ScalingReady=("True", "Fixed")
    )
    assert find_events({}, first) == []


def test_the_first_status_speaks_of_what_somebody_must_do() -> None:
    assert find_events({}, status(Ready=("False", "ChildRefused")))[0].warning


def test_each_decision_of_the_autoscaler_is_reported_with_its_arithmetic() -> None:
    up, down = find_events(status(1), status(3)), find_events(status(3), status(1))
    assert (up, down) == ([Event("Scaled", "scaled to 3")], [Event("Scaled", "scaled to 1")])
    assert find_events(status(0), status(3)) == find_events(status(), status(3)) == up, (
        "the first decision it ever took"
    )
    assert find_events(status(3), status()) == []
    first_look = {"autoscaling": {"desiredReplicas": 1, "message": "1 replicas: all is quiet"}}
    assert find_events(status(), first_look) == []


def test_an_autoscaler_that_works_again_is_news_and_one_that_begins_to_work_is_none() -> None:
    works, broken = status(ScalingReady=("True", "ScalingActive")), status(ScalingReady=("False", "MetricsUnavailable"))
    assert events_between(status(ScalingReady=("Unknown", "WaitingForAutoscaler")), works) == []
    assert events_between(works, broken) == ["MetricsUnavailable"]
    assert events_between(broken, works) == ["ScalingActive"]


def test_a_restored_child_names_what_to_change_instead() -> None:
    edited = restored("HorizontalPodAutoscaler", "qwen-engine", deleted=False)
    assert edited.message == (
        "someone edited HorizontalPodAutoscaler qwen-engine, and Conveyor restored it; "
        "change spec.autoscaling of the InferenceService instead"
    )
    assert "someone deleted Service qwen, and Conveyor restored it" in restored("Service", "qwen", deleted=True).message


REASONS = st.sampled_from(["Ready", "RollingOut", "OOMKilled", "ModelLoading", "UpToDate", "GPUsUnused"])
STATUSES = st.builds(
    lambda desired, conditions: status(desired, **conditions),
    st.none() | st.integers(0, 3),
    st.dictionaries(
        st.sampled_from(["Ready", "Progressing", "ModelAvailable", "ScalingReady"]),
        st.tuples(st.sampled_from(["True", "False", "Unknown"]), REASONS),
    ),
)


@given(STATUSES, STATUSES)
def test_no_cause_is_reported_twice(before: dict[str, Any], after: dict[str, Any]) -> None:
    reasons = events_between(before, after)
    assert len(reasons) == len(set(reasons))
