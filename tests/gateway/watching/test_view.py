"""Tests which services a client sees. All others look as if they did not exist."""

import json
from dataclasses import replace

import pytest
from tests.gateway.builders import claim, make_known_service

from conveyor_api.endpoints import EndpointKind
from conveyor_api.resource import InferenceService
from conveyor_gateway.caller import Caller
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.pages.models import encode_model_list, find_model_page
from conveyor_gateway.routing import OwnHosts, Route, find_model, parse_route
from conveyor_gateway.settings import DefaultAccess
from conveyor_gateway.watching.access import WITHOUT_RULES, Rules, parse_rules
from conveyor_gateway.watching.catalog import Directory
from conveyor_gateway.watching.view import View

OPEN, REQUIRED = Rules("Open"), Rules("Required")


def make_caller(*services: str, namespace: str = "team-a") -> Caller:
    return Caller(f"{namespace}/ci", namespace, services=frozenset(services))


def make_account(namespace: str, name: str) -> Caller:
    return Caller(f"system:serviceaccount:{namespace}:{name}", namespace)


OWN_CHAT, OWN_ALL, OTHER = make_caller("team-a/chat"), make_caller("team-a/*"), make_caller("team-b/chat")
ACCOUNT = make_account("apps", "web")


def make_view(caller: Caller | None, rules: Rules, default: DefaultAccess = "Open", problem: str = "") -> View:
    """Return a view on the service team-a/chat with these rules, which holds the name `chat`."""
    directory = Directory(default)
    claim(directory, "team-a", "chat")
    directory.put(make_known_service("team-a/chat", rules=rules))
    return View(directory, caller, problem)


@pytest.mark.parametrize(
    ("mode", "default", "is_guarded"),
    [
        (None, "Open", False),
        ("Open", "Open", False),
        ("Required", "Open", True),
        (None, "Required", True),
        ("Open", "Required", False),
        ("Required", "Required", True),
        (None, "Enforced", True),
        ("Open", "Enforced", True),
    ],
)
def test_the_mode_of_the_service_counts_unless_the_gateway_enforces_its_own(
    mode: str | None, default: DefaultAccess, is_guarded: bool
) -> None:
    body = {"uri": "hf://a/b"}
    service = InferenceService.parse(
        {
            "apiVersion": "conveyor.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "chat", "namespace": "team-a"},
            "spec": {"model": body, "access": {"mode": mode} if mode else {}},
        }
    )
    rules = parse_rules(service.spec.access)
    view = make_view(None, rules, default)
    assert (view.find_service("team-a/chat") is None) is is_guarded
    assert view.directory.num_guarded == is_guarded
    view.directory.remove("team-a/chat")
    assert view.directory.num_guarded == 0


@pytest.mark.parametrize(
    ("caller", "rules", "may_use"),
    [
        (None, REQUIRED, False),
        (OWN_CHAT, REQUIRED, True),
        (OWN_ALL, REQUIRED, True),
        (make_caller("team-a/other"), REQUIRED, False),
        (make_caller(), REQUIRED, False),
        (make_caller("team-a/chat", namespace="team-b"), REQUIRED, False),  # it only names the service
        (make_caller("team-a/*", namespace="team-b"), REQUIRED, False),
        (make_caller("team-a/chat", namespace="team-b"), Rules("Required", key_namespaces=frozenset({"team-b"})), True),
        (make_caller("team-b/*", namespace="team-b"), Rules("Required", key_namespaces=frozenset({"team-b"})), False),
        (ACCOUNT, REQUIRED, False),
        (ACCOUNT, Rules("Required", frozenset({"apps/web"})), True),
        (ACCOUNT, Rules("Required", frozenset({"apps/*"})), True),
        (ACCOUNT, Rules("Required", frozenset({"apps/other", "other/*", "*/web"})), False),
        (make_account("team-a", "web"), REQUIRED, False),  # also of the service's own namespace
        (ACCOUNT, Rules("Required", key_namespaces=frozenset({"apps"})), False),
        (OWN_CHAT, Rules("Required", frozenset({"team-a/ci"})), True),
        (make_caller("x/y"), Rules("Required", frozenset({"team-a/ci"})), False),  # a key is no ServiceAccount
        (None, OPEN, True),
        (OTHER, WITHOUT_RULES, True),
    ],
)
def test_a_caller_sees_what_both_sides_have_named(caller: Caller | None, rules: Rules, may_use: bool) -> None:
    view = make_view(caller, rules)
    assert (view.find_service("team-a/chat") is not None) is may_use
    assert (view.find_model("chat") is not None) is may_use
    assert (view.find_model("team-a/chat") is not None) is may_use


