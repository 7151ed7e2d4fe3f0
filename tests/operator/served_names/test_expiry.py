"""Tests that names which never served expire, and that names which have served do not."""

import time

from tests.operator.kubelet import Kubelet, ready
from tests.operator.served_names.test_claims import Teams, holders, name, serve, teams, wait_message
from tests.operator.stage import Space, wait_until

from conveyor_api.names import UNSERVED_ANNOTATION
from conveyor_operator.inferenceservice.naming import find_requested_name

__all__ = ["name", "teams"]  # fixtures

SECONDS = 3.0


def start(teams: Teams, seconds: float = SECONDS) -> None:
    namespaces = (teams.a.namespace, teams.b.namespace)
    teams.stage.start(watch_namespaces=namespaces, unserved_name_seconds=seconds)


def find_marks(space: Space) -> dict[str, bool]:
    """Return whether each claim of the namespace has the mark, by name."""
    claims = space.list("ServedName")
    return {each["spec"]["name"]: UNSERVED_ANNOTATION in each["metadata"].get("annotations", {}) for each in claims}


def test_a_name_that_never_served_goes_to_another_team(teams: Teams, name: str) -> None:
    start(teams)
    serve(teams.b, "squat", name)
    wait_message(teams.b, "squat", "True", "NameClaimed")
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")  # after it has expired
    assert holders(teams.a)[name] == teams.a.namespace
    wait_message(teams.b, "squat", "False", "NameTaken")


def test_a_name_that_never_served_and_that_nobody_wants_is_free_again(teams: Teams, name: str) -> None:
    start(teams)
    serve(teams.a, "trial", name)
    wait_message(teams.a, "trial", "True", "NameClaimed")
    teams.a.delete("InferenceService", "trial")
    wait_until("its end", lambda: name not in holders(teams.a))


def test_a_name_that_has_served_does_not_expire(teams: Teams, name: str) -> None:
    start(teams)
    with Kubelet(teams.a, ready):
        serve(teams.a, "good", name)
        teams.a.wait_condition("good", "Ready", "True", "Ready")
        wait_until("the end of the mark", lambda: find_marks(teams.a).get(name) is False)
    teams.a.delete("InferenceService", "good")
    serve(teams.b, "squat", name)
    wait_message(teams.b, "squat", "False", "NameTaken")
    time.sleep(2 * SECONDS)
    assert find_marks(teams.a)[name] is False
    wait_message(teams.b, "squat", "False", "NameTaken")


def test_without_a_limit_and_without_a_mark_names_do_not_expire(teams: Teams, name: str) -> None:
    """Claims of earlier releases have no mark."""
    start(teams, 0)
    serve(teams.a, "trial", name)
    wait_message(teams.a, "trial", "True", "NameClaimed")
    time.sleep(SECONDS)
    assert find_marks(teams.a)[name] is True


def test_only_a_service_that_is_ready_with_its_present_spec_serves_its_name() -> None:
    metadata = {"name": "qwen", "creationTimestamp": "2026-11-30T00:00:00Z", "generation": 2}
    good = {"observedGeneration": 2, "conditions": [{"type": "Ready", "status": "True"}]}
    assert find_requested_name({"metadata": metadata, "status": good}).is_ready
    for status in (
        None,
        {},
        good | {"observedGeneration": 1},
        good | {"conditions": [{"type": "Ready", "status": "False"}]},
    ):
        assert not find_requested_name({"metadata": metadata, "status": status}).is_ready
