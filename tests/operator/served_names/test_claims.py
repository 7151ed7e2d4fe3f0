"""Tests served names on a real API server: who gets a name, who keeps it, and how it becomes free again."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.operator.api_proxy import ApiProxy
from tests.operator.stage import Json, RunningOperator, Space, Stage, build_settings, make_service, wait_until

from conveyor_api.names import MAX_SERVED_NAMES
from conveyor_api.served_name import build_served_name, root_name
from e2e.cluster.api import Api, ApiError
from e2e.cluster.definitions import claim_name

MODEL = {"uri": "hf://org/model"}


class Teams:
    """Two namespaces of an installation, and its operator."""

    def __init__(self, a: Space, b: Space, stage: Stage) -> None:
        self.a = a
        self.b = b
        self.stage = stage

    def start(self) -> RunningOperator:
        return self.stage.start(watch_namespaces=(self.a.namespace, self.b.namespace))


@pytest.fixture
def teams(space: Space, api: Api, proxy: ApiProxy, tmp_path: Path) -> Iterator[Teams]:
    other = Space(api, f"{space.namespace}-b")
    api.create("/api/v1/namespaces", {"metadata": {"name": other.namespace}})
    stage = Stage(space, proxy, build_settings(space, proxy, tmp_path))
    yield Teams(space, other, stage)
    stage.close()


@pytest.fixture
def name() -> str:
    """A served name that no other test has claimed."""
    return f"Org/Llama-{uuid4().hex[:8]}"


def serve(space: Space, service: str, name: str) -> Json:
    return space.make_service(service, model=MODEL | {"name": name})


def holders(*spaces: Space) -> dict[str, str]:
    """Return the namespaces by served name. The served name of a service without one is the name in its metadata."""
    return {claim["spec"]["name"]: space.namespace for space in spaces for claim in space.list("ServedName")}


def wait_message(space: Space, service: str, status: str, reason: str) -> str:
    return str(space.wait_condition(service, "NameClaimed", status, reason, 60)["message"])


def list_events(space: Space, reason: str) -> list[tuple[str, str, str]]:
    found = [event for event in space.list("Event") if event["reason"] == reason]
    return [(each["involvedObject"]["name"], each["type"], each["message"]) for each in found]


def test_the_first_service_claims_a_name_and_the_status_of_a_later_one_says_that_it_is_taken(
    teams: Teams, name: str
) -> None:
    teams.start()
    serve(teams.a, "good", name)
    text = wait_message(teams.a, "good", "True", "NameClaimed")
    assert text == f"at the gateway's root, clients set model to {name!r}"
    serve(teams.b, "squat", name)
    text = wait_message(teams.b, "squat", "False", "NameTaken")
    assert f"the name {name!r} is already taken" in text
    assert f"clients set model to '{teams.b.namespace}/squat'" in text
    ((service, type, message),) = wait_until("its Event", lambda: list_events(teams.b, "NameTaken"))
    assert (service, type, message) == ("squat", "Warning", text)
    everything = json.dumps([*teams.b.list("Event"), *teams.b.list("InferenceService")])
    assert "good" not in everything
    assert f'"{teams.a.namespace}"' not in everything
    assert holders(teams.a, teams.b) == {name: teams.a.namespace}


def test_an_older_service_of_another_team_does_not_get_a_name_by_taking_it_on(teams: Teams, name: str) -> None:
    teams.start()
    serve(teams.b, "old", f"{name}-old")
    wait_message(teams.b, "old", "True", "NameClaimed")
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")
    teams.b.edit("old", model={"name": name})
    wait_message(teams.b, "old", "False", "NameTaken")
    assert holders(teams.a)[name] == teams.a.namespace
    teams.b.edit("old", model={"name": f"{name}-old"})
    wait_message(teams.b, "old", "True", "NameClaimed")


@pytest.mark.parametrize("operator_runs", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_name_outlives_its_service_whether_or_not_an_operator_sees_it_go(
    teams: Teams, name: str, operator_runs: bool
) -> None:
    life = teams.start()
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")
    serve(teams.b, "squat", name)
    wait_message(teams.b, "squat", "False", "NameTaken")
    if not operator_runs:
        life.stop()
    teams.a.delete("InferenceService", "good")
    serve(teams.a, "later", name)
    if not operator_runs:
        teams.start()
    wait_message(teams.a, "later", "True", "NameClaimed")
    assert holders(teams.a, teams.b) == {name: teams.a.namespace}
    assert teams.b.condition("squat", "NameClaimed")["reason"] == "NameTaken"


def test_a_released_name_goes_to_the_service_that_waits_for_it_and_both_get_an_event(teams: Teams, name: str) -> None:
    teams.start()
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")
    serve(teams.b, "squat", name)
    wait_message(teams.b, "squat", "False", "NameTaken")
    teams.a.edit("good", model={"name": f"{name}-2"})
    wait_until("another name", lambda: f"{name}-2" in teams.a.condition("good", "NameClaimed")["message"])
    assert holders(teams.a, teams.b)[name] == teams.a.namespace, "an edit releases nothing"
    release(teams.a, name)
    wait_message(teams.b, "squat", "True", "NameClaimed")
    assert holders(teams.a, teams.b)[name] == teams.b.namespace
    ((_, type, message),) = wait_until("its Event", lambda: list_events(teams.a, "NameReleased"))
    assert (type, message) == ("Normal", f"the name {name!r} no longer belongs to this namespace")


def release(space: Space, name: str) -> None:
    space.delete("ServedName", build_served_name(space.namespace, name)["metadata"]["name"])


def test_a_claim_that_is_deleted_while_its_service_is_there_comes_back(teams: Teams, name: str) -> None:
    teams.start()
    serve(teams.b, "old", f"{name}-old")
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")
    teams.b.edit("old", model={"name": name})
    wait_message(teams.b, "old", "False", "NameTaken")
    (before,) = teams.a.list("ServedName")
    release(teams.a, name)
    wait_until("another claim", lambda: is_replaced(teams.a, before["metadata"]["uid"]))
    teams.stage.proxy.wait_quiet()
    assert name not in holders(teams.b)
    assert list_events(teams.a, "NameReleased") == []


def is_replaced(space: Space, uid: str) -> bool:
    return [claim["metadata"]["uid"] != uid for claim in space.list("ServedName")] == [True]


def test_a_name_is_handed_over_by_a_second_claim_and_the_end_of_the_first(teams: Teams, name: str) -> None:
    """An administrator takes the name from a service that continues to serve it."""
    teams.start()
    serve(teams.b, "squat", name)
    wait_message(teams.b, "squat", "True", "NameClaimed")
    (claim,) = teams.b.list("ServedName")
    wait_until("another second", lambda: is_past(teams.b, claim), 10)
    claim_name(teams.a.api, teams.a.namespace, name)
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "False", "NameTaken")
    release(teams.b, name)
    wait_message(teams.a, "good", "True", "NameClaimed")
    wait_message(teams.b, "squat", "False", "NameTaken")
    wait_until("an Event", lambda: list_events(teams.b, "NameTaken"))


def test_the_holder_of_a_name_holds_later_names_with_a_colon_behind_it(teams: Teams, name: str) -> None:
    """Names of adapters have this form, and no other team may get their requests."""
    teams.start()
    serve(teams.b, "early", f"{name}:7b")
    wait_message(teams.b, "early", "True", "NameClaimed")
    wait_for_another_second(teams.b)
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")
    wait_for_another_second(teams.a)
    serve(teams.b, "squat", f"{name}:sql")
    message = wait_message(teams.b, "squat", "False", "NameTaken")
    assert f"the name '{name}:sql' is already taken" in message
    serve(teams.a, "own", f"{name}:other")
    wait_message(teams.a, "own", "True", "NameClaimed")
    assert teams.b.condition("early", "NameClaimed")["status"] == "True"
    teams.a.delete("InferenceService", "good")
    release(teams.a, name)
    wait_message(teams.b, "squat", "True", "NameClaimed")


def wait_for_another_second(space: Space) -> None:
    """Wait until a new claim is younger than those of the namespace: their ages are whole seconds."""
    wait_until("another second", lambda: all(is_past(space, claim) for claim in space.list("ServedName")), 10)


def test_the_names_of_a_namespace_go_with_it_and_a_new_one_is_another_holder(teams: Teams, name: str) -> None:
    teams.start()
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")
    serve(teams.b, "squat", name)
    wait_message(teams.b, "squat", "False", "NameTaken")
    path = f"/api/v1/namespaces/{teams.a.namespace}"
    teams.a.api.delete(path)
    wait_message(teams.b, "squat", "True", "NameClaimed")
    wait_until("the end of the namespace", lambda: not teams.a.api.reachable(path))
    teams.a.api.create("/api/v1/namespaces", {"metadata": {"name": teams.a.namespace}})
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "False", "NameTaken")


def test_a_namespace_has_a_hundred_names_and_gets_another_when_one_is_released(teams: Teams, name: str) -> None:
    for number in range(MAX_SERVED_NAMES):  # before it starts: a watch may lag behind what a test creates
        claim_name(teams.a.api, teams.a.namespace, f"{name}/{number}")
    teams.start()
    serve(teams.a, "good", name)
    message = wait_message(teams.a, "good", "False", "TooManyNames")
    assert "delete a ServedName that you no longer need" in message
    wait_until("its Event", lambda: list_events(teams.a, "TooManyNames"))
    assert len(holders(teams.a)) == MAX_SERVED_NAMES
    serve(teams.b, "other", f"{name}-b")
    wait_message(teams.b, "other", "True", "NameClaimed")
    release(teams.a, f"{name}/7")
    wait_message(teams.a, "good", "True", "NameClaimed")
    assert len(holders(teams.a)) == MAX_SERVED_NAMES


def test_the_first_operator_with_claims_gives_each_name_to_the_oldest_service(
    teams: Teams, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The services exist before the operator. The newer one's namespace comes first by name."""
    old = serve(teams.b, "old", name)
    wait_until("another second", lambda: is_past(teams.b, old), 10)
    serve(teams.a, "young", name)
    teams.start()
    wait_message(teams.b, "old", "True", "NameClaimed")
    wait_message(teams.a, "young", "False", "NameTaken")
    assert holders(teams.a, teams.b) == {name: teams.b.namespace}


