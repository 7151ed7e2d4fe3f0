"""Tests, with tables, which service a request is for."""

from urllib.parse import unquote

import pytest
from tests.gateway.builders import claim, make_directory, make_known_service

from conveyor_api.endpoints import EndpointKind
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.routing import OwnHosts, Route, find_model, find_route_model, model_id, parse_route
from conveyor_gateway.watching.catalog import NamedModel
from conveyor_gateway.watching.view import View

OWN = OwnHosts("conveyor-system", ("models.example",))
DIRECTORY = make_directory(
    make_known_service("default/qwen"),
    make_known_service("team-a/llama", "Meta/Llama", created_unix=7),
    make_known_service("team-b/llama", "Meta/Llama", created_unix=5),
    make_known_service("team-b/other", "default/qwen"),
    **{"qwen": "default", "Meta/Llama": "team-a", "default/qwen": "default"},
)
CHAT = "/v1/chat/completions"
NO_PATH, NO_SERVICE = Code.PATH_NOT_FOUND, Code.SERVICE_NOT_FOUND
INFER, INFER_VERSION = "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"


def route(path: str = CHAT, host: str = "10.1.2.3", method: str = "POST") -> Route:
    return parse_route(method, path, host, OWN, View(DIRECTORY))


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
        ("POST", "/v1/completions", Route(EndpointKind.ENGINE, None, "/v1/completions", may_stream=True)),
        (
            "POST",
            "/default/qwen/v1/chat/completions",
            Route(EndpointKind.ENGINE, "default/qwen", CHAT, may_stream=True),
        ),
        ("POST", "/default/qwen/v1/embeddings", Route(EndpointKind.ENGINE, "default/qwen", "/v1/embeddings")),
        ("POST", "/default/qwen/v2/rerank", Route(EndpointKind.ENGINE, "default/qwen", "/v2/rerank")),
        ("POST", "/default/qwen/rerank", Route(EndpointKind.ENGINE, "default/qwen", "/rerank")),
        ("POST", "/v2/rerank", Route(EndpointKind.ENGINE, None, "/v2/rerank")),
        ("POST", "/v1/images/classify", Route(EndpointKind.ENGINE, None, "/v1/images/classify")),
        ("POST", "/default/qwen/v1/images/classify", Route(EndpointKind.ENGINE, "default/qwen", "/v1/images/classify")),
        ("POST", "/classify", Route(EndpointKind.ENGINE, None, "/classify")),
        ("GET", "/health", Route(EndpointKind.STATUS, None, "/health")),
        ("GET", "/v1/version", Route(EndpointKind.STATUS, None, "/version")),
        ("GET", "/default/qwen/ping", Route(EndpointKind.STATUS, "default/qwen", "/ping")),
        ("GET", "/default/qwen/v1/health", Route(EndpointKind.STATUS, "default/qwen", "/health")),
        ("GET", "/default/qwen/openapi.json", Route(EndpointKind.DESCRIBE, "default/qwen", "/openapi.json")),
        ("GET", "/v1/models", Route(EndpointKind.LIST_MODELS, None)),
        ("GET", "/default/qwen/v1/models", Route(EndpointKind.LIST_MODELS, "default/qwen")),
        ("GET", "/v1/models/meta/llama", Route(EndpointKind.GET_MODEL, None, model="meta/llama")),
        ("GET", "/v1/models/meta%2Fllama", Route(EndpointKind.GET_MODEL, None, model="meta/llama")),
        ("GET", "/default/qwen/v1/models/qwen", Route(EndpointKind.GET_MODEL, "default/qwen", model="qwen")),
        (
            "GET",
            "/v1/models/classify",
            Route(EndpointKind.GET_MODEL, None, model="classify"),
        ),  # no service of namespace v1
        ("POST", "/v2/models/qwen/infer", Route(EndpointKind.ENGINE, None, INFER, model="qwen")),
        ("POST", "/v2/models/team-a%2Fllama/infer", Route(EndpointKind.ENGINE, None, INFER, model="team-a/llama")),
        ("POST", "/v2/models/team-a/llama/infer", Route(EndpointKind.ENGINE, None, INFER, model="team-a/llama")),
        (
            "POST",
            "/default/qwen/v2/models/qwen/versions/1/infer",
            Route(EndpointKind.ENGINE, "default/qwen", INFER_VERSION, model="qwen", version="1"),
        ),
        ("GET", "/v2/models/rerank", Route(EndpointKind.ENGINE_PAGE, None, "/v2/models/{model}", model="rerank")),
        ("GET", "/v2/models/health", Route(EndpointKind.ENGINE_PAGE, None, "/v2/models/{model}", model="health")),
        (
            "GET",
            "/default/qwen/v2/models/qwen/ready",
            Route(EndpointKind.ENGINE_PAGE, "default/qwen", "/v2/models/{model}/ready", model="qwen"),
        ),
        ("GET", "/v2", Route(EndpointKind.STATUS, None, "/v2")),
        ("GET", "/default/qwen/v2/health/ready", Route(EndpointKind.STATUS, "default/qwen", "/v2/health/ready")),
    ],
)
def test_a_route_says_what_to_do(method: str, path: str, expected: Route) -> None:
    assert route(path, method=method) == expected


