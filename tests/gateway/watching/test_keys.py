"""Tests which keys prove a caller, and until when."""

import itertools
import time
from typing import Any

import pytest
from tests.gateway.keys import make_api_key, make_key

from conveyor_api.api_key import hash_key
from conveyor_gateway.caller import Caller, Limits
from conveyor_gateway.watching import keys as keys_module
from conveyor_gateway.watching.keys import KeyTable, Proof, parse_key

NOW_UNIX = 1_800_000_000  # 2027-01-15T08:00:00Z
KEY = make_key("team-a")
UNKNOWN = "this key is unknown or was revoked"
EXPIRED = "this key has expired"


def make_table(*bodies: dict[str, Any]) -> KeyTable:
    table = KeyTable(lambda: NOW_UNIX)
    for body in bodies:
        table.put(body)
    return table


def find_name(table: KeyTable, key: str) -> str | None:
    """Return the name of the caller that the key proves."""
    proof = table.find(key)
    return proof.caller.name if proof is not None and proof.caller is not None else None


def test_a_key_proves_the_caller_that_its_object_describes() -> None:
    spec = {"owner": "ml@example.com", "maxClass": "batch", "services": ["chat", "*", "team-b/chat"]}
    limits = {"requestsPerMinute": 60, "tokensPerMinute": 1000, "tokensPerDay": 10**6, "concurrentRequests": 4}
    table = make_table(make_api_key("team-a", **spec, limits=limits))
    services = frozenset({"team-a/chat", "team-a/*", "team-b/chat"})
    caller = Caller("team-a/ci", "team-a", "ml@example.com", "batch", Limits(60, 1000, 10**6, 4), services)
    assert table.find(KEY) == Proof(caller)
    assert not caller.is_account


def test_a_key_without_settings_may_use_its_namespace_without_limits() -> None:
    table = make_table(make_api_key("team-a", limits={}))
    assert table.find(KEY) == Proof(Caller("team-a/ci", "team-a", services=frozenset({"team-a/*"})))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (make_key("team-a", 2), UNKNOWN),
        (make_key("team-b"), UNKNOWN),
        (hash_key(KEY), None),
        (f"sk-conveyor-team-a-{hash_key(KEY)}", UNKNOWN),  # the stored hash is no key
        (KEY.upper(), None),
        (f"{KEY}0", None),
        (f" {KEY}", None),
        (f"{KEY}\n", None),
        (KEY.replace("team-a", "team-é"), None),
        ("sk-conveyor-" + "a" * 64 + "-" + "0" * 64, None),  # no namespace is that long
        ("sk-proj-abc", None),
        ("", None),
        ("x" * 8192, None),
    ],
)
def test_other_texts_prove_nothing(text: str, problem: str | None) -> None:
    assert make_table(make_api_key("team-a")).find(text) == (None if problem is None else Proof(None, problem))


def test_a_hash_that_another_namespace_has_copied_proves_nothing_there_and_takes_nothing_away() -> None:
    original, copy = make_api_key("team-a"), make_api_key("team-b", "stolen", KEY)
    for bodies in ((original, copy), (copy, original)):
        assert find_name(make_table(*bodies), KEY) == "team-a/ci"
    assert make_table(copy).find(KEY) == Proof(None, UNKNOWN)


def test_a_deleted_key_proves_nothing_and_leaves_nothing() -> None:
    table = make_table(make_api_key("team-a"), make_api_key("team-a", "two", make_key("team-a", 2)))
    table.delete(make_api_key("team-a"))
    assert table.find(KEY) == Proof(None, UNKNOWN)
    list(table.keep_only(set(), "team-a"))
    assert table.find(make_key("team-a", 2)) == Proof(None, UNKNOWN)
    assert (len(table), table._by_hash) == (0, {})


def test_a_changed_object_replaces_its_hashes() -> None:
    table = make_table(make_api_key("team-a"))
    new = make_key("team-a", 2)
    table.put(make_api_key("team-a", "ci", new))
    assert table.find(KEY) == Proof(None, UNKNOWN)
    assert find_name(table, new) == "team-a/ci"


@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_of_several_objects_with_one_hash_the_lowest_name_counts_until_it_is_deleted(order: tuple[str, ...]) -> None:
    bodies = {name: make_api_key("team-a", name) for name in order}
    table = make_table(*bodies.values())
    table.put(make_api_key("team-a", "b", KEY, owner="ml"))
    assert find_name(table, KEY) == "team-a/a"
    table.delete(bodies["a"])
    assert find_name(table, KEY) == "team-a/b"
    table.delete(bodies["c"])
    assert find_name(table, KEY) == "team-a/b"
    table.delete(bodies["b"])
    assert (table.find(KEY), table._by_hash) == (Proof(None, UNKNOWN), {})