def is_past(space: Space, made: Json) -> bool:
    """Return whether the second of the object's creation is over. Times of creation are whole seconds."""
    created = made["metadata"]["creationTimestamp"]
    probe = make_service("probe")
    dated = space.api.create(space.path("InferenceService") + "?dryRun=All", probe)["metadata"]["creationTimestamp"]
    return bool(dated > created)


def test_the_gateways_own_name_is_claimed_after_those_of_all_services(teams: Teams, name: str) -> None:
    for number in range(5):
        serve(teams.a, f"s{number}", f"{name}/{number}")
    system = teams.b.namespace
    teams.stage.start(watch_namespaces=(teams.a.namespace,), system_namespace=system)
    wait_until("its claim", lambda: root_name(system) in holders(teams.b))
    assert set(holders(teams.a)) == {f"{name}/{number}" for number in range(5)}
    made = [call for call in teams.stage.proxy.calls if (call.verb, call.resource) == ("create", "servednames")]
    assert [call.status for call in made] == [201] * 6


def test_a_second_operator_claims_nothing_twice_and_reports_nothing_new(teams: Teams, name: str) -> None:
    life = teams.start()
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")
    teams.stage.proxy.wait_quiet()
    life.stop()
    before = teams.a.need("InferenceService", "good")["metadata"]["resourceVersion"], teams.a.list("ServedName")
    count = len(teams.stage.proxy.calls)
    teams.start()
    watched = ("watch", "inferenceservices")
    wait_until("it looks", lambda: watched in [(c.verb, c.resource) for c in teams.stage.proxy.calls[count:]])
    teams.stage.proxy.wait_quiet(2)
    after = teams.a.need("InferenceService", "good")["metadata"]["resourceVersion"], teams.a.list("ServedName")
    assert after == before