@pytest.mark.parametrize(
    ("method", "path", "same_as"),
    [
        ("POST", "/v1/chat/completions/", CHAT),
        ("POST", "/chat/completions", CHAT),
        ("POST", "/v1/v1/chat/completions", CHAT),
        ("POST", "/default/qwen/chat/completions", f"/default/qwen{CHAT}"),
        ("POST", "/default/qwen/v1/v1/messages", "/default/qwen/v1/messages"),
        ("POST", "/default/qwen/messages/count_tokens/", "/default/qwen/v1/messages/count_tokens"),
        ("POST", "/default/qwen/embeddings", "/default/qwen/v1/embeddings"),
        ("POST", "/default/qwen/rerank/", "/default/qwen/rerank"),  # a path of its own, which differs from /v1/rerank
        ("GET", "/default/qwen/models/", "/default/qwen/v1/models"),
        ("GET", "/health/", "/health"),
    ],
)
def test_base_urls_may_have_v1_or_not_and_a_slash_at_the_end(method: str, path: str, same_as: str) -> None:
    assert route(path, method=method) == route(same_as, method=method)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health", "/default/qwen/v1/models/qwen", "/default/qwen/openapi.json"]
)
def test_what_can_be_read_can_be_asked_for_its_headers(path: str) -> None:
    assert route(path, method="HEAD") == route(path, method="GET")


