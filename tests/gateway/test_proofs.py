"""Tests from which headers a caller is found."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from tests.gateway.keys import make_api_key, make_key

from conveyor_gateway.proofs import Proofs
from conveyor_gateway.watching.issuer import Issuer
from conveyor_gateway.watching.keys import KeyTable

KEY, OTHER, UNKNOWN = make_key("team-a"), make_key("team-b"), make_key("team-a", 9)
SEVERAL = "the request has a header with a key more than once"
NO_KEY = "this is neither a key of an APIKey nor a token of a ServiceAccount"
REVOKED = "this key is unknown or was revoked"


@pytest.fixture(scope="module")
def proofs() -> Proofs:
    keys = KeyTable()
    keys.put(make_api_key("team-a"))
    keys.put(make_api_key("team-b", "ci", OTHER))
    return Proofs(keys, Issuer())


@pytest.mark.parametrize(
    ("headers", "name", "problem"),
    [
        ([], None, ""),
        ([("Authorization", f"Bearer {KEY}")], "team-a/ci", ""),
        ([("authorization", f"bearer   {KEY} ")], "team-a/ci", ""),
        ([("x-api-key", KEY)], "team-a/ci", ""),
        ([("X-API-Key", KEY), ("Authorization", "Bearer dummy")], "team-a/ci", ""),  # some clients always send both
        ([("Authorization", f"Bearer {KEY}"), ("x-api-key", OTHER)], "team-a/ci", ""),
        ([("Authorization", f"Bearer {UNKNOWN}"), ("x-api-key", "dummy")], None, REVOKED),
        ([("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER}")], None, SEVERAL),
        ([("Authorization", "Bearer dummy"), ("Authorization", f"Bearer {KEY}")], None, SEVERAL),
        ([("x-api-key", OTHER), ("x-api-key", KEY)], None, SEVERAL),
        ([("Authorization", f"Bearer {KEY}, Bearer {OTHER}")], None, NO_KEY),  # as some proxies join two headers
        ([("Authorization", KEY)], None, NO_KEY),
        ([("Authorization", f"Basic {KEY}")], None, NO_KEY),
        ([("Authorization", f"Bearer\t{KEY}")], None, NO_KEY),
        ([("Authorization", "")], None, NO_KEY),
        ([("Authorization", "Bearer " + "x" * 8000)], None, NO_KEY),
        ([("X_Api_Key", KEY), ("X-Api-Key-2", KEY), ("Proxy-Authorization", f"Bearer {KEY}")], None, ""),
        ([("api-key", KEY), ("X-Goog-Api-Key", KEY), ("Cookie", f"key={KEY}")], None, ""),
    ],
)
def test_a_key_is_found_in_two_headers_each_sent_once(
    proofs: Proofs, headers: list[tuple[str, str]], name: str | None, problem: str
) -> None:
    caller, found, _ = proofs.find(CIMultiDictProxy(CIMultiDict(headers)))
    assert (caller.name if caller is not None else None, found) == (name, problem)
