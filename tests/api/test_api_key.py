"""Tests APIKeys: what the API server and the parser accept, and the form of keys."""

import hashlib
from typing import Any

import pytest

from conveyor_api import names
from conveyor_api.api_key import APIKey, build_key, find_key_namespace, hash_key
from conveyor_api.errors import InvalidResource
from e2e.cluster.api import Api, ApiError
from e2e.cluster.definitions import install_definitions

Json = dict[str, Any]
SHA256 = "0123456789abcdef" * 4
HASH = {"sha256": SHA256}
LATER = "2099-12-31T23:59:59Z"


def build(**spec: Any) -> Json:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.API_KEY_KIND,
        "metadata": {"name": "ci", "namespace": "default"},
        "spec": {"hashes": [HASH], **spec},
    }


@pytest.fixture
def keys(api: Api) -> Api:
    """The API server, with the kind APIKey."""
    install_definitions(api)
    return api


def is_accepted(api: Api, body: Json) -> bool:
    path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/default/{names.API_KEY_PLURAL}"
    try:
        api.create(f"{path}?fieldValidation=Strict&dryRun=All", body)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize(
    "body",
    [
        build(),
        build(hashes=[HASH, {**HASH, "expires": LATER}]),
        build(services=["chat", "*", "team-b/chat"], owner="ml@example.com", maxClass="batch", expires=LATER),
        build(limits={"requestsPerMinute": 1, "tokensPerMinute": 10**12, "tokensPerDay": 5, "concurrentRequests": 2}),
        build(limits={}, services=[]),
    ],
    ids=str,
)
def test_api_server_and_parser_accept(keys: Api, body: Json) -> None:
    assert is_accepted(keys, body)
    APIKey.parse(body)


@pytest.mark.parametrize(
    "spec",
    [
        {"hashes": []},
        {"hashes": [HASH] * 3},
        {"hashes": [{"sha256": SHA256.upper()}]},
        {"hashes": [{"sha256": SHA256[1:]}]},
        {"hashes": [{"sha256": SHA256 + "0"}]},
        {"hashes": [{"sha256": "my password"}]},
        {"hashes": [{**HASH, "expires": "2099-13-01T00:00:00Z"}]},
        {"expires": "tomorrow"},
        {"expires": "2099-12-31T23:59:59"},
        {"expires": "2099-12-31T23:59:59+01:00"},
        {"expires": "2099-02-30T00:00:00Z"},
        {"services": ["Chat"]},
        {"services": ["team-b/*"]},
        {"services": ["a/b/c"]},
        {"services": [""]},
        {"owner": "two words"},
        {"owner": "\u00e9"},
        {"owner": ""},
        {"limits": {"tokensPerDay": 0}},
        {"limits": {"tokensPerDay": "many"}},
    ],
    ids=str,
)
def test_api_server_and_parser_refuse(keys: Api, spec: Json) -> None:
    body = build(**spec)
    assert not is_accepted(keys, body)
    with pytest.raises(InvalidResource):
        APIKey.parse(body)


def test_a_key_has_its_namespace_and_256_bits_and_is_hashed_whole() -> None:
    key = build_key("team-a", bytes(range(32)))
    assert key == "sk-conveyor-team-a-" + bytes(range(32)).hex()
    assert find_key_namespace(key) == "team-a"
    assert hash_key(key) == hashlib.sha256(key.encode()).hexdigest()


def test_every_namespace_of_kubernetes_fits() -> None:
    for namespace in ("a", "0", "a-b", "sk-conveyor-a", "a" * 63, f"x-{SHA256[:60]}"):
        assert find_key_namespace(build_key(namespace, bytes(32))) == namespace