@pytest.mark.parametrize(
    ("method", "path", "host", "code", "words"),
    [
        ("POST", "/", "", NO_PATH, "/<namespace>/<name>/v1/"),
        ("POST", "/completion", "", NO_PATH, "/<namespace>/<name>/v1/"),
        ("POST", "/default/qwen", "", NO_PATH, "/<namespace>/<name>/v1/"),
        ("POST", "/Default/qwen/v1/completions", "", NO_PATH, "no such path"),
        ("POST", "/a/b/c/v1/completions", "", NO_PATH, "no such path"),
        ("POST", "/default/qwen/v1/softmax", "", NO_PATH, "/v1/chat/completions"),
        ("POST", "/v1/completions//", "", NO_PATH, "no such path"),
        ("HEAD", CHAT, "", Code.METHOD_NOT_ALLOWED, "supports POST"),
        ("POST", "/v1/files", "", NO_PATH, "an offline job sends the requests of a file"),
        ("GET", "/default/qwen/v1/batches/batch_1", "", NO_PATH, "an offline job sends the requests of a file"),
        ("POST", "//v1/completions", "", NO_PATH, "no such path"),
        ("POST", "/default/llama/v1/completions", "", NO_SERVICE, "no service 'llama' in namespace 'default'"),
        ("POST", "/default/gone/v1/completions", "", NO_SERVICE, "no service 'gone' in namespace 'default'"),
        ("POST", CHAT, "qwen.team-a", NO_SERVICE, "'qwen' in namespace 'team-a'"),
        ("POST", CHAT, "example.com", NO_SERVICE, "'example' in namespace 'com'"),
        ("GET", "/openapi.json", "", NO_PATH, "/<namespace>/<name>/openapi.json"),
        ("GET", CHAT, "", Code.METHOD_NOT_ALLOWED, "supports POST"),
        ("POST", "/v1/models", "", Code.METHOD_NOT_ALLOWED, "supports GET"),
        ("GET", "/v2/models/qwen/infer", "", Code.METHOD_NOT_ALLOWED, "supports POST"),
        ("POST", "/v2/models/qwen", "", Code.METHOD_NOT_ALLOWED, "supports GET"),
        ("POST", "/v2/models/", "", NO_PATH, "no such path"),
        ("POST", "/v2/other", "", NO_PATH, "no such path"),
        ("GET", "/v2/health/other", "", NO_PATH, "no such path"),
        ("DELETE", "/v1/models/qwen", "", Code.METHOD_NOT_ALLOWED, "supports GET"),
    ],
)
def test_what_leads_nowhere_is_refused_with_what_to_do(
    method: str, path: str, host: str, code: Code, words: str
) -> None:
    with pytest.raises(GatewayError) as caught:
        route(path, host, method)
    assert caught.value.code is code
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["qwen", "nobody"])
def test_a_host_of_one_part_is_misdirected_and_no_namespace_is_named(name: str) -> None:
    with pytest.raises(GatewayError) as caught:
        route(host=f"{name}:80")
    assert caught.value.code is Code.HOST_WITHOUT_NAMESPACE
    assert f"http://{name}.<namespace>/v1" in str(caught.value)
    assert f"http://<gateway>/<namespace>/{name}/v1" in str(caught.value)
    assert "default" not in str(caught.value)
    assert caught.value.status == 421


def test_a_404_on_one_teams_path_names_no_other_team() -> None:
    for call in (lambda: route("/default/llama/v1/models", method="GET"), lambda: route(host="llama.default")):
        with pytest.raises(GatewayError) as caught:
            call()
        assert caught.value.status == 404
        assert "team" not in str(caught.value)


def test_the_gateways_name_in_another_namespace_is_a_service() -> None:
    with pytest.raises(GatewayError, match="'conveyor-gateway' in namespace 'default'"):
        route(host="conveyor-gateway.default")


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("qwen", "default/qwen"),
        ("team-a/llama", "team-a/llama"),
        ("default/qwen", "default/qwen"),
        ("Meta/Llama", "team-a/llama"),  # though team-b's service is older
    ],
)
def test_a_model_is_found_by_its_served_name_or_by_namespace_and_name(model: str, key: str) -> None:
    assert find_model(model, View(DIRECTORY)).service.key == key


def test_a_name_leads_to_the_namespace_that_has_claimed_it_and_there_to_the_oldest_service() -> None:
    directory = make_directory(make_known_service("team-b/llama", "llama-70b", created_unix=1))
    with pytest.raises(GatewayError, match="does not exist, or is not listed"):
        find_model("llama-70b", View(directory))
    claim(directory, "team-a", "llama-70b")
    with pytest.raises(GatewayError, match="does not exist, or is not listed"):
        find_model("llama-70b", View(directory))  # nobody serves it there yet
    directory.put(make_known_service("team-a/y", "llama-70b", created_unix=6))
    assert find_model("llama-70b", View(directory)).service.key == "team-a/y"
    directory.put(make_known_service("team-a/x", "llama-70b", created_unix=5))
    assert find_model("llama-70b", View(directory)).service.key == "team-a/x"
    directory.put(make_known_service("team-a/x", "llama-70b", created_unix=5, max_queued_requests=9))
    assert (
        find_model("llama-70b", View(directory)).service.key == "team-a/x"
    )  # a change of anything else keeps the name
    directory.put(make_known_service("team-a/x", "renamed", created_unix=5))
    assert find_model("llama-70b", View(directory)).service.key == "team-a/y"
    directory.remove("team-a/y")
    with pytest.raises(GatewayError, match="does not exist, or is not listed"):
        find_model("llama-70b", View(directory))


