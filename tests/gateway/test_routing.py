"""Which service a request is for, as tables."""

import pytest
from tests.gateway.builders import make_directory, make_known_service

from conveyor_gateway.errors import AmbiguousModel, GatewayError, MethodNotAllowed, Misdirected, NotFound
from conveyor_gateway.routing import Action, OwnHosts, Route, find_model, model_id, parse_route

OWN = OwnHosts("conveyor-system", ("models.example",))
DIRECTORY = make_directory(
    make_known_service("default/qwen"),
    make_known_service("team-a/llama", "meta/llama"),
    make_known_service("team-b/llama", "meta/llama"),
    make_known_service("team-b/other", "default/qwen"),
)
CHAT = "/v1/chat/completions"


def route(path: str = CHAT, host: str = "10.1.2.3", method: str = "POST") -> Route:
    return parse_route(method, path, host, OWN, DIRECTORY)


@pytest.mark.parametrize(
    ("path", "host", "service"),
    [
        ("/default/qwen/v1/chat/completions", "anything", "default/qwen"),
        ("/default/qwen/v1/chat/completions", "llama.team-a", "default/qwen"),  # the path wins
        ("/team-a/llama/v1/completions", "", "team-a/llama"),
        (CHAT, "qwen.default", "default/qwen"),
        (CHAT, "qwen.default:8080", "default/qwen"),
        (CHAT, "QWEN.Default.", "default/qwen"),
        (CHAT, "qwen.default.svc", "default/qwen"),
        (CHAT, "qwen.default.svc.cluster.local", "default/qwen"),
        (CHAT, "qwen.default.svc.some.domain:80", "default/qwen"),
        (CHAT, "", None),
        (CHAT, "localhost:8080", None),
        (CHAT, "10.1.2.3:80", None),
        (CHAT, "[fd00::1]:80", None),
        (CHAT, "conveyor-gateway", None),
        (CHAT, "conveyor-gateway.conveyor-system", None),
        (CHAT, "conveyor-gateway.conveyor-system.svc.cluster.local", None),
        (CHAT, "models.example", None),  # a public host of two parts
        (CHAT, "inference.example.com", None),
    ],
)
def test_the_path_or_else_the_host_names_the_service(path: str, host: str, service: str | None) -> None:
    assert route(path, host).service == service


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/completions", Route(Action.GENERATE, None, "/v1/completions")),
        ("POST", "/default/qwen/v1/chat/completions", Route(Action.GENERATE, "default/qwen", CHAT)),
        ("GET", "/v1/models", Route(Action.LIST_MODELS, None)),
        ("GET", "/default/qwen/v1/models", Route(Action.LIST_MODELS, "default/qwen")),
        ("GET", "/v1/models/meta/llama", Route(Action.GET_MODEL, None, model="meta/llama")),
        ("GET", "/v1/models/meta%2Fllama", Route(Action.GET_MODEL, None, model="meta/llama")),
        ("GET", "/default/qwen/v1/models/qwen", Route(Action.GET_MODEL, "default/qwen", model="qwen")),
    ],
)
def test_a_route_says_what_to_do(method: str, path: str, expected: Route) -> None:
    assert route(path, method=method) == expected


@pytest.mark.parametrize(
    ("method", "path", "host", "kind", "words"),
    [
        ("POST", "/", "", NotFound, "/<namespace>/<name>/v1/"),
        ("POST", "/chat/completions", "", NotFound, "/<namespace>/<name>/v1/"),
        ("POST", "/default/qwen", "", NotFound, "/<namespace>/<name>/v1/"),
        ("POST", "/Default/qwen/v1/completions", "", NotFound, "no such path"),
        ("POST", "/a/b/c/v1/completions", "", NotFound, "no such path"),
        ("POST", "/default/qwen/v1/embeddings", "", NotFound, "/v1/chat/completions"),
        ("POST", "/v1/completions/", "", NotFound, "no such path"),
        ("POST", "//v1/completions", "", NotFound, "no such path"),
        ("POST", "/default/llama/v1/completions", "", NotFound, "there is team-a/llama, team-b/llama"),
        ("POST", "/default/gone/v1/completions", "", NotFound, "kubectl get inferenceservices"),
        ("POST", CHAT, "qwen.team-a", NotFound, "there is default/qwen"),
        ("POST", CHAT, "example.com", NotFound, "'example' in namespace 'com'"),
        ("GET", CHAT, "", MethodNotAllowed, "takes POST"),
        ("POST", "/v1/models", "", MethodNotAllowed, "takes GET"),
        ("DELETE", "/v1/models/qwen", "", MethodNotAllowed, "takes GET"),
    ],
)
def test_what_leads_nowhere_is_refused_with_what_to_do(
    method: str, path: str, host: str, kind: type[GatewayError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        route(path, host, method)
    assert words in str(caught.value)


def test_a_host_of_one_part_is_misdirected_and_both_urls_are_named() -> None:
    with pytest.raises(Misdirected) as caught:
        route(host="qwen:80")
    assert "http://qwen.default/v1" in str(caught.value)
    assert "http://<gateway>/default/qwen/v1" in str(caught.value)
    assert caught.value.status == 421


def test_a_host_of_one_part_that_no_service_has_gets_the_urls_with_a_gap() -> None:
    with pytest.raises(Misdirected, match=r"http://nobody\.<namespace>/v1"):
        route(host="nobody")


def test_the_gateways_name_in_another_namespace_is_a_service() -> None:
    with pytest.raises(NotFound, match="'conveyor-gateway' in namespace 'default'"):
        route(host="conveyor-gateway.default")


@pytest.mark.parametrize(
    ("model", "key"),
    [("qwen", "default/qwen"), ("team-a/llama", "team-a/llama"), ("default/qwen", "default/qwen")],
)
def test_a_model_is_found_by_its_served_name_or_by_namespace_and_name(model: str, key: str) -> None:
    assert find_model(model, DIRECTORY).key == key


def test_a_served_name_of_two_services_is_ambiguous_and_both_are_named() -> None:
    with pytest.raises(AmbiguousModel, match="team-a/llama and team-b/llama") as caught:
        find_model("meta/llama", DIRECTORY)
    assert (caught.value.status, caught.value.param) == (400, "model")


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(NotFound, match="GET /v1/models lists") as caught:
        find_model("gpt-9", DIRECTORY)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(NotFound, match="'xxx") as caught:
        find_model("x" * 1_000_000, DIRECTORY)
    assert len(str(caught.value)) < 200


def test_the_id_that_a_service_is_listed_with_leads_to_it() -> None:
    ids = {service.key: model_id(service, DIRECTORY) for service in DIRECTORY.services.values()}
    assert ids == {
        "default/qwen": "qwen",
        "team-a/llama": "team-a/llama",  # shared name
        "team-b/llama": "team-b/llama",
        "team-b/other": "team-b/other",  # its name is another service's namespace/name
    }
    assert all(find_model(ids[key], DIRECTORY).key == key for key in ids)