@pytest.mark.parametrize("ends", list(itertools.permutations(["2027-01-15T08:00:00Z", None])), ids=str)
def test_of_a_hash_that_an_object_has_twice_the_earlier_end_counts(ends: tuple[str | None, str | None]) -> None:
    body = make_api_key("team-a", "ci", KEY, KEY)
    for each, end in zip(body["spec"]["hashes"], ends, strict=True):
        each["expires"] = end
    assert make_table(body).find(KEY) == Proof(None, EXPIRED)


@pytest.mark.parametrize(
    ("expires", "of_hash", "is_valid"),
    [
        ("2027-01-15T08:00:01Z", None, True),
        ("2027-01-15T08:00:00Z", None, False),
        (None, "2027-01-15T08:00:01Z", True),
        (None, "2027-01-15T08:00:00Z", False),
        ("2027-01-15T08:00:00Z", "2099-01-01T00:00:00Z", False),
        ("2099-01-01T00:00:00Z", "2027-01-15T08:00:00Z", False),
    ],
)
def test_the_earlier_end_of_key_and_hash_counts(expires: str | None, of_hash: str | None, is_valid: bool) -> None:
    body = make_api_key("team-a", **({"expires": expires} if expires else {}))
    if of_hash:
        body["spec"]["hashes"][0]["expires"] = of_hash
    proof = make_table(body).find(KEY)
    assert proof is not None
    assert (proof.caller is not None, proof.problem) == (is_valid, "" if is_valid else EXPIRED)


def test_in_a_rotation_both_keys_are_valid_until_the_older_one_expires() -> None:
    new = make_key("team-a", 2)
    body = make_api_key("team-a", "ci", new, KEY)
    body["spec"]["hashes"][1]["expires"] = "2027-01-15T08:00:01Z"
    now_unix = [NOW_UNIX]
    table = KeyTable(lambda: now_unix[0])
    table.put(body)
    assert [find_name(table, key) for key in (new, KEY)] == ["team-a/ci", "team-a/ci"]
    now_unix[0] += 1
    assert [find_name(table, key) for key in (new, KEY)] == ["team-a/ci", None]


def test_a_namespace_with_too_many_keys_keeps_the_first_ones_and_takes_none_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys_module, "MAX_KEYS", 3)
    bodies = [make_api_key("team-a", f"k{number}", make_key("team-a", number)) for number in range(5)]
    table = make_table(*bodies, make_api_key("team-b"))
    found = [find_name(table, make_key("team-a", number)) for number in range(5)]
    assert found == ["team-a/k0", "team-a/k1", "team-a/k2", None, None]
    assert (len(table), len(table.unreadable)) == (4, 2)
    assert find_name(table, make_key("team-b")) == "team-b/ci"


def test_keys_beyond_the_limit_of_a_namespace_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "MAX_KEYS", 3)
    table, parsed = KeyTable(lambda: NOW_UNIX), list[str]()
    monkeypatch.setattr(
        keys_module, "parse_key", lambda body: parsed.append(body["metadata"]["name"]) or parse_key(body)
    )
    for number in range(6):
        table.put(make_api_key("team-a", f"k{number}", make_key("team-a", number)))
    table.put(make_api_key("team-a", "k1", make_key("team-a", 9)))
    assert parsed == ["k0", "k1", "k2", "k1"]
    table.delete(make_api_key("team-a", "k0"))
    table.put(make_api_key("team-a", "k5", make_key("team-a", 5)))
    assert find_name(table, make_key("team-a", 5)) == "team-a/k5"


def test_an_object_that_the_gateway_cannot_read_is_skipped() -> None:
    table = make_table(make_api_key("team-a", services=["Not A Name"]))
    assert (len(table), len(table.unreadable)) == (0, 1)


def test_an_object_that_the_gateway_can_no_longer_read_proves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    other = make_key("team-a", 2)
    table = make_table(make_api_key("team-a"), make_api_key("team-a", "two", other))
    table.put(make_api_key("team-a", services=["Not A Name"]))
    assert (table.find(KEY), len(table), len(table.unreadable)) == (Proof(None, UNKNOWN), 1, 1)
    assert "key=team-a/ci consequence=its keys are rejected" in caplog.text
    assert find_name(table, other) == "team-a/two"
    table.put(make_api_key("team-a"))
    assert find_name(table, KEY) == "team-a/ci"


def test_guessing_is_cheap_and_fills_nothing() -> None:
    """10,000 guesses, which take 10 s at 1,000 a second, cost less than 1 s of a processor."""
    table = make_table(make_api_key("team-a"))
    guesses = [make_key("team-a", number) for number in range(2, 10_002)]
    began = time.process_time()
    assert not [guess for guess in guesses if table.find(guess) != Proof(None, UNKNOWN)]
    assert time.process_time() - began < 1.0
    assert len(table._by_hash) == 1