def test_of_two_claims_the_older_one_counts_and_then_the_other() -> None:
    services = [make_known_service(f"{namespace}/llama", "llama-70b") for namespace in ("team-a", "team-b")]
    directory = make_directory(*services)
    claim(directory, "team-b", "llama-70b", created_unix=5)
    claim(directory, "team-a", "llama-70b", created_unix=6)
    assert find_model("llama-70b", View(directory)).service.key == "team-b/llama"
    directory.names.remove_claim("team-b/llama-70b")
    assert find_model("llama-70b", View(directory)).service.key == "team-a/llama"


def test_a_namespace_and_name_is_never_another_namespaces_model() -> None:
    """This holds even while that service does not exist."""
    directory = make_directory(
        make_known_service("team-a/y", "team-b/llama"),
        make_known_service("team-b/z", "team-b/other"),
        make_known_service("team-a/hub", "Team-b/Llama-3.1"),  # no namespace has such a name
        **{"team-b/other": "team-b", "Team-b/Llama-3.1": "team-a"},
    )
    with pytest.raises(GatewayError, match="does not exist, or is not listed"):
        find_model("team-b/llama", View(directory))
    assert find_model("team-b/other", View(directory)).service.key == "team-b/z"
    assert find_model("Team-b/Llama-3.1", View(directory)).service.key == "team-a/hub"
    assert model_id(NamedModel(directory.services["team-a/y"]), directory) == "team-a/y"


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(GatewayError, match="does not exist, or is not listed") as caught:
        find_model("gpt-9", View(DIRECTORY))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(GatewayError, match="'xxx") as caught:
        find_model("x" * 1_000_000, View(DIRECTORY))
    assert len(str(caught.value)) < 200


def test_the_id_that_a_service_is_listed_with_leads_to_it() -> None:
    ids = {service.key: model_id(NamedModel(service), DIRECTORY) for service in DIRECTORY.services.values()}
    assert ids == {
        "default/qwen": "qwen",
        "team-a/llama": "Meta/Llama",
        "team-b/llama": "team-b/llama",  # another namespace has its name
        "team-b/other": "team-b/other",  # its name is another service's namespace/name
    }
    assert all(find_model(ids[key], View(DIRECTORY)).service.key == key for key in ids)


ADAPTED = make_directory(
    make_known_service("team-a/qwen", "Qwen/Qwen3:8b", adapters=("sql", "chat")),
    make_known_service("team-b/qwen", "qwen", adapters=("sql", "chat")),
    make_known_service("team-c/other", "qwen:chat"),
    make_known_service("team-c/more", "team-b/qwen:sql", created_unix=1),
    make_known_service("team-c/plain"),
    make_known_service("team-c/late", "qwen:sql"),
    **{"qwen:chat": "team-c", "Qwen/Qwen3:8b": "team-a", "qwen": "team-b", "qwen:sql": "team-c"},
    **{"team-b/qwen:sql": "team-c"},
)