def test_two_services_of_one_namespace_share_a_name_that_leads_to_the_older_one(teams: Teams, name: str) -> None:
    teams.start()
    chat = serve(teams.a, "chat", name)
    wait_message(teams.a, "chat", "True", "NameClaimed")
    wait_until("another second", lambda: is_past(teams.a, chat), 10)
    serve(teams.a, "next", name)
    assert "the older InferenceService chat of this namespace" in wait_message(teams.a, "next", "False", "NameTaken")
    teams.a.delete("InferenceService", "chat")
    wait_message(teams.a, "next", "True", "NameClaimed")


def test_a_name_that_may_be_another_namespaces_service_is_never_claimed(teams: Teams) -> None:
    teams.start()
    serve(teams.a, "good", f"{teams.b.namespace}/anything")
    assert "a service in another namespace" in wait_message(teams.a, "good", "False", "NameNotAllowed")
    assert holders(teams.a) == {}


def test_a_claim_is_made_again_after_faults_of_the_api_server(teams: Teams, name: str) -> None:
    proxy = teams.stage.proxy
    faults = [proxy.fail(is_claim, status, times=1, Retry_After="0") for status in (500, 0)]
    teams.start()
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")
    assert [fault.hits for fault in faults] == [1, 1]


is_claim: Callable[..., bool] = lambda call: (call.verb, call.resource) == ("create", "servednames")  # noqa: E731


@pytest.mark.parametrize("status", [403, 409, 500])
def test_a_namespace_in_which_claims_fail_gets_a_clear_error_and_holds_up_no_other(
    teams: Teams, name: str, status: int
) -> None:
    """This happens with a quota, or if an admission webhook for this namespace is down."""
    teams.stage.proxy.fail(lambda call: is_claim(call) and call.namespace == teams.a.namespace, status, times=1000)
    teams.start()
    serve(teams.a, "fails", name)
    message = f"not claimed yet: injected {status}"
    wait_until("it is told", lambda: message in teams.a.condition("fails", "NameClaimed").get("message", ""))
    assert teams.a.condition("fails", "NameClaimed")["status"] == "Unknown"
    serve(teams.b, "other", name)
    wait_message(teams.b, "other", "True", "NameClaimed")
    wait_message(teams.a, "fails", "False", "NameTaken")


def test_a_claim_cannot_change(teams: Teams, name: str) -> None:
    claim_name(teams.a.api, teams.a.namespace, name)
    (claim,) = teams.a.list("ServedName")
    with pytest.raises(ApiError, match="a ServedName cannot change"):
        teams.a.patch("ServedName", claim["metadata"]["name"], {"spec": {"name": f"{name}-2"}})