@pytest.mark.parametrize(
    ("caller", "rules", "client"),
    [
        (None, OPEN, "10.0.0.1"),
        (OWN_CHAT, OPEN, "team-a/ci"),
        (OWN_ALL, REQUIRED, "team-a/ci"),
        (make_caller("team-a/other"), OPEN, "10.0.0.1"),  # a key for another service
        (OTHER, OPEN, "10.0.0.1"),
        (make_caller("team-a/chat", namespace="team-b"), OPEN, "10.0.0.1"),  # it only names the service
        (
            make_caller("team-a/chat", namespace="team-b"),
            Rules("Open", key_namespaces=frozenset({"team-b"})),
            "team-b/*",
        ),
        (ACCOUNT, OPEN, "10.0.0.1"),
        (ACCOUNT, Rules("Open", frozenset({"apps/*"})), "apps/*"),
        (make_account("team-a", "web"), Rules("Open", frozenset({"team-a/web"})), "system:serviceaccount:team-a:web"),
    ],
)
def test_only_callers_of_the_services_own_namespace_have_shares_of_their_own(
    caller: Caller | None, rules: Rules, client: str
) -> None:
    view = replace(make_view(caller, rules), address="10.0.0.1")
    assert view.name_client(view.directory.services["team-a/chat"]) == client
    assert view.name_client(None) == ("10.0.0.1" if caller is None else f"{caller.namespace}/*")


def refusals(view: View, service: str, model: str) -> list[tuple[str, Code]]:
    """Return the errors for a service by path, by host, and for a model in the body and in the path."""
    own, found = OwnHosts("conveyor-system"), []
    calls = [
        lambda: parse_route("POST", f"/{service}/v1/completions", "", own, view),
        lambda: parse_route("DELETE", f"/{service}/v1/nonsense", "", own, view),
        lambda: parse_route("POST", "/v1/completions", ".".join(reversed(service.split("/"))), own, view),
        lambda: find_model(model, view),
        lambda: find_model(service, view),
        lambda: find_model_page(Route(EndpointKind.GET_MODEL, None, model=model), view, lists_all=True),
    ]
    for call in calls:
        with pytest.raises(GatewayError) as caught:
            call()
        found.append((str(caught.value).replace(model, "NAME"), caught.value.code))
    return found


@pytest.mark.parametrize("problem", ["", "this key has expired"])
@pytest.mark.parametrize("caller", [None, OTHER, ACCOUNT])
def test_a_hidden_service_and_one_that_does_not_exist_get_the_same_errors(caller: Caller | None, problem: str) -> None:
    view = make_view(caller, REQUIRED, problem=problem)
    hidden, absent = refusals(view, "team-a/chat", "chat"), refusals(view, "team-a/none", "none")
    assert hidden == absent
    expected = {Code.SERVICE_NOT_FOUND, Code.MODEL_NOT_FOUND}
    if caller is None:
        expected = {Code.INVALID_API_KEY if problem else Code.NO_API_KEY}
    assert {code for _, code in hidden} == expected
    assert all(problem in words for words, _ in hidden) or caller is not None


def test_where_no_service_needs_a_key_nobody_gets_401() -> None:
    view = make_view(None, OPEN, problem="this is no key")
    assert {code for _, code in refusals(view, "team-a/none", "none")} == {Code.SERVICE_NOT_FOUND, Code.MODEL_NOT_FOUND}


def list_models(view: View, lists_all: bool = False) -> list[str]:
    return [model["id"] for model in json.loads(b"".join(encode_model_list(view, lists_all)))["data"]]


def test_the_root_lists_what_the_caller_may_use() -> None:
    directory = Directory()
    for number in range(250):  # several pieces without a service that anybody sees
        directory.put(make_known_service(f"a/s{number}", rules=REQUIRED, listed=bool(number % 2)))
    directory.put(make_known_service("team-a/chat", rules=REQUIRED, listed=False))
    directory.put(make_known_service("team-a/open", listed=False))
    directory.put(make_known_service("team-b/listed", listed=True))
    granted = Rules("Required", frozenset({"apps/*"}))
    directory.put(make_known_service("z/granted", rules=granted, listed=False))
    assert list_models(View(directory)) == ["team-b/listed"]
    assert list_models(View(directory, OWN_ALL)) == ["team-a/chat", "team-b/listed"]
    assert list_models(View(directory, ACCOUNT)) == ["team-b/listed", "z/granted"]
    assert list_models(View(directory, OWN_ALL), lists_all=True) == ["team-a/chat", "team-a/open", "team-b/listed"]


def test_without_proof_a_request_at_the_root_ends_at_once_if_every_service_needs_one() -> None:
    with pytest.raises(GatewayError) as caught:
        make_view(None, REQUIRED).check_any()
    assert caught.value.code is Code.NO_API_KEY
    make_view(OTHER, REQUIRED).check_any()
    make_view(None, OPEN).check_any()
    View(Directory("Required")).check_any()