@pytest.mark.parametrize(
    ("model", "key", "engine_name"),
    [
        ("Qwen/Qwen3:8b", "team-a/qwen", "Qwen/Qwen3:8b"),
        ("Qwen/Qwen3:8b:sql", "team-a/qwen", "Qwen/Qwen3:8b:sql"),
        ("team-a/qwen:chat", "team-a/qwen", "Qwen/Qwen3:8b:chat"),
        ("qwen:sql", "team-b/qwen", "qwen:sql"),  # though team-c claimed this very name later
        ("qwen:chat", "team-c/other", "qwen:chat"),  # claimed before team-b claimed qwen
        ("team-b/qwen:chat", "team-b/qwen", "qwen:chat"),
        ("team-b/qwen:sql", "team-b/qwen", "qwen:sql"),  # nobody else can have a name below a namespace/name
    ],
)
def test_an_adapter_is_found_by_the_name_of_its_model(model: str, key: str, engine_name: str) -> None:
    found = find_model(model, View(ADAPTED))
    assert (found.service.key, found.engine_name) == (key, engine_name)
    path = parse_route("GET", f"/v2/models/{model}", "", OWN, View(ADAPTED)).fill_path(found)
    assert unquote(path) == f"/v2/models/{engine_name}"


@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen3",
        "Qwen/Qwen3:sql",
        "qwen:",
        ":sql",
        "sql",
        "qwen:SQL",
        "qwen:sql:chat",
        "team-c/plain:sql",
        "absent:sql",
    ],
)
def test_a_name_without_such_an_adapter_is_not_found(model: str) -> None:
    with pytest.raises(GatewayError, match="does not exist, or is not listed"):
        find_model(model, View(ADAPTED))


def test_the_id_that_an_adapter_is_listed_with_leads_to_it() -> None:
    models = [
        NamedModel(service, adapter) for service in ADAPTED.services.values() for adapter in ("", *service.adapters)
    ]
    ids = [model_id(model, ADAPTED) for model in models]
    assert len(set(ids)) == len(ids) == 10
    assert [find_model(each, View(ADAPTED)) for each in ids] == models
    assert model_id(NamedModel(ADAPTED.services["team-b/qwen"], "chat"), ADAPTED) == "team-b/qwen:chat"


@pytest.mark.parametrize(
    ("path", "filled"),
    [
        ("/v2/models/team-a%2Fllama/infer", "/v2/models/Meta/Llama/infer"),
        ("/v2/models/Meta%2FLlama/versions/1/infer", "/v2/models/Meta/Llama/versions/1/infer"),
        ("/team-a/llama/v2/models/Meta%2FLlama/infer", "/v2/models/Meta/Llama/infer"),
        ("/team-a/llama/v2/models/other/versions/a%2F1/infer", "/v2/models/other/versions/a%2F1/infer"),
        ("/team-a/llama/v2/models/%7Bversion%7D%3Fa%23%0D/infer", "/v2/models/%7Bversion%7D%3Fa%23%0D/infer"),
    ],
)
def test_an_engine_is_sent_the_name_that_it_knows(path: str, filled: str) -> None:
    found = route(path)
    assert found.fill_path(find_route_model(found, View(DIRECTORY))) == filled


@pytest.mark.parametrize("base", ["", "/default/qwen"])
@pytest.mark.parametrize(
    "model",
    ["..", ".", "..%2f..%2fplace", "%2e%2e", "%2E%2E%2Fplace", "a/../place", "a%2F..", "..%5Cplace", "%252e%252e%2fa"],
)
def test_a_path_with_a_segment_of_dots_reaches_no_engine(base: str, model: str) -> None:
    for method, path in (("GET", ""), ("POST", "/infer"), ("GET", "/ready"), ("POST", "/versions/1/infer")):
        with pytest.raises(GatewayError, match=r"segment may not be `\.` or `\.\.`") as caught:
            route(f"{base}/v2/models/{model}{path}", method=method)
        assert caught.value.code == "path_not_found"


@pytest.mark.parametrize("model", ["qwen-2.5", "a..b", "..a", "Meta%2FLlama-3.1"])
def test_other_dots_are_part_of_a_name(model: str) -> None:
    assert route(f"/default/qwen/v2/models/{model}", method="GET").model == unquote(model)
